"""A scripted engine behind the real `Stream`: it says what it is told to, as slowly as it is told to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.sampling import SamplingParams
from headrace.engine.client import Stream
from headrace.engine.grammars import Checker
from headrace.engine.messages import NO_TERMS, Account, Add, ModelInfo, Stats, Stopped, Terms, Update
from headrace.engine.queue import Queue, Room
from headrace.engine.requests import checked
from headrace.text import ChatTemplate, Tokenizer
from headrace.text.grammar import Grammar


class FakeEngine:
    """The surface of `EngineClient`. says: token ids of every answer; pace: seconds a token."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, **info: Any) -> None:
        known: dict[str, Any] = {
            "name": "fake/model",
            "architecture": "fake",
            "max_model_len": 64,
            "vocab_size": tokenizer.vocab_size,
            "page_tokens": 32,
            "pages": 16,
            "page_bytes": 1024,
            "weight_bytes": 1000,
            "max_logprobs": 20,
            "threads": 1,
            "isa": "none",
            "load_seconds": 0.1,
        }
        self.info = ModelInfo(**{**known, **info})
        self.tokenizer, self.template = tokenizer, template
        self.alive = True
        self.pid = os.getpid()
        self.counts = Stats()  # what `stats` tells of besides
        self.stopped = asyncio.Event()
        self.restarts = 0
        self.says = tokenizer.encode("the answer is here", add_special_tokens=False)
        self.pace = 0.0
        self.logprob = -0.5
        self.unlikely = False  # whether what is said is beyond the alternatives
        self.trouble: Callable[[Stream, int], None] | None = None  # called before each token
        self.account = Account(0.25, 0.5, 1.0, [(1, 2, 0.4, 0.5, 3, 0.25)], 3, 0.9, 0.2, 0.3, 1.5, 3, 1, 2, 1)
        self.guessed = (0, 0)  # tokens guessed ahead by the end, and right ones
        self.seen: list[Add] = []
        self.aborted: list[str] = []
        self.queue = Queue(1000, 1000, 100_000)
        self._checker = Checker(tokenizer, self.info.vocab_size)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def grammar(self, params: SamplingParams) -> Grammar | None:
        wanted = params.structured_outputs
        return None if wanted is None else await self._checker.grammar(wanted)

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        terms: Terms = NO_TERMS,
        room: Room | None = None,
        grammar: Grammar | None = None,
    ) -> Stream:
        request = checked(
            prompt_ids, params, self.info, self.tokenizer, request_id=request_id, terms=terms, grammar=grammar
        )
        self.seen.append(request)
        count, tokens = params.n, len(prompt_ids)
        seat = (room or self.queue.room(count, count * tokens)).seat(terms, count, tokens)
        stream = Stream(self, request, seat)  # type: ignore[arg-type]
        self._tasks[request_id] = asyncio.ensure_future(self._play(stream, request))
        return stream

    @property
    def running(self) -> int:
        return sum(not task.done() for task in self._tasks.values())

    def stats(self) -> Stats:
        prompts = sum(len(add.prompt) for add in self.seen)
        return msgspec.structs.replace(self.counts, running=self.running, pages=16, prompt_tokens=prompts)

    async def trace(self, last: int = 100) -> list[dict[str, Any]]:
        return [{"number": i} for i in range(min(last, 3))]

    def send(self, message: object) -> None:
        assert isinstance(message, Stopped)

    def leave(self, stream: Stream, *, abort: bool) -> None:
        self.queue.left(stream.seat)
        if abort and stream.request_id not in self.aborted:
            self.aborted.append(stream.request_id)
            self._tasks[stream.request_id].cancel()

    async def _play(self, stream: Stream, request: Add) -> None:
        limit = len(self.says) if request.params.max_tokens is None else request.params.max_tokens
        said = self.says[:limit]
        prompt = None
        if request.params.prompt_logprobs is not None:
            prompt = [None, *(self._wire(token, request.params.prompt_logprobs) for token in request.prompt[1:])]
        for number in range(max(len(said), 1)):
            await asyncio.sleep(self.pace)
            if self.trouble is not None:
                self.trouble(stream, number)
            tokens = said[number : number + 1]
            reason = None
            if number + 1 >= len(said):
                reason = "length" if limit <= len(self.says) and request.params.max_tokens is not None else "stop"
            for choice in range(request.params.n):
                self._push(stream, request, choice, tokens, prompt, reason)

    def _push(
        self, stream: Stream, request: Add, choice: int, tokens: list[int], prompt: Any, reason: str | None
    ) -> None:
        wanted = request.params.logprobs
        logprobs = None if wanted is None else [self._wire(token, wanted) for token in tokens]
        # A "stop" would swallow the stop token: say that the text is over by its length of scripted tokens.
        stop = reason == "stop"
        stream.push(
            Update(
                request.request_id,
                choice,
                [*tokens, 0] if stop else tokens,
                [*logprobs, self._wire(0, wanted or 0)] if stop and logprobs is not None else logprobs,
                prompt,
                reason,
                cached=1,
                scheduled=request.arrival,
                account=self.account if reason is not None else None,
                drafted=self.guessed[0] if reason is not None else 0,
                accepted=self.guessed[1] if reason is not None else 0,
            )
        )

    def _wire(self, token: int, count: int) -> tuple[int, float, int, tuple[tuple[int, float], ...]]:
        others = [(token + 1 + i) % self.tokenizer.vocab_size for i in range(count)]
        own = [] if self.unlikely else [(token, self.logprob)]
        top = [*own, *((other, self.logprob - 1 - i) for i, other in enumerate(others))]
        return token, self.logprob - 100 * self.unlikely, 1 + count * self.unlikely, tuple(top[:count])
