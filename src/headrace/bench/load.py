"""Requests to an OpenAI-compatible server as they would come from many clients, and what these clients saw.

Every answer is streamed. Names and meanings of the figures are those of `vllm bench serve`: time to first token (TTFT),
time between pieces of text (ITL), (end - first token) / (tokens - 1) (TPOT), from sending to the last piece (E2EL).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import uvicorn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.base.errors import SettingError
from headrace.bench.client import Connection, Reply, Target
from headrace.bench.report import per_million, quantiles
from headrace.bench.work import Ask

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
_TICK = 0.5  # seconds between two looks at the progress


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def says(self) -> bool:
        """Whether it brings text."""
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Cost(msgspec.Struct):
    prompt: float = 0.0
    completion: float = 0.0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_details: _Cost | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Seen:
    """What a client saw of one answer: when its request was sent, when pieces of text came; tokens as the server
    counted them; cost: dollars for prompt and answer, if it tells. error: why there is no whole answer."""

    sent: float
    times: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    cost: tuple[float, float] | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the last piece."""
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 of a single one."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """How to ask. endpoint: of ENDPOINTS. model: the name the server knows, or None to take the first that it lists."""

    target: Target
    endpoint: str = ENDPOINTS[0]
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Those of every request."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def post(self, ask: Ask, model: str) -> bytes:
        """The whole request."""
        asked = {"prompt": ask.text} if self.endpoint == ENDPOINTS[0] else {"messages": [_message(ask)]}
        body = {
            "model": model,
            **asked,
            "max_tokens": ask.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra,
        }
        return self.target.request("POST", self.endpoint, self.headers, json.dumps(body).encode())


def _message(ask: Ask) -> dict[str, str]:
    return {"role": "user", "content": ask.text}


def measured(
    api: Api,
    work: Sequence[Ask],
    *,
    concurrency: int | None = None,
    warmups: int = 1,
    goals: Mapping[str, float] | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Sends requests when they are due and tells what came of them. goals: see `base.goals`.

    concurrency: requests open at most; those that are due wait. SettingError if the server does not answer at all.
    """
    loop = uvicorn.Config("").get_loop_factory()  # the fastest that is installed
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(_measured(api, work, concurrency or len(work), warmups, goals or {}, show))


async def _measured(
    api: Api, work: Sequence[Ask], concurrency: int, warmups: int, goals: Mapping[str, float], show: bool
) -> dict[str, Any]:
    pool = _Connections(api.target)
    try:
        model = api.model or await _first_model(api, pool)
        for _ in range(warmups):
            seen = read(await pool.exchange(api.post(work[0], model), Reply()))
            if seen.error:
                raise SettingError(f"the server does not answer a first request: {seen.error}", param="base_url")
        requests = [api.post(ask, model) for ask in work]
        replies = [Reply() for _ in work]
        seconds = await _send(pool, work, requests, replies, concurrency, _Progress(replies, show))
    finally:
        pool.close()
    return results([read(reply) for reply in replies], seconds, goals)


async def _send(
    pool: _Connections,
    work: Sequence[Ask],
    requests: Sequence[bytes],
    replies: Sequence[Reply],
    concurrency: int,
    progress: _Progress,
) -> float:
    """Sends each when it is due, `concurrency` at once at most; seconds until the last has ended."""
    room = asyncio.Semaphore(concurrency)
    start = time.perf_counter()

    async def one(number: int) -> None:
        await asyncio.sleep(max(0.0, start + work[number].at - time.perf_counter()))
        async with room:
            await pool.exchange(requests[number], replies[number])
        progress.end(replies[number])

    watching = asyncio.ensure_future(progress.watch())
    try:
        await asyncio.gather(*(one(number) for number in range(len(work))))
        return time.perf_counter() - start
    finally:
        watching.cancel()


