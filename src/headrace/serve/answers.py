"""News of the engine become answers: one body, or server-sent events.

Owes: OpenAI's order of events (role, text, finish reason, usage, ``[DONE]``), each choice's reason exactly once, the
same text, ids and usage either way. Does not know: HTTP connections, the checks of requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from headrace.serve import logprobs as lp
from headrace.serve.news import News
from headrace.serve.requests import Asked
from headrace.serve.shapes import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Message,
    MessageDelta,
    PromptDetails,
    TextChoice,
    TextLogprobs,
    Usage,
)
from headrace.serve.version import version

if TYPE_CHECKING:
    from headrace.engine.output import Delta
    from headrace.text import Tokenizer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(json: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + json + b"\n\n"


def new_id(prefix: str, request_id: str = "") -> str:
    """The id of an answer: from the client's request id, or drawn."""
    return f"{prefix}-{request_id or secrets.token_hex(16)}"


@dataclass(slots=True)
class Choice:
    """What one choice has become so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Reply(Protocol):
    """How a request is answered; one of the two is called, once."""

    async def whole(self) -> bytes:
        """The JSON body, when all is done."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, several a piece when they come together; the last is ``[DONE]``."""


class _Base:
    """What chat and completions share."""

    whole_object: str
    chunk_object: str

    def __init__(self, id: str, model: str, asked: Asked, news: News, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.news = news
        self.names = lp.TokenNames(tokenizer, asked.tokens_as_ids)
        self._completion_tokens = 0
        self._head: dict[str, Any] = {
            "id": id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"headrace-{version()}",
        }

    def choices(self) -> list[Choice]:
        """One for each choice of each prompt, empty."""
        return [Choice() for _ in range(len(self.news.streams) * self.asked.params.n)]

    async def collected(self) -> list[Choice]:
        """All choices, when they have ended."""
        choices = self.choices()
        async for prompt, deltas in self.news:
            for delta in deltas:
                choices[self.index(prompt, delta)].add(delta)
        self._completion_tokens = sum(len(choice.token_ids) for choice in choices)
        return choices

    def index(self, prompt: int, delta: Delta) -> int:
        """The number of a choice among those of all prompts."""
        return prompt * self.asked.params.n + delta.index

    def usage(self) -> Usage:
        """Each prompt counts once, whatever n is."""
        prompt = sum(len(stream.prompt_token_ids) for stream in self.news.streams)
        cached = sum(stream.cached_tokens for stream in self.news.streams)
        generated = self._completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
        )

    def answer(self, choices: Any, usage: Usage | UnsetType | None, *, chunk: bool, **more: Any) -> bytes:
        """An answer, or a chunk of one, as JSON."""
        kind = self.chunk_object if chunk else self.whole_object
        seed = self.news.streams[0].seed
        return _encode(Answer(**self._head, object=kind, choices=choices, usage=usage, seed=seed, **more))

    @cached_property
    def _frame(self) -> tuple[bytes, bytes]:
        """An event around its choice. The mark is none of the client's: within strings JSON escapes the quotes."""
        mark = b'"choices":['
        around = event(self.answer([], None if self.asked.include_usage else UNSET, chunk=True))
        before, _, after = around.partition(mark)
        return before + mark, after

    def chunk(self, choice: ChatChunkChoice | TextChoice) -> bytes:
        """An event with news of one choice."""
        before, after = self._frame
        return before + _encode(choice) + after

    def last_events(self) -> bytes:
        """What follows the last choice's end."""
        usage = event(self.answer([], self.usage(), chunk=True)) if self.asked.include_usage else b""
        return usage + DONE

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; see `Reply`."""
        begun: set[int] = set()
        async for prompt, deltas in self.news:
            parts = [] if prompt in begun else list(self.first(prompt))
            begun.add(prompt)
            for delta in deltas:
                self._completion_tokens += len(delta.token_ids)
                parts += self.more(self.index(prompt, delta), delta)
            if parts:
                yield b"".join(parts)
        yield self.last_events()

    def first(self, prompt: int) -> Iterable[bytes]:
        """Events before anything else about a prompt's choices."""
        raise NotImplementedError

    def more(self, index: int, delta: Delta) -> Iterable[bytes]:
        """Events for one piece of news."""
        raise NotImplementedError

    def ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        """Token ids for who asked for them."""
        return token_ids if self.asked.token_ids else UNSET


