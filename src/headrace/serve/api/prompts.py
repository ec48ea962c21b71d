"""Words become token ids: templates, tokenizing, and the refusal of what can never fit before any of that.

Owes: ids that fit the context, computed off the event loop when the text is long. Does not know: HTTP, the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.base.errors import BadModelFile, RequestError
from headrace.base.log import shown
from headrace.serve.api.requests import Cut, Limits, check_length
from headrace.serve.api.tools import NO_TOOLS, ToolUse
from headrace.text import ChatTemplate, normalise_messages

if TYPE_CHECKING:
    from headrace.text import Tokenizer

LONG = 8192  # characters from which on work leaves the event loop; below it takes less than about 5 ms
VALUES_A_TOKEN = 16  # JSON values in messages, for each token that the context holds
_T = TypeVar("_T")

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given. messages: as the client sent them; they are checked where they are rendered.

    template_kwargs: further variables of the template; documents: one of its variables, if it reads that.
    template: its source, when it is not the model's own. add_special_tokens: beside what the template writes.
    """

    messages: Sequence[Any]
    tools: ToolUse = NO_TOOLS
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Any] | None = None
    template: str | None = None
    add_special_tokens: bool = False


class Prompts:
    """Turns the prompts of requests into token ids for one served model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits

    async def of_chat(self, conversation: Conversation, cut: Cut | None = None) -> list[int]:
        """The ids of the rendered conversation. RequestError(param="messages…"), ContextTooLong."""
        if self._template is None and conversation.template is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        others = (conversation.documents, conversation.template_kwargs)
        given = [*conversation.messages, *conversation.tools.shown, *others]
        long = conversation.template is not None or _is_long(given)
        return await _off_loop(long, self._chat, conversation, cut, given)

    async def of_texts(
        self, prompts: Sequence[Prompt], add_special_tokens: bool, cut: Cut | None = None
    ) -> list[list[int]]:
        """The ids of each prompt. RequestError(param="prompt"), ContextTooLong."""
        return await _off_loop(_is_long(prompts), self._texts, prompts, add_special_tokens, cut)

    async def echoes(self, prompts: Sequence[Prompt]) -> list[str]:
        """Each prompt as text, to be said again before its continuation."""
        return await _off_loop(_is_long(prompts), lambda: [self._echo(prompt) for prompt in prompts])

    def _echo(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token."""
        return max(len(self._tokenizer.token_bytes(i)) for i in range(self._tokenizer.vocab_size))

    def _template_of(self, conversation: Conversation) -> ChatTemplate:
        """The request's own template, or the model's."""
        own = conversation.template
        try:
            template = self._template if own is None else ChatTemplate(own, self._tokenizer)
        except BadModelFile as error:
            raise RequestError(f"chat_template {shown(error.reason)}.", param="chat_template") from None
        assert template is not None
        if conversation.documents and "documents" not in template.source:
            raise RequestError("documents are not read by this chat template; put them in messages.", param="documents")
        return template

    def _chat(self, conversation: Conversation, cut: Cut | None, given: Sequence[Any]) -> list[int]:
        """given: all of the client's that the template gets."""
        template, messages = self._template_of(conversation), conversation.messages
        check_length(len(messages), self._limits.max_model_len, "messages", exact=False)
        self._check_size(self._characters(given), "messages")
        documents = {} if conversation.documents is None else {"documents": list(conversation.documents)}
        rendered = template.render(
            normalise_messages(messages),
            tools=conversation.tools.shown,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **{**conversation.template_kwargs, **documents},
        )
        self._check_size(len(rendered.text), "messages")
        ids = _naming("messages", self._tokenizer.encode_chat, rendered, conversation.add_special_tokens)
        return self._fits(ids, "messages", cut)

    def _texts(self, prompts: Sequence[Prompt], add_special_tokens: bool, cut: Cut | None) -> list[list[int]]:
        return [self._fits(self._ids(prompt, add_special_tokens), "prompt", cut) for prompt in prompts]

    def _ids(self, prompt: Prompt, add_special_tokens: bool) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        self._check_size(len(prompt), "prompt")
        return _naming("prompt", self._tokenizer.encode, prompt, add_special_tokens)

    def _fits(self, ids: list[int], param: str, cut: Cut | None) -> list[int]:
        """Whether an answer fits as well is for the engine to say, which knows how long it may be."""
        if not ids:
            raise RequestError(f"{param} is empty: there is no token to begin from.", param=param)
        if cut is not None:
            ids = cut.of(ids, self._limits.max_model_len - 1)
        check_length(len(ids), self._limits.max_model_len, param)
        return ids

    def _characters(self, messages: Sequence[Any]) -> int:
        """Of all strings in there. RequestError when they are made of more values than a conversation can need."""
        total, most = 0, VALUES_A_TOKEN * self._limits.max_model_len
        for count, length in enumerate(_lengths(messages)):
            if count >= most:
                raise RequestError(f"messages hold more than {most} JSON values.", param="messages")
            total += length
        return total

    def _check_size(self, characters: int, param: str) -> None:
        """A character takes a byte or more, a token at most `_longest`: so many tokens there are at least."""
        most = self._limits.max_model_len
        if characters > most:
            check_length(-(-characters // self._longest), most, param, exact=False)


async def _off_loop(long: bool, work: Callable[..., _T], *args: Any) -> _T:
    return await asyncio.to_thread(work, *args) if long else work(*args)


def _naming(param: str, work: Callable[..., _T], *args: Any) -> _T:
    """Runs `work`; its RequestError, which knows no requests, gets `param`."""
    try:
        return work(*args)
    except RequestError as error:
        error.param = error.param or param
        raise


def _is_long(values: Sequence[Any]) -> bool:
    """Whether they are more than `LONG` characters and values; looks no further than that."""
    total = 0
    return any((total := total + 1 + length) > LONG for length in _lengths(values))


def _lengths(values: Sequence[Any]) -> Iterator[int]:
    """Characters of each string in there, however deep; 0 for what is no string."""
    rest = list(values)
    while rest:
        value = rest.pop()
        yield len(value) if isinstance(value, str) else 0
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
