"""News of the engine become answers: one body, or server-sent events.

Owes: OpenAI's order of events (role, text, finish reason, usage, ``[DONE]``), each choice's reason exactly once, the
same text, ids and usage either way. Does not know: HTTP connections, the checks of requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from headrace.serve.api import logprobs as lp
from headrace.serve.api.news import News
from headrace.serve.api.requests import Asked
from headrace.serve.api.shapes import Answer, ChatChunkChoice, CompletionDetails, PromptDetails, TextChoice, Usage
from headrace.serve.errors import Problem
from headrace.serve.version import version
from headrace.serve.watch.accounts import Timings, cost_of, guessed_of, timings_of
from headrace.text.speech import CallStart, Piece, Plain, Reader

if TYPE_CHECKING:
    from headrace.engine.output import Delta
    from headrace.text import Detokenizer, Tokenizer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(json: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + json + b"\n\n"


def new_id(prefix: str, request_id: str = "") -> str:
    """``chatcmpl-…``, ``call_…``: the prefix with its separator, then the client's request id, or what is drawn."""
    return prefix + (request_id or secrets.token_hex(16))


class Turn:
    """One choice's text taken apart as it comes. calls: ids of its calls of tools, for the client to answer by.

    new_call: makes such an id. detokenizer: a new one, as makes the text; without, nobody counts `reasoning_tokens`.
    """

    def __init__(
        self,
        reader: Reader | None = None,
        new_call: Callable[[], str] = lambda: new_id("call_"),
        detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> None:
        self.calls: list[str] = []
        self._reader = reader or Plain()
        self._new_call = new_call
        self._detokenizer = detokenizer() if detokenizer else None
        self._ids: list[int] = []
        self._counted = self._size = 0  # of the ids: those that belong to the reasoning, characters of their text

    def pieces(self, delta: Delta) -> list[Piece]:
        """What is certain after that news; everything once the choice has ended."""
        pieces = self._reader.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        self.calls += [self._new_call() for piece in pieces if isinstance(piece, CallStart)]
        if self._detokenizer is not None:
            self._ids += delta.token_ids
        return pieces

    def reason(self, delta: Delta) -> str | None:
        """The finish reason as clients know it: who hears of tool_calls can read the arguments of each."""
        whole = self.calls and not self.broken
        return "tool_calls" if whole and delta.finish_reason == "stop" else delta.finish_reason

    @property
    def broken(self) -> bool:
        """Whether the arguments of a call broke off, at a stop string or because the model wrote no JSON."""
        return self._reader.broken

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens up to the end of the reasoning so far; None for a model that does not reason."""
        if self._detokenizer is None:
            return None
        while self._size < self._reader.reasoned and self._counted < len(self._ids):
            self._size += len(self._detokenizer.push(self._ids[self._counted : self._counted + 1]))
            self._counted += 1
        return self._counted


@dataclass(slots=True)
class Choice:
    """All of one choice. text: as the model said it; pieces: what it is made of, not yet joined."""

    turn: Turn = field(default_factory=Turn)
    text: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Take news in."""
        self.text.append(delta.text)
        self.pieces += self.turn.pieces(delta)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = self.turn.reason(delta), delta.stop_reason


class Reply(Protocol):
    """How a request is answered: by `whole` or `events`, once."""

    asked: Asked
    news: News

    async def whole(self) -> bytes:
        """The JSON body, when all is done."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, several a piece when they come together; the last says that all is well and over."""

    def failed(self, problem: Problem) -> bytes:
        """The last event of a stream that broke off."""


class OpenAIReply:
    """What the answers of chat and completions share. turn: makes one for each choice of each prompt."""

    whole_object: str
    chunk_object: str

    def __init__(
        self, id: str, model: str, asked: Asked, news: News, tokenizer: Tokenizer, turn: Callable[[], Turn] = Turn
    ) -> None:
        self.asked = asked
        self.news = news
        self.turns = [turn() for _ in range(len(news.streams) * asked.params.n)]
        self.names = lp.TokenNames(tokenizer, asked.tokens_as_ids)
        self._tokens = [0] * len(self.turns)  # by choice
        self._held: dict[int, Delta] = {}
        self._head: dict[str, Any] = {
            "id": id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"headrace-{version()}",
        }

    def failed(self, problem: Problem) -> bytes:
        """See `Reply`; no ``[DONE]`` follows it."""
        return event(problem.json())

    async def collected(self) -> list[Choice]:
        """All choices, when they have ended."""
        choices = [Choice(turn) for turn in self.turns]
        async for prompt, deltas in self.news:
            for delta in deltas:
                choices[self.index(prompt, delta)].add(delta)
        self._tokens = [len(choice.token_ids) for choice in choices]
        return choices

    def index(self, prompt: int, delta: Delta) -> int:
        """The number of a choice among those of all prompts."""
        return prompt * self.asked.params.n + delta.index

    def usage(self) -> Usage:
        """Each prompt counts once, whatever n is."""
        prompt = sum(len(stream.prompt_token_ids) for stream in self.news.streams)
        cached = sum(stream.cached_tokens for stream in self.news.streams)
        generated = sum(self._tokens)
        price = self.news.price_per_hour
        cost = UNSET if price is None else cost_of(self.news.streams, price)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
            completion_tokens_details=self._details(),
            cost=UNSET if cost is UNSET else cost.prompt + cost.completion,
            cost_details=cost,
        )

    def _details(self) -> CompletionDetails | UnsetType:
        counts = [count for turn in self.turns if (count := turn.reasoning_tokens) is not None]
        guessed = guessed_of(self.news.streams)
        if not counts and guessed is None:
            return UNSET
        right, wrong = guessed or (UNSET, UNSET)
        return CompletionDetails(
            reasoning_tokens=sum(counts) if counts else UNSET,
            accepted_prediction_tokens=right,
            rejected_prediction_tokens=wrong,
        )

    def timings(self) -> Timings | UnsetType:
        """Where the time went, for who asked; known when all has ended."""
        return timings_of(self.news.streams, self._tokens) if self.asked.timings else UNSET

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
        if self.asked.usage_always:
            return event(self.answer([choice], self.usage(), chunk=True))
        before, after = self._frame
        return before + _encode(choice) + after

    def last_events(self) -> bytes:
        """What follows the last choice's end."""
        if not (self.asked.include_usage or self.asked.timings):
            return DONE
        usage = self.usage() if self.asked.include_usage else UNSET
        return event(self.answer([], usage, chunk=True, timings=self.timings())) + DONE

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; see `Reply`."""
        begun: set[int] = set()
        async for prompt, deltas in self.news:
            parts = [] if prompt in begun else list(self.first(prompt))
            begun.add(prompt)
            for delta in deltas:
                index = self.index(prompt, delta)
                self._tokens[index] += len(delta.token_ids)
                if (ready := self._ready(index, delta)) is not None:
                    parts += self.more(index, ready)
            if parts:
                yield b"".join(parts)
        yield self.last_events()

    def _ready(self, index: int, delta: Delta) -> Delta | None:
        """What is to be sent of a choice now: nothing while it is less than the client wants at once."""
        if self.asked.interval == 1:
            return delta
        if (held := self._held.pop(index, None)) is not None:
            delta = held.then(delta)
        if delta.finish_reason is not None or len(delta.token_ids) >= self.asked.interval:
            return delta
        self._held[index] = delta
        return None

    def first(self, prompt: int) -> Iterable[bytes]:
        """Events before anything else about a prompt's choices."""
        raise NotImplementedError

    def more(self, index: int, delta: Delta) -> Iterable[bytes]:
        """Events for one piece of news."""
        raise NotImplementedError

    @property
    def tells_prompt(self) -> bool:
        """Whether something was asked about the prompt."""
        return self.asked.token_ids or self.asked.prompt_text

    def prompt_text(self, prompt: int) -> str | UnsetType:
        """The text of a prompt's ids, for who asked for it."""
        return self.names.of(self.news.streams[prompt].prompt_token_ids) if self.asked.prompt_text else UNSET

    def ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        """Token ids for who asked for them."""
        return token_ids if self.asked.token_ids else UNSET
