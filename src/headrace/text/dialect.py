"""What a model writes besides plain text, told by its chat template: calls of tools, reasoning.

Owes: the formats, recognised by what the template says, and the readers of them. A template that shows tools in a
format not known here has none, so that they are refused and not misread. Does not know: requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.text.calls import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, CallFormat, CallReader
from headrace.text.reasoning import Thinking, ThinkReader
from headrace.text.speech import Plain, Reader

if TYPE_CHECKING:
    from headrace.text.template import ChatTemplate
    from headrace.text.tokenizer import Tokenizer

# The first row whose texts are all in the template decides. None: a format that we do not read.
_CALLS: tuple[tuple[tuple[str, ...], CallFormat | None], ...] = (
    (("<function=",), None),
    (("<arg_key>",), None),
    (("<tool_call>", "arguments"), HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|python_tag|>",), LLAMA3),
    (('"parameters": ', '{"name": '), LLAMA3),
)
_THINKING = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes calls and reasoning; None: not at all.

    control: those of the marks that are control tokens, and their ids.
    variables: names that the chat template may read.
    """

    calls: CallFormat | None = None
    thinking: Thinking | None = None
    control: Mapping[str, int] = field(default_factory=dict)
    variables: frozenset[str] = frozenset()

    def shown(self, calls: bool) -> list[int]:
        """Control tokens that the readers must see, although others are left out of the text. calls: may come."""
        marks = (*(self.thinking or ()), *(self.calls.marks if self.calls and calls else ()))
        return [self.control[mark] for mark in marks if mark in self.control]

    def reader(self, tools: Collection[str] = (), parallel: bool = True, opened: bool = False) -> Reader:
        """For one answer. tools: that may be called; parallel: more than once.

        opened: the prompt has begun the reasoning (`opened_by`).
        """
        answer: Reader = Plain()
        if self.calls and tools:
            answer = CallReader(self.calls, tools) if parallel else CallReader(self.calls, tools, most=1)
        return ThinkReader(self.thinking, opened, answer) if self.thinking else answer

    def opened_by(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether a rendered prompt ends within reasoning: the model goes on with it."""
        if self.thinking is None:
            return False
        marks, turn = set(self.shown(calls=False)), []
        for id in reversed(prompt):
            if id in tokenizer.special_ids and id not in marks:
                break
            turn.append(id)
        text = tokenizer.decode(turn[::-1])
        return text.rfind(self.thinking.open) > text.rfind(self.thinking.close)


PLAIN = Dialect()


def dialect_of(template: ChatTemplate | None, tokenizer: Tokenizer) -> Dialect:
    """The dialect that a chat template teaches."""
    if template is None:
        return PLAIN
    calls = _calls(template.with_tools)
    thinking = next((marks for marks in _THINKING if marks.close in template.source), None)
    marks = "\n".join([*(calls.marks if calls else ()), *(thinking or ())])
    control = {token.text: token.id for _, _, token in tokenizer.control.find(marks)}
    return Dialect(calls, thinking, control, template.variables | template.with_tools.variables)


def _calls(template: ChatTemplate) -> CallFormat | None:
    source = template.source
    form = next((form for texts, form in _CALLS if all(text in source for text in texts)), None)
    return form if form and template.shows_tools else None
