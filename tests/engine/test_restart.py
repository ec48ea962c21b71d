"""An engine process that dies, or hangs, and the one after it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import SamplingParams, StructuredOutputs
from headrace.base.errors import EngineAway, EngineError
from headrace.base.settings import EngineSettings
from headrace.engine.client import Care, EngineClient, Stream
from headrace.engine.link import Watch
from headrace.engine.messages import COUNTERS, Stats

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)
PROMPT = [65, 66, 67]


@pytest.fixture
async def client(tiny: Path) -> AsyncIterator[EngineClient]:
    settings = EngineSettings.of(str(tiny), max_model_len=512, max_num_seqs=4)
    made = await EngineClient.start(settings, Care(restarts=1, patience=1.0))
    yield made
    await made.close()


async def tokens(stream: Stream) -> list[int]:
    return [token async for deltas in stream for delta in deltas for token in delta.token_ids]


async def until(true: Any) -> None:
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError


def pid(client: EngineClient) -> int:
    return client._link.process.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_it_is_started_again_and_says_the_same(client: EngineClient, number: int) -> None:
    before = await tokens(client.submit(PROMPT, GREEDY, request_id="a"))
    counted = client.stats()
    streams = [client.submit(PROMPT, LONG, request_id=f"s{i}") for i in range(6)]
    await until(lambda: client.stats().running)
    os.kill(pid(client), number)
    for stream in streams:
        with pytest.raises(EngineError):
            await asyncio.wait_for(tokens(stream), 10)
        assert client.stats().running == client.stats().pages_used == 0
    with pytest.raises(EngineAway):
        client.submit(PROMPT, GREEDY, request_id="meanwhile")
    with pytest.raises(EngineAway):
        await client.trace()
    assert client.stats().generation_tokens >= counted.generation_tokens
    await until(lambda: client.alive)
    assert await tokens(client.submit(PROMPT, GREEDY, request_id="a")) == before
    assert client.stats().generation_tokens >= counted.generation_tokens + 20
    assert client.stats().steps > counted.steps
    os.kill(pid(client), signal.SIGKILL)
    await asyncio.wait_for(client.stopped.wait(), 5)
    with pytest.raises(EngineError, match="stopped"):
        client.submit(PROMPT, GREEDY, request_id="late")


async def test_an_engine_that_waits_for_nobody_is_left_alone(client: EngineClient) -> None:
    """A stream that is not read, though all of it has come, and a request that the engine knows nothing of."""
    first = pid(client)
    unread = client.submit(PROMPT, GREEDY, request_id="unread")
    await until(lambda: not client.queue.live)
    with client.queue.room(1, 5):
        await asyncio.sleep(2.5)
        assert client.alive
        assert pid(client) == first
    assert len(await tokens(unread)) == 20


async def test_closing_while_it_is_started_again_leaves_no_process(client: EngineClient) -> None:
    first = pid(client)
    os.kill(first, signal.SIGKILL)
    await until(lambda: pid(client) != first)
    second = pid(client)
    await asyncio.wait_for(client.close(), 3)
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    assert client.stopped.is_set()


def test_who_computes_is_not_stuck_however_silent() -> None:
    link: Any = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()), heard=0)
    watch, end = Watch(link, 0.3), threading.Event()

    def work() -> None:
        while not end.is_set():
            pass

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(10):
            assert not watch.stuck(busy=True)
            time.sleep(0.1)
    finally:
        end.set()
        worker.join()


def test_who_speaks_is_not_stuck_nor_who_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.link.processor_seconds", lambda pid: 1.0)
    now = [0.0]
    monkeypatch.setattr("headrace.engine.link.time.monotonic", lambda: now[0])
    link: Any = SimpleNamespace(process=SimpleNamespace(pid=1), heard=0)
    watch = Watch(link, 5.0)

    def after(seconds: float, busy: bool = True) -> bool:
        now[0] += seconds
        return watch.stuck(busy)

    assert not after(0)
    assert not after(4.9)
    link.heard += 1
    assert not after(4.9)
    assert not after(4.9)
    assert not after(60, busy=False)
    assert not after(4.9)
    assert not after(4.9)
    assert after(0.2)


def sum_of(value: Any) -> float:
    return float(sum(value) if isinstance(value, list) else value)


NUMBERS: dict[type, Any] = {
    int: st.integers(0, 1 << 40),
    float: st.integers(0, 1 << 40).map(float),
    list: st.lists(st.integers(0, 99)),
}
STATS = st.builds(Stats, *[NUMBERS[type(value)] for value in msgspec.structs.astuple(Stats())])


@given(st.lists(STATS, min_size=2))
def test_what_only_grows_goes_on_growing(engines: list[Stats]) -> None:
    """Whatever engines follow each other."""
    past = engines[0].after_the_end()
    for stats in engines[1:]:
        seen = stats.since(past)
        for name in COUNTERS:
            new, before, own = (getattr(which, name) for which in (seen, past, stats))
            assert sum_of(new) == sum_of(before) + sum_of(own)
            assert not isinstance(new, list) or all(a >= b for a, b in zip(new, before, strict=False))
        assert (seen.running, seen.pages_used) == (stats.running, stats.pages_used)
        past = seen.after_the_end()
        assert past.running == past.waiting == past.pages_used == past.pages_cached == 0


async def test_the_next_engine_learns_what_grammars_are_made_of(client: EngineClient) -> None:
    wanted = SamplingParams(seed=1, max_tokens=40, structured_outputs=StructuredOutputs(regex="[a-z]{3}-[0-9]{3}"))
    before = await tokens(client.submit(PROMPT, wanted, request_id="a"))
    assert len(before) > 1
    os.kill(pid(client), signal.SIGKILL)
    await until(lambda: not client.alive)
    await until(lambda: client.alive)
    assert await tokens(client.submit(PROMPT, wanted, request_id="b")) == before
