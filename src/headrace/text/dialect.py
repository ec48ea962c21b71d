"""What a model writes besides plain text, told by its chat template: calls of tools, reasoning.

Owes: the formats, recognised by what the template says, and the readers of them. A template that shows tools in a
format not known here has none, so that they are refused and not misread. Does not know: requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.text.calls import HERMES, LLAMA3, MISTRAL, CallFormat, CallReader
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
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|python_tag|>",), LLAMA3),
    (('"parameters": ', '{"name": '), LLAMA3),
)
_THINKING = (Thinking("<think>", "</think>"), Thinking("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes calls and reasoning; None: not at all.

    call_ids, thinking_ids: control tokens among the marks.
    variables: names that the chat template may read.
    """

    calls: CallFormat | None = None
    thinking: Thinking | None = None
    call_ids: tuple[int, ...] = ()
    thinking_ids: tuple[int, ...] = ()
    variables: frozenset[str] = frozenset()

    def shown(self, calls: bool) -> tuple[int, ...]:
        """Control tokens that the readers must see, although others are left out of the text. calls: may come."""
        return self.thinking_ids + self.call_ids if calls else self.thinking_ids

    def reader(self, tools: Collection[str] = (), opened: bool = False) -> Reader:
        """For one answer. tools: that may be called. opened: the prompt has begun the reasoning (`opened_by`)."""
        answer: Reader = CallReader(self.calls, tools) if self.calls and tools else Plain()
        return ThinkReader(self.thinking, opened, answer) if self.thinking else answer

    def opened_by(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether a rendered prompt ends within reasoning: the model goes on with it."""
        if self.thinking is None:
            return False
        turn: list[int] = []
        for id in reversed(prompt):
            if id in tokenizer.special_ids and id not in self.thinking_ids:
                break
            turn.append(id)
        text = tokenizer.decode(turn[::-1])
        return text.rfind(self.thinking.open) > text.rfind(self.thinking.close)


PLAIN = Dialect()


def dialect_of(template: ChatTemplate | None, tokenizer: Tokenizer) -> Dialect:
    """The dialect that a chat template teaches."""
    if template is None:
        return PLAIN
    calls = _calls(template)
    thinking = next((marks for marks in _THINKING if marks.close in template.source), None)
    return Dialect(
        calls,
        thinking,
        _control_ids(calls.marks if calls else (), tokenizer),
        _control_ids((thinking.open, thinking.close) if thinking else (), tokenizer),
        template.variables,
    )


def _calls(template: ChatTemplate) -> CallFormat | None:
    source = template.source
    form = next((form for texts, form in _CALLS if all(text in source for text in texts)), None)
    return form if form and template.shows_tools else None


def _control_ids(marks: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(token.id for _, _, token in tokenizer.control.find("\n".join(marks)))
