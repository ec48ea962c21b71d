"""Clients of a soak: each acts in one way, most of them badly, and all of them know what may come back."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

from soak.questions import BAD, COMPLETIONS, LAST, Question, joined, long_one, whole

PATIENCE = 120.0  # seconds until a request counts as hung
# Codes, or Anthropic's types, while the engine is being started again; and when the queue is full.
AWAY = frozenset({"engine_dead", "engine_restarting", "overloaded_error", "api_error"})
FULL = frozenset({"queue_full", "rate_limit_error"})


class Wrong(AssertionError):
    """An answer that must not be."""


class Crowd:
    """counts: what happened, by name. wrong: everything that must not have."""

    def __init__(self, url: str, questions: list[Question], seed: int, *, kills: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.kills = kills
        self._questions = questions
        self._rng = random.Random(seed)
        self._address = httpx.URL(url)
        self._client = httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None))
        self._acts: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (8, self.ask), (8, self.stream), (3, self.leave), (3, self.leave_stream), (3, self.bad), (2, self.slow),
            (2, self.rubbish), (2, self.half_closed), (2, self.hurried), (1, self.idle), (1, self.stuck),
            (1, self.look),
        ]  # fmt: skip

    async def run(self, clients: int, until: Callable[[], bool]) -> None:
        """So many at once, one act after the other."""
        await asyncio.gather(*(self._act(until) for _ in range(clients)))

    async def close(self) -> None:
        await self._client.aclose()

    async def _act(self, until: Callable[[], bool]) -> None:
        weights = [weight for weight, _ in self._acts]
        while not until():
            (_, act) = self._rng.choices(self._acts, weights)[0]
            try:
                async with asyncio.timeout(PATIENCE):
                    await act()
                self.counts[act.__name__] += 1
            except TimeoutError:
                self.wrong.append(f"{act.__name__} hung")
            except Wrong as wrong:
                self.wrong.append(f"{act.__name__}: {wrong}")
            except (httpx.TransportError, OSError) as error:
                self.wrong.append(f"{act.__name__}: {error!r}")

    # --- those who behave

    async def ask(self) -> None:
        question = self._rng.choice(self._questions)
        response = await self._client.post(question.path, json=question.body)
        if response.status_code == 200:
            self._same(question, whole(response.json()))
        else:
            await self._away(response)

    async def stream(self) -> None:
        await self._stream(0.0)

    async def slow(self) -> None:
        """Reads as if on a bad line."""
        await self._stream(self._rng.uniform(0.01, 0.2))

    async def _stream(self, pause: float) -> None:
        question = self._rng.choice(self._questions)
        async with self._client.stream("POST", question.path, json={**question.body, "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                await self._away(response)
                return
            events = [event async for event in self._events(response, pause)]
        if events and events[-1] == "[DONE]":
            self._same(question, joined(events[:-1]))
        elif events and events[-1].get("type") in LAST:
            self._same(question, joined(events))
        elif events and self._died(events[-1]):
            self.counts["streams cut"] += 1
        else:
            raise Wrong(f"a stream that just ends: {events[-1:]}")

    async def _events(self, response: httpx.Response, pause: float) -> AsyncIterator[Any]:
        async for line in response.aiter_lines():
            if pause:
                await asyncio.sleep(pause)
            if line.startswith("data: "):
                told = line.removeprefix("data: ")
                yield told if told == "[DONE]" else json.loads(told)

    def _same(self, question: Question, answer: Any) -> None:
        if answer != question.answer:
            raise Wrong(f"{question.body}\n  alone: {question.answer}\n  now:   {answer}")

    async def _away(self, response: httpx.Response) -> None:
        """What a right request may be told instead of its answer."""
        error = response.json()["error"]
        code = _code(error)
        self.counts[f"{response.status_code} {code}"] += 1
        full = response.status_code == 429 and code in FULL and "retry-after" in response.headers
        if not full and not self._died(response.json()):
            raise Wrong(f"{response.status_code} {error}")
        await asyncio.sleep(self._rng.uniform(0.1, 0.5))

    def _died(self, told: Any) -> bool:
        return self.kills and isinstance(told, dict) and _code(told.get("error") or told) in AWAY

    # --- those who leave

    async def leave(self) -> None:
        """Hangs up while the answer is being computed, or waited for."""
        body = {**long_one(self._rng), "n": self._rng.choice((1, 1, 4))}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0, 0.5)):
                await self._client.post(COMPLETIONS, json=body)

    async def leave_stream(self) -> None:
        """Hangs up after some events."""
        most = self._rng.randrange(20)
        body = {**long_one(self._rng), "stream": True}
        async with self._client.stream("POST", COMPLETIONS, json=body) as response:
            if response.status_code == 200:
                async for line in response.aiter_lines():
                    most -= bool(line)
                    if most < 0:
                        break

    # --- those who ask what cannot be

    async def bad(self) -> None:
        body, statuses = self._rng.choice(BAD)
        response = await self._client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        if response.status_code in statuses and "error" in response.json():
            return
        await self._away(response)

    async def hurried(self) -> None:
        """A deadline that may or may not be met: an answer, or a refusal by that name."""
        body = {**long_one(self._rng), "timeout_ms": self._rng.choice((1, 50, 300)), "max_tokens": 50}
        response = await self._client.post(COMPLETIONS, json=body)
        if response.status_code == 200:
            return
        code = response.json()["error"]["code"]
        if code not in ("deadline_infeasible", "deadline_exceeded"):
            await self._away(response)

    async def rubbish(self) -> None:
        """Bytes that are no request, or the beginning of one, and gone."""
        told = self._rng.choice((
            self._rng.randbytes(200), b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{", b"\r\n" * 100, b"",
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            b"\x16\x03\x01\x02",
        ))  # fmt: skip
        _, writer = await self._raw(told)
        await asyncio.sleep(self._rng.uniform(0, 0.2))
        writer.transport.abort() if self._rng.random() < 0.5 else writer.close()

    async def half_closed(self) -> None:
        """Sends a request and then its end of the connection: answered, or taken as gone; never left hanging."""
        reader, writer = await self._raw(_http({"prompt": "x", "max_tokens": 5, "temperature": 0}))
        writer.write_eof()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def stuck(self) -> None:
        """Asks for a stream and reads nothing of it."""
        _, writer = await self._raw(_http({**long_one(self._rng), "stream": True, "logprobs": 20, "n": 4}))
        await asyncio.sleep(self._rng.uniform(0, 3))
        writer.transport.abort()

    async def idle(self) -> None:
        """Connects, says nothing."""
        _, writer = await self._raw(b"")
        await asyncio.sleep(self._rng.uniform(0, 2))
        writer.close()

    async def _raw(self, told: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        writer.write(told)
        with suppress(ConnectionError):
            await writer.drain()
        return reader, writer

    # --- those who look

    async def look(self) -> None:
        """Watchers, whom load must not keep out."""
        for path in ("/metrics", "/health", "/v1/models", "/trace?last=5"):
            response = await self._client.get(path)
            if response.status_code != 200:
                await self._away(response)


def _code(error: dict[str, Any]) -> str:
    return str(error.get("code") or error["type"])


def _http(body: Any) -> bytes:
    told = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(told)}"
    return head.encode() + b"\r\n\r\n" + told
