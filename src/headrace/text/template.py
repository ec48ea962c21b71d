"""Chat templates: messages to the text a model was trained on, with the caller's text kept apart from control tokens.

Owes: `Rendered`, whose text is what the reference renders and whose spans are the control tokens the template wrote.
How: inside the caller's strings, control-token texts get a private-use character after their first one; what is
intact in the output is the template's. The characters are then taken out again.
Does not know: ids, requests.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from headrace.base.errors import BadModelFile, RequestError
from headrace.text.added import Splitter
from headrace.text.lexicon import AddedToken
from headrace.text.messages import normalise_messages
from headrace.text.rendered import Rendered
from headrace.text.sandbox import GUARD, Program
from headrace.text.tokenizer import Tokenizer

_PRIVATE = range(0x100000, 0x10FFFE)  # plane 16, private use
_PRIVATE_TEXT = re.compile("[\U00100000-\U0010fffd]")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_RESERVED = frozenset({"messages", "conversation", "tokenize", "chat_template", "return_dict", "return_tensors", GUARD})
# Texts that a template looks for in what the model said before, such as '</think>' in content.split('</think>').
_LOOKED_FOR = re.compile(
    r"(?:split|startswith|endswith|replace|strip)\(\s*(['\"])(.+?)\1|(['\"])([^'\"]+)\3\s+(?:not\s+)?in\s"
)
_PROBE, _PROBE_NAME = "headrace probe", "headrace_probe"
NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if"
    " the tokenizer does not define one."
)


class ChatTemplate:
    """A model's chat template, bound to the control tokens of its tokenizer. May be shared between threads.

    with_tools: the template for conversations with tools: made of `tool_source`, or the same.
    variables: the names that it may read, such as ``tools`` or ``enable_thinking``.
    Raises BadModelFile for source that is not a Jinja template.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, tool_source: str | None = None) -> None:
        try:
            self._program = Program(source)
        except ValueError as error:
            raise BadModelFile("chat template", f"is not a Jinja template: {error}") from error
        self.source = source
        self.with_tools = ChatTemplate(tool_source, tokenizer) if tool_source else self
        self.variables = self._program.variables
        self._names = dict(tokenizer.names)
        self._control = tokenizer.control
        looked_for = {match[2] or match[4] for match in _LOOKED_FOR.finditer(source)}
        self._user_guard = _Guard(tokenizer.control_texts)
        unguarded = tokenizer.control_texts & looked_for
        self._assistant_guard = _Guard(tokenizer.control_texts - unguarded) if unguarded else self._user_guard
        self._wants_parts = self._probe()

    @staticmethod
    def of(tokenizer: Tokenizer, tools: bool = False) -> ChatTemplate:
        """The tokenizer's own template: the one named ``tool_use`` with tools, if there is one. Raises RequestError
        if there is none.
        """
        named = tokenizer.chat_templates
        source = (named.get("tool_use") if tools else None) or named.get("default")
        if source is None:
            raise RequestError(NO_TEMPLATE, param="messages")
        return ChatTemplate(source, tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """Render `messages` (checked by `normalise_messages` first).

        continue_final_message: leave the last message open for the model to go on; needs add_generation_prompt=False.
        kwargs: further variables of the template, such as enable_thinking.
        Raises RequestError: wrong messages, reserved variables, and whatever the template raises.
        """
        if tools and self.with_tools is not self:
            return self.with_tools.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        _check_options(add_generation_prompt, continue_final_message, kwargs)
        checked = self._adapt(normalise_messages(messages))
        values = {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt, **kwargs}
        try:
            guard, end = _free_characters(self.source, checked, values)
            checked = [self._guarded(message, guard) for message in checked]
            values = {name: self._user_guard.apply(value, guard) for name, value in values.items()}
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply.", param="messages") from None
        last = checked[-1]
        if continue_final_message:
            checked[-1] = _open_ended(last, end)
        text = self._program.run({**self._names, **values, "messages": checked, GUARD: guard})
        return self._cleaned(_cut(text, end, _trail(last)) if continue_final_message else text, guard)

    def _adapt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What this template needs: a system role where it has no developer role, parts where it reads no strings."""
        if "developer" not in self.source:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if self._wants_parts:
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        return messages

    def _guarded(self, message: dict[str, Any], guard: str) -> dict[str, Any]:
        by = self._assistant_guard if message["role"] == "assistant" else self._user_guard
        out: dict[str, Any] = by.apply(message, guard)
        role = message["role"]
        out["role"] = role if role in _ROLES else role[:1] + guard + role[1:]
        return out

    def _cleaned(self, text: str, guard: str) -> Rendered:
        """The text without guards, and the control tokens that are intact in it."""
        spans = [(start, end) for start, end, _ in self._control.find(text)]
        if guard not in text:
            return Rendered(text, tuple(spans))
        at = [match.start() for match in re.finditer(guard, text)]
        shifts = [(bisect_left(at, start), bisect_left(at, end)) for start, end in spans]
        moved = tuple((s - a, e - b) for (s, e), (a, b) in zip(spans, shifts, strict=True))
        return Rendered(text.replace(guard, ""), moved)

    def _probe(self) -> bool:
        """Whether the template reads content only as a list of parts."""
        return not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    @cached_property
    def shows_tools(self) -> bool:
        """Whether a tool that is given to it is in what it renders."""
        function = {"name": _PROBE_NAME, "description": "", "parameters": {"type": "object", "properties": {}}}
        content = [{"type": "text", "text": ""}] if self._wants_parts else ""
        return self._shows(content, _PROBE_NAME, tools=[{"type": "function", "function": function}])

    def _shows(self, content: Any, probe: str = _PROBE, **more: Any) -> bool:
        values = {"tools": None, "add_generation_prompt": True, GUARD: "", **more}
        try:
            text = self._program.run({**self._names, **values, "messages": [{"role": "user", "content": content}]})
        except RequestError:
            return False
        return probe in text


class _Guard:
    """Breaks control-token texts in the caller's strings, also those that a template's own text could complete."""

    def __init__(self, texts: frozenset[str]) -> None:
        self._texts = Splitter(AddedToken(0, text, True) for text in texts if len(text) > 1)
        self._starts = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._ends = frozenset(text[size:] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, texts), default=1) - 1

    def apply(self, value: Any, guard: str) -> Any:
        """A copy of `value` with every string in it guarded, keys of objects too."""
        if isinstance(value, str):
            return value if value.isidentifier() else self._edges(self._inside(value, guard), guard)
        if isinstance(value, Mapping):
            return {self.apply(key, guard): self.apply(item, guard) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.apply(item, guard) for item in value]
        return value

    def _inside(self, text: str, guard: str) -> str:
        """Break whole control texts; again, because a broken one may have hidden another that overlaps it."""
        while starts := [start for start, _, _ in self._texts.find(text)]:
            text = _inserted(text, [start + 1 for start in starts], guard)
        return text

    def _edges(self, text: str, guard: str) -> str:
        """Break a beginning of a control text at the end of `text`, and an end of one at its start; white space may
        lie around.
        """
        end, start = len(text.rstrip()), len(text) - len(text.lstrip())
        sizes = range(1, min(self._longest, end - start) + 1)
        places = {end - size + 1 for size in sizes if text[end - size : end] in self._starts}
        places |= {start for size in sizes if text[start : start + size] in self._ends}
        return _inserted(text, sorted(places), guard) if places else text


def _inserted(text: str, places: Sequence[int], guard: str) -> str:
    edges = [0, *places, len(text)]
    return guard.join(text[start:end] for start, end in pairwise(edges))


def _check_options(add_generation_prompt: bool, continue_final_message: bool, kwargs: Mapping[str, Any]) -> None:
    if add_generation_prompt and continue_final_message:
        message = "continue_final_message needs add_generation_prompt: false; a message is open or answered, not both."
        raise RequestError(message, param="continue_final_message")
    for name in kwargs:
        if name in _RESERVED or name.startswith("headrace_"):
            raise RequestError(f"{name} cannot be set by chat_template_kwargs.", param=f"chat_template_kwargs.{name}")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _strings(list(pair))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _free_characters(*values: Any) -> tuple[str, str]:
    """Two private-use characters that occur nowhere in `values`."""
    taken = {char for text in _strings(list(values)) for char in _PRIVATE_TEXT.findall(text)}
    free = (chr(code) for code in _PRIVATE if chr(code) not in taken)
    found = tuple(islice(free, 2))
    if len(found) < 2:
        raise RequestError("messages use every private-use character of plane 16; leave some out.", param="messages")
    return found[0], found[1]


def _open_ended(message: dict[str, Any], end: str) -> dict[str, Any]:
    """The message with a mark after its content. The space behind the mark tells whether the template strips
    contents.
    """
    content, mark = message["content"], end + " "
    if isinstance(content, str):
        return message | {"content": content + mark}
    return message | {"content": [part | {"text": part["text"] + mark} for part in content]}


def _trail(message: dict[str, Any]) -> str:
    """The white space at the end of a message's content."""
    content = message["content"]
    text: str = content if isinstance(content, str) else content[-1]["text"]
    return text[len(text.rstrip()) :]


def _cut(text: str, end: str, trail: str) -> str:
    """The text up to the mark of `_open_ended`, without the white space `trail` if the template strips contents."""
    before, mark, behind = text.rpartition(end)
    if not mark:
        message = "continue_final_message: the chat template leaves out the content of the last message."
        raise RequestError(message, param="continue_final_message")
    return before if behind.startswith(" ") else before.removesuffix(trail)