class _Connections:
    """Connections to one server; those that are free are used again."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._free: list[Connection] = []

    async def exchange(self, request: bytes, reply: Reply) -> Reply:
        """One exchange; what goes wrong is in the reply."""
        while self._free:
            connection = self._free.pop()
            if connection.usable:
                await self._on(connection, request, reply)
                if reply.pieces or not reply.failure:
                    return reply
                reply.failure = None  # an idle connection that the server was about to close
        reply.sent = time.perf_counter()
        try:
            connection = await Connection.open(self._target)
        except OSError as error:
            reply.failure = f"no connection to {self._target.host}:{self._target.port}: {error.strerror or error}"
            return reply
        await self._on(connection, request, reply)
        return reply

    async def _on(self, connection: Connection, request: bytes, reply: Reply) -> None:
        await connection.exchange(request, reply)
        if connection.usable:
            self._free.append(connection)

    def close(self) -> None:
        """Close those that are free."""
        for connection in self._free:
            connection.close()


async def _first_model(api: Api, pool: _Connections) -> str:
    reply = await pool.exchange(api.target.request("GET", "/v1/models", api.headers), Reply())
    body = b"".join(part for _, part in reply.body())
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        why = reply.failure or f"GET /v1/models answered {reply.status}"
        if reply.status == 401:
            why += "; put a key into the environment's OPENAI_API_KEY"
        where = f"{api.target.host}:{api.target.port}"
        raise SettingError(f"the server at {where} names no model: {why}", param="base_url") from None


def read(reply: Reply) -> Seen:
    """What a client saw of an answer."""
    seen = Seen(reply.sent, error=reply.failure)
    if seen.error is None and reply.status != 200:
        text = b"".join(part for _, part in reply.body())[:200].decode(errors="replace")
        seen.error = f"status {reply.status}: {text}"
    if seen.error is not None:
        return seen
    whole = False
    for when, data in _events(reply.body()):
        if data == b"[DONE]":
            whole = True
            break
        try:
            event = _decode(data)
        except msgspec.MsgspecError:
            seen.error = f"an event that is no completion: {data[:100].decode(errors='replace')}"
            return seen
        if event.error is not None:
            seen.error = f"an error in the stream: {event.error}"
            return seen
        if any(choice.says() for choice in event.choices):
            seen.times.append(when)
        reasons = [choice.finish_reason for choice in event.choices if choice.finish_reason]
        if broken := [reason for reason in reasons if reason in ("abort", "error")]:
            seen.error = f"an answer that ended with {broken[0]!r}"
            return seen
        whole = whole or bool(reasons)
        if event.usage is not None:
            seen.input_tokens, seen.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            told = event.usage.cost_details
            seen.cost = None if told is None else (told.prompt, told.completion)
    if not whole:
        seen.error = "an answer that breaks off: neither a finish_reason nor [DONE]"
    elif not seen.times:
        seen.error = "an answer without text"
    seen.output_tokens = seen.output_tokens or len(seen.times)  # of servers that do not count
    return seen


def _events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(when, data) of server-sent events."""
    rest = b""
    for when, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line[5:].strip()


def results(seen: Sequence[Seen], seconds: float, goals: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run that took so many seconds; keys are those of `vllm bench serve`."""
    good = [one for one in seen if one.error is None]
    read_tokens, written = sum(s.input_tokens for s in good), sum(s.output_tokens for s in good)
    costs = [one.cost for one in good if one.cost is not None]  # of all of them, or of none
    goodput = sum(_meets(one, goals) for one in good) / seconds
    return {
        "duration": seconds,
        "completed": len(good),
        "failed": len(seen) - len(good),
        "errors": dict(Counter(one.error for one in seen if one.error is not None)),
        "total_input_tokens": read_tokens,
        "total_output_tokens": written,
        "request_throughput": len(good) / seconds,
        **({"request_goodput": goodput} if goals else {}),
        "output_throughput": written / seconds,
        "total_token_throughput": (read_tokens + written) / seconds,
        **(per_million(sum(c[0] for c in costs), sum(c[1] for c in costs), read_tokens, written) if costs else {}),
        **quantiles("ttft", [one.ttft for one in good]),
        **quantiles("tpot", [one.tpot for one in good if one.output_tokens > 1]),
        **quantiles("itl", [b - a for one in good for a, b in pairwise(one.times)]),
        **quantiles("e2el", [one.e2el for one in good]),
    }


def _meets(seen: Seen, goals: Mapping[str, float]) -> bool:
    return all(1e3 * getattr(seen, name) <= limit for name, limit in goals.items())


class _Progress:
    """A line on standard error where that is a terminal, drawn only now and then: it costs what it measures."""

    def __init__(self, replies: Sequence[Reply], show: bool) -> None:
        self._replies = replies
        self._quiet = not (show and sys.stderr.isatty())
        self.failed = self.ended = 0

    def end(self, reply: Reply) -> None:
        """Counts one that has ended."""
        self.ended += 1
        self.failed += reply.failure is not None

    async def watch(self) -> None:
        """Draws until it is cancelled."""
        if self._quiet:
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests, {task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
            task, before = bar.add_task("", total=len(self._replies)), 0
            while True:
                pieces = sum(len(reply.pieces) for reply in self._replies)
                rate = (pieces - before) / _TICK
                bar.update(task, completed=self.ended, description=f"{self.failed} failed, {rate:,.0f} pieces/s")
                bar.refresh()
                before = pieces
                await asyncio.sleep(_TICK)
