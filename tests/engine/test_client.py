"""The engine in its own process: streams, aborts, its death, and what it refuses to load."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace import AsyncLLM, RequestError, SamplingParams
from headrace.base.errors import BadModelFile, CapacityError, EngineError, ModelNotFound
from headrace.base.settings import EngineSettings
from headrace.engine.client import EngineClient, Stream
from headrace.engine.llm import LLM
from headrace.engine.messages import Terms
from headrace.engine.output import Delta

SETTINGS = {"max_model_len": 512, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)
PROMPT = [65, 66, 67]


@pytest.fixture
async def client(tiny: Path) -> AsyncIterator[EngineClient]:
    made = await EngineClient.start(EngineSettings.of(str(tiny), **SETTINGS))
    yield made
    await made.close()


async def read(stream: Stream) -> tuple[str, list[int], Delta]:
    text, tokens = "", []
    last = Delta(0, "", [])
    async for deltas in stream:
        for last in deltas:
            text += last.text
            tokens += last.token_ids
    return text, tokens, last


async def settled(client: EngineClient) -> None:
    """Until the engine says that nothing runs or waits and no page is in use; a second at most."""
    for _ in range(100):
        s = client.stats()
        if not (s.running or s.waiting or s.pages_used):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(client.stats())


async def test_many_streams_say_what_each_says_alone(client: EngineClient, tiny: Path) -> None:
    prompts = [[65 + i] * (5 * i + 1) for i in range(9)]
    with LLM(str(tiny), **SETTINGS) as llm:
        alone = [llm.generate({"prompt_token_ids": p}, GREEDY)[0].outputs[0] for p in prompts]
    streams = [client.submit(p, GREEDY, request_id=str(i)) for i, p in enumerate(prompts)]
    for (text, tokens, last), expected in zip(await asyncio.gather(*map(read, streams)), alone, strict=True):
        assert (text, tokens, last.finish_reason) == (expected.text, expected.token_ids, "length")
    await settled(client)


async def test_leaving_a_stream_frees_its_pages(client: EngineClient) -> None:
    stream = client.submit(PROMPT, LONG, request_id="a")
    async with stream:
        async for _ in stream:
            break
    queued = [client.submit(PROMPT, LONG, request_id=f"q{i}") for i in range(10)]
    for other in queued:
        await other.aclose()
    await settled(client)
    assert (await read(client.submit(PROMPT, GREEDY, request_id="a")))[2].finish_reason == "length"


async def test_a_stop_string_ends_the_work(tiny: Path) -> None:
    """Long before the answer's end, though the engine hears of it some steps late: hundreds of so small a model's."""
    client = await EngineClient.start(EngineSettings.of(str(tiny), max_model_len=2048, max_num_seqs=4))
    whole = (await read(client.submit(PROMPT, GREEDY, request_id="0")))[0]
    params = SamplingParams(temperature=0, max_tokens=2040, ignore_eos=True, stop=whole[4:6])
    text, _, last = await read(client.submit(PROMPT, params, request_id="1"))
    assert text == whole[: whole.index(whole[4:6])] and last.stop_reason == whole[4:6]
    await settled(client)
    assert client.stats().generation_tokens < 2000
    await client.close()


async def test_bad_requests_are_refused_before_they_are_sent(client: EngineClient) -> None:
    with pytest.raises(RequestError, match="maximum context length"):
        client.submit([5] * 600, GREEDY, request_id="a")
    with pytest.raises(RequestError, match="token id"):
        client.submit([10**6], GREEDY, request_id="a")
    assert (await read(client.submit(PROMPT, GREEDY, request_id="a")))[2].finish_reason == "length"


async def test_the_trace_names_requests_and_times(client: EngineClient) -> None:
    await read(client.submit(PROMPT, GREEDY, request_id="traced"))
    records = await client.trace(5)
    assert len(records) == 5 and records[-1]["requests"] == ["traced"]
    assert all(r["run_s"] > 0 and r["decode_tokens"] == 1 for r in records)


async def test_when_the_process_dies_every_stream_hears_of_it(client: EngineClient) -> None:
    streams = [client.submit(PROMPT, LONG, request_id=str(i)) for i in range(6)]
    async for _ in streams[0]:
        break
    pid = client._link.process.pid
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineError, match="stopped"):
            await asyncio.wait_for(read(stream), 2)
    assert time.monotonic() - start < 2 and client.stopped.is_set() and not client.alive
    with pytest.raises(EngineError):
        client.submit(PROMPT, GREEDY, request_id="late")
    with pytest.raises(EngineError):
        await client.trace()


async def test_closing_leaves_no_process(tiny: Path) -> None:
    client = await EngineClient.start(EngineSettings.of(str(tiny), **SETTINGS))
    stream = client.submit(PROMPT, LONG, request_id="open")
    pid = client._link.process.pid
    await client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineError):
        await read(stream)


async def test_what_cannot_be_loaded_is_said_by_the_caller(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    with pytest.raises(BadModelFile, match=r"cut\.gguf"):
        await EngineClient.start(EngineSettings.of(str(cut)))
    with pytest.raises(ModelNotFound):
        await EngineClient.start(EngineSettings.of(str(tmp_path / "none.gguf")))
    with pytest.raises(CapacityError, match="max-model-len"):
        await EngineClient.start(EngineSettings.of(str(tiny), kv_cache_memory_bytes=100_000))


async def test_the_async_engine_yields_the_answer_as_it_grows(tiny: Path) -> None:
    idle = AsyncLLM(str(tiny), **SETTINGS)
    with pytest.raises(EngineError, match="not loaded"):
        await anext(idle.generate({"prompt_token_ids": PROMPT}, GREEDY))
    async with AsyncLLM(str(tiny), **SETTINGS) as llm:
        lengths = []
        async for out in llm.generate({"prompt_token_ids": PROMPT}, LONG, "r"):
            lengths.append(len(out.outputs[0].token_ids))
        assert out.finished and lengths[-1] == 480 and lengths == sorted(lengths) and len(lengths) > 1
        seen = 0
        async for grown in llm.generate({"prompt_token_ids": PROMPT}, LONG, "gone"):
            out = grown
            seen += 1
            if seen == 2:
                await llm.abort("gone")
        assert out.outputs[0].finish_reason == "abort"


async def test_each_choice_ends_with_its_account_also_by_a_stop_string(client: EngineClient) -> None:
    whole = (await read(client.submit(PROMPT, GREEDY, request_id="0")))[0]
    params = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True, stop=whole[4:6], n=2)
    stream = client.submit(PROMPT, params, request_id="1")
    stream.accounted, stream.token_times = True, {}
    _, tokens, last = await read(stream)
    assert last.finish_reason == "stop" and sorted(stream.metrics.accounts) == [0, 1]
    for choice, account in stream.metrics.accounts.items():
        assert account.machine > 0 and account.decode_steps > 0
        times = stream.token_times[choice]
        assert times == sorted(times) and times[0] >= stream.metrics.arrival
    assert not client._streams and len(tokens) <= sum(map(len, stream.token_times.values()))
    given_up = client.submit(PROMPT, LONG, request_id="2")
    given_up.accounted = True
    async for _ in given_up:
        given_up.cancel()
    assert not given_up.metrics.accounts
    await settled(client)
    assert client.stats().aborted_machine > 0


async def test_the_queue_knows_what_has_begun_and_ended(tiny: Path) -> None:
    """As the engine says it, whether or not anybody reads."""
    client = await EngineClient.start(EngineSettings.of(str(tiny), **SETTINGS, max_num_queued_reqs=3))
    queue = client.queue
    streams = [client.submit(PROMPT, LONG, request_id=str(i)) for i in range(7)]
    assert (queue.live, queue.waiting, queue.tokens) == (7, 7, 21)
    with pytest.raises(CapacityError, match="max_num_queued_reqs"):
        client.submit(PROMPT, GREEDY, request_id="more")
    await until(lambda: queue.waiting == 3)
    assert (queue.live, queue.tokens) == (7, 9)
    await streams[6].aclose()
    assert (queue.live, queue.waiting) == (6, 2)
    await until(lambda: queue.live == 0)
    assert queue.waiting == queue.tokens == 0
    assert [len((await read(stream))[1]) for stream in streams[:6]] == [480] * 6
    whole = (await read(client.submit(PROMPT, GREEDY, request_id="b")))[0]
    stopped = client.submit(PROMPT, dataclasses.replace(GREEDY, stop=whole[3:5], n=3), request_id="c")
    await read(stopped)
    assert queue.live == 0
    with pytest.raises(RequestError):
        client.submit([10**6], GREEDY, request_id="d")
    assert queue.live == queue.tokens == 0
    await client.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def test_a_tenants_flood_is_not_in_the_way_of_others(tiny: Path) -> None:
    client = await EngineClient.start(EngineSettings.of(str(tiny), max_model_len=512, max_num_seqs=2))
    alone = await read(client.submit(PROMPT, GREEDY, request_id="alone"))
    ended: list[str] = []

    async def ask(name: str, tenant: str) -> None:
        stream = client.submit(PROMPT, GREEDY, request_id=name, terms=Terms(tenant=tenant))
        assert await read(stream) == alone
        ended.append(tenant)

    async with asyncio.TaskGroup() as group:
        for i in range(40):
            group.create_task(ask(f"a{i}", "a"))
        await until(lambda: client.queue.live > 20)  # some may have ended by now
        for i in range(5):
            group.create_task(ask(f"b{i}", "b"))
    assert max(i for i, tenant in enumerate(ended) if tenant == "b") < 35, ended
    await client.close()
