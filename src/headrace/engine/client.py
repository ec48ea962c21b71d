"""The engine from the other side of the socket: submit requests, read their news as text, know when it has died.

Runs on an asyncio loop. Owes each open stream an end: its last news, or an error within a moment of the engine's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import EngineAway, EngineError, HeadraceError, RequestError
from headrace.base.log import log
from headrace.base.settings import EngineSettings
from headrace.core.sampling import SamplingParams
from headrace.engine.grammars import Checker
from headrace.engine.link import Link, NeverReady, Watch
from headrace.engine.loading import TextSide, find, find_draft, open_text
from headrace.engine.messages import (
    NO_TERMS,
    Abort,
    Add,
    AskTrace,
    FromEngine,
    ModelInfo,
    News,
    Quit,
    Refused,
    Stats,
    Stopped,
    Terms,
    ToEngine,
    TraceReply,
    Update,
    Words,
)
from headrace.engine.output import ChoiceText, Delta, Logprobs, RequestMetrics, readable_prompt
from headrace.engine.queue import Queue, Room, Seat
from headrace.engine.requests import checked
from headrace.engine.wire import Start
from headrace.text.grammar import Grammar
from headrace.weights import open_checkpoint


class Stream:
    """The news of one request: an async iterator of lists of `Delta`, one list for what came since the last.

    Ends when every choice has. `aclose`, or leaving an ``async with``, gives the request up.
    accounted: it ends only when the account of each choice is there too; where a stop string has ended one, that comes
    a step later. token_times: by choice, when its tokens came, time.monotonic seconds; None: not noted.
    seat: its place in the client's queue. choices, max_tokens: those of the request.
    cached_tokens: prompt tokens found in the prefix cache; prompt_logprobs: both are known with the first news.
    """

    def __init__(self, client: EngineClient, request: Add, seat: Seat) -> None:
        self.seat = seat
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt
        self.seed = request.seed
        self.max_tokens = request.params.max_tokens
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.metrics = RequestMetrics(arrival=request.arrival)
        self.accounted = False
        self.token_times: dict[int, list[float]] | None = None
        self._client = client
        self._choices = [
            ChoiceText(client.tokenizer, request.params, i, request.prompt) for i in range(request.params.n)
        ]
        self.choices = len(self._choices)
        self._news: list[Update] = []
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        while True:
            deltas = self._deltas()
            if deltas:
                return deltas
            if self._settled() or (self._error is not None and self._finished()):
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nobody reads on: the engine frees what the request holds."""
        self._client.leave(self, abort=not self._finished())

    def cancel(self) -> None:
        """Give the request up from elsewhere: whoever reads the stream hears that it was aborted."""
        if not self._finished():
            self._client.leave(self, abort=True)
            self.accounted = False
            for choice in range(len(self._choices)):
                self.push(Update(self.request_id, choice, [], reason="abort"))

    def push(self, update: Update) -> None:
        """The engine's side: news has come."""
        self._news.append(update)
        if self.token_times is not None:
            self.token_times.setdefault(update.choice, []).extend([time.monotonic()] * len(update.tokens))
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """The engine's side: no more news will come."""
        self._error = error
        self._wake.set()

    def _finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    def _settled(self) -> bool:
        return self._finished() and not (self.accounted and len(self.metrics.accounts) < self.choices)

    def _deltas(self) -> list[Delta]:
        news, self._news = self._news, []
        deltas = []
        for update in news:
            choice = self._choices[update.choice]
            if update.account is not None:
                self.metrics.accounts[update.choice] = update.account
            if choice.finished:
                continue
            self._note(update)
            delta = choice.push(update)
            deltas.append(delta)
            if choice.finished and update.reason is None:
                self._client.queue.ended(self.seat, update.choice)
                self._client.send(Stopped(self.request_id, update.choice, str(delta.stop_reason)))
        if deltas and self._finished():
            self.metrics.finished = time.monotonic()
        if news and self._settled():
            self._client.leave(self, abort=False)
        return deltas

    def _note(self, update: Update) -> None:
        if update.choice == 0:
            self.cached_tokens = update.cached
        self.metrics.scheduled = self.metrics.scheduled or update.scheduled
        self.metrics.first_token = self.metrics.first_token or time.monotonic()
        self.metrics.preemptions = max(self.metrics.preemptions, update.preemptions)
        self.metrics.note_drafts(update)
        if update.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = readable_prompt(update.prompt_logprobs, self._client.tokenizer)