class ChatReply(_Base):
    """Answers /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    async def whole(self) -> bytes:
        """See `Reply`."""
        choices = [self._choice(i, choice) for i, choice in enumerate(await self.collected())]
        stream = self.news.streams[0]
        shows = self.asked.prompt_logprobs and stream.prompt_logprobs is not None
        return self.answer(
            choices,
            self.usage(),
            chunk=False,
            prompt_token_ids=self.ids(stream.prompt_token_ids),
            prompt_logprobs=lp.prompt_logprobs(stream.prompt_logprobs or []) if shows else UNSET,
        )

    def first(self, prompt: int) -> Iterable[bytes]:
        """The role of each choice."""
        role = MessageDelta(role="assistant", content="")
        return [self.chunk(ChatChunkChoice(index=i, delta=role)) for i in range(self.asked.params.n)]

    def more(self, index: int, delta: Delta) -> Iterable[bytes]:
        """Text first, then, in an event of its own, the end."""
        ids = self.ids(delta.token_ids)
        if delta.text or delta.logprobs or (delta.token_ids and self.asked.token_ids):
            says = MessageDelta(content=delta.text)
            shown = self._logprobs(delta.logprobs or ())
            yield self.chunk(ChatChunkChoice(index=index, delta=says, logprobs=shown, token_ids=ids))
        if delta.finish_reason is not None:
            yield self.chunk(
                ChatChunkChoice(
                    index=index,
                    delta=MessageDelta(),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=Message(content="".join(choice.text)),
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=self.ids(choice.token_ids),
        )

    def _logprobs(self, steps: Sequence[Any]) -> ChatLogprobs | None:
        return None if self.asked.logprobs is None else lp.chat_logprobs(steps, self.names, self.asked.logprobs)


class TextReply(_Base):
    """Answers /v1/completions. echoes: the text of each prompt to be said before its continuation, or None."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, id: str, model: str, asked: Asked, news: News, tokenizer: Tokenizer, echoes: Sequence[str] | None
    ) -> None:
        super().__init__(id, model, asked, news, tokenizer)
        self._echoes = echoes
        skip = asked.params.skip_special_tokens
        starts = [len(echo) for echo in echoes or [""] * len(news.streams)]
        self._offsets = [lp.TextOffsets(self.names, start, skip) for start in starts for _ in range(asked.params.n)]

    async def whole(self) -> bytes:
        """See `Reply`."""
        choices = [self._choice(i, choice) for i, choice in enumerate(await self.collected())]
        return self.answer(choices, self.usage(), chunk=False)

    def first(self, prompt: int) -> Iterable[bytes]:
        """The prompt, for each of its choices, if it is to be echoed."""
        if self._echoes is None:
            return ()
        n, echo, shown = self.asked.params.n, self._echoes[prompt], self._prompt_logprobs(prompt)
        return [self.chunk(self._piece(prompt * n + i, echo, shown)) for i in range(n)]

    def more(self, index: int, delta: Delta) -> Iterable[bytes]:
        """Text and end together."""
        if (
            delta.text
            or delta.logprobs
            or delta.finish_reason is not None
            or (delta.token_ids and self.asked.token_ids)
        ):
            shown = self._logprobs(index, delta.logprobs or (), delta.token_ids)
            yield self.chunk(self._piece(index, delta.text, shown, delta))

    def _piece(self, index: int, text: str, logprobs: TextLogprobs | None, delta: Delta | None = None) -> TextChoice:
        return TextChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason if delta else None,
            stop_reason=delta.stop_reason if delta else None,
            token_ids=self.ids(delta.token_ids) if delta else UNSET,
        )

    def _choice(self, index: int, choice: Choice) -> TextChoice:
        prompt = index // self.asked.params.n
        stream = self.news.streams[prompt]
        shown = self._logprobs(index, choice.logprobs, choice.token_ids)
        before = self._prompt_logprobs(prompt) if self._echoes is not None else None
        if shown is not None and before is not None:
            shown = lp.joined(before, shown)
        asks = self.asked.prompt_logprobs and stream.prompt_logprobs is not None
        return TextChoice(
            index=index,
            text=(self._echoes[prompt] if self._echoes is not None else "") + "".join(choice.text),
            logprobs=shown,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            seed=stream.seed,
            token_ids=self.ids(choice.token_ids),
            prompt_token_ids=self.ids(stream.prompt_token_ids),
            prompt_logprobs=lp.prompt_logprobs(stream.prompt_logprobs or []) if asks else UNSET,
        )

    def _logprobs(self, index: int, steps: Sequence[Any], tokens: Sequence[int]) -> TextLogprobs | None:
        if self.asked.logprobs is None:
            return None
        return lp.text_logprobs(steps, tokens[: len(steps)], self.names, self._offsets[index], self.asked.logprobs)

    def _prompt_logprobs(self, prompt: int) -> TextLogprobs | None:
        steps, count = self.news.streams[prompt].prompt_logprobs, self.asked.logprobs
        if steps is None or count is None or self._echoes is None:
            return None
        ids = self.news.streams[prompt].prompt_token_ids
        # What tokenizers add (a BOS, a space) is not in the text: begin so much before it that the ends meet.
        start = len(self._echoes[prompt]) - len(b"".join(map(self.names.bytes, ids)).decode("utf-8", "replace"))
        shown = lp.text_logprobs(steps, ids, self.names, lp.TextOffsets(self.names, start, False), count)
        return msgspec.structs.replace(shown, text_offset=[max(at, 0) for at in shown.text_offset])