_PROBE = -1  # the ticket of a question that only asks for a sign of life


@dataclass(frozen=True, slots=True)
class Care:
    """What is done about an engine process that dies or hangs.

    restarts: times that it is started again within `window` seconds; after that the client has stopped.
    patience: seconds after which a process that has work, but says nothing and computes nothing, is killed; 0: never.
    """

    restarts: int = 0
    window: float = 3600.0
    patience: float = 0.0


class EngineClient:
    """One engine process, the next when it dies, and the streams that are open on it. Make it with `start`.

    alive: requests are taken. stopped: there will be no engine any more. restarts: how often another was started.
    queue: what was submitted; nothing reaches the engine past it.
    """

    def __init__(self, text: TextSide, info: ModelInfo, link: Link, start: Start, care: Care, queue: Queue) -> None:
        self.info = info
        self.queue = queue
        self.tokenizer = text.tokenizer
        self.template = text.template
        self.alive = True
        self.stopped = asyncio.Event()
        self.restarts = 0
        self._link = link
        self._start = start
        self._care = care
        self._log_format = "human"
        self._closing = False
        self._deaths: list[float] = []  # when, in time.monotonic seconds
        self._streams: dict[str, Stream] = {}
        self._stats = Stats(pages=info.pages, slots=info.slots)
        self._past: Stats | None = None  # what the engines before this one have counted
        self._tickets: dict[int, asyncio.Future[list[dict[str, Any]]]] = {}
        self._ticket = 0
        self._checker = Checker(text.tokenizer, info.vocab_size)
        self._taught = False  # whether this engine knows the vocabulary
        self._life: asyncio.Task[None]

    @classmethod
    async def start(cls, settings: EngineSettings, care: Care | None = None, log_format: str = "human") -> EngineClient:
        """Find the model, start the process, wait until it can take requests; raises what went wrong.

        log_format: of `base.log.FORMATS`, for what the process logs.
        """
        path = await asyncio.to_thread(find, settings)
        link = await Link.open(log_format)
        try:
            text = await asyncio.to_thread(lambda: open_text(settings, open_checkpoint(path)))
            draft = await asyncio.to_thread(find_draft, settings, text.tokenizer)
            start = Start(settings, str(path), text.tokenizer.vocab_size, draft)
            info = await link.begin(start)
        except BaseException:
            link.kill()
            raise
        client = cls(text, info, link, start, care or Care(), Queue.of(settings))
        client._log_format = log_format
        client._life = asyncio.create_task(client._live())
        return client

    async def grammar(self, params: SamplingParams) -> Grammar | None:
        """What `submit` needs of a request with structured outputs; RequestError if they cannot be enforced."""
        if params.structured_outputs is None:
            return None
        return await self._checker.grammar(params.structured_outputs)

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
        """A request on its way. room: of the queue, if it was asked for there already. grammar: if it was made already.

        RequestError at once for what can be known here, CapacityError when the queue is full or the deadline cannot be
        met, DeadlinePassed after it, EngineError without an engine.
        """
        self._check_alive()
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        request = checked(
            prompt_ids, params, self.info, self.tokenizer, request_id=request_id, terms=terms, grammar=grammar
        )
        count, tokens = request.params.n, len(request.prompt)
        if terms.deadline:
            self.queue.check_deadline(terms, tokens, (s.seat for s in self._streams.values()), self._stats)
        with nullcontext(room) if room is not None else self.queue.room(count, count * tokens) as held:
            stream = self._streams[request_id] = Stream(self, request, held.seat(terms, count, tokens))
        if request.grammar is not None and not self._taught:
            self.send(Words(self._checker.vocabulary))
            self._taught = True
        self.send(request)
        return stream

    def stats(self) -> Stats:
        """The latest snapshot that the engine sent."""
        return self._stats

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._link.process.pid

    async def trace(self, last: int = 100) -> list[dict[str, Any]]:
        """The last records of the step trace."""
        self._check_alive()
        self._ticket += 1
        future: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._tickets[self._ticket] = future
        self.send(AskTrace(last, self._ticket))
        return await future

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineError("the engine has stopped") if self.stopped.is_set() else EngineAway()

    async def close(self, timeout: float = 5.0) -> None:
        """End the process: asked first, killed after `timeout` seconds. Open streams end with an error."""
        self._closing = True
        self.send(Quit())
        if not self.alive:
            self._life.cancel()
        await asyncio.wait((self._life,), timeout=timeout)
        await self._link.close(timeout)
        self._checker.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._life

    def send(self, message: ToEngine) -> None:
        """One message; silently nothing when the engine is gone, as its streams will hear."""
        if self.alive:
            self._link.send(message)

    def leave(self, stream: Stream, *, abort: bool) -> None:
        """A stream is done with."""
        self.queue.left(stream.seat)
        if self._streams.pop(stream.request_id, None) is not None and abort:
            self.send(Abort(stream.request_id))

    async def _live(self) -> None:
        """From one engine process to the next."""
        try:
            await self._until_gone()
            while not self._closing and self._may_restart():
                log.error("the engine process died (%s); starting another", await self._cause())
                if await self._restart():
                    await self._until_gone()
        except (HeadraceError, OSError) as error:
            log.error("the engine could not be started again: %s", error)
        finally:
            self.stopped.set()

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._deaths = [then for then in self._deaths if now - then < self._care.window]
        self._deaths.append(now)
        return len(self._deaths) <= self._care.restarts

    async def _restart(self) -> bool:
        """Whether the new process got as far as taking requests; raises what it says is wrong."""
        begun = time.monotonic()
        self._link = await Link.open(self._log_format)
        try:
            self.info = await self._link.begin(self._start)
        except NeverReady:
            return False
        except BaseException:
            self._link.kill()
            raise
        self.alive, self._taught = True, False
        self.restarts += 1
        log.warning("the engine is back after %.1f s", time.monotonic() - begun)
        return True

    async def _cause(self) -> str:
        await self._link.close(1.0)
        code = self._link.process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def _until_gone(self) -> None:
        watching = asyncio.ensure_future(self._watch())
        try:
            while (message := await self._link.read()) is not None:
                self._hear(message)
        except Exception:
            log.exception("the engine's message could not be read")
        finally:
            watching.cancel()
            self._lose(EngineError("the engine process has stopped"))

    async def _watch(self) -> None:
        if not self._care.patience:
            return
        watch, heard = Watch(self._link, self._care.patience), -1
        while not watch.stuck(busy=(busy := bool(self.queue.live or self._tickets))):
            if busy and heard == self._link.heard:
                self.send(AskTrace(1, _PROBE))  # which a process that has nothing to do answers too
            heard = self._link.heard
            await asyncio.sleep(self._care.patience / 8)
        log.error("the engine process has done nothing for %.0f s: ending it", self._care.patience)
        self._link.kill()

    def _lose(self, error: EngineError) -> None:
        """All that was open on the process ends, and whoever is told so finds nothing running."""
        self.alive = False
        self._past = self._stats = self._stats.after_the_end()
        for stream in list(self._streams.values()):
            self.queue.left(stream.seat)
            stream.fail(error)
        for future in self._tickets.values():
            if not future.done():
                future.set_exception(error)
        self._streams.clear()
        self._tickets.clear()

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, News):
            self._stats = message.stats if self._past is None else message.stats.since(self._past)
            for name in message.began:
                stream = self._streams.get(name)
                if stream is not None:
                    self.queue.began(stream.seat)
            for update in message.updates:
                stream = self._streams.get(update.request_id)
                if stream is not None:
                    stream.push(update)
                    if update.reason is not None:
                        self.queue.ended(stream.seat, update.choice)
        elif isinstance(message, Refused):
            stream = self._streams.pop(message.request_id, None)
            if stream is not None:
                self.queue.left(stream.seat)
                stream.fail(RequestError(message.message, param=message.param, code=message.code))
        elif isinstance(message, TraceReply):
            future = self._tickets.pop(message.ticket, None)
            if future is not None and not future.done():
                future.set_result(message.records)
