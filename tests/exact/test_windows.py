"""Models whose layers see a window: what they let go of is room for others, and no answer differs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from company import Call, Recorder, alone, compare, draw_calls, schedule

import tiny
from headrace import SamplingParams
from headrace.backends.cpu import CpuBackend
from headrace.backends.cpu.executor import KvFormat
from headrace.runtime.plan import of_path

CONTEXT, WANTED, CHUNK = 256, 5, 64
KINDS = ("gemma2", "gemma3", "mistral-sliding")  # half of the layers have one, most of them, all of them


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Each fills the context."""
    rng, calls = random.Random(2), []
    for n in range(WANTED):
        params = SamplingParams(max_tokens=CONTEXT - 180, temperature=0.8 * (n % 2), ignore_eos=True)
        calls.append(Call(tuple(rng.randrange(3, tiny.VOCAB) for _ in range(180)), params, n))
    return calls


@pytest.mark.parametrize("kv", ["float16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_conversations_fit_as_were_planned(kind: str, kv: KvFormat, calls: list[Call]) -> None:
    """Over all layers, pages in the bytes that five take would hold fewer."""
    path = tiny.TINY / kind
    cache = replace(of_path(path, CpuBackend(kv=kv)).cache, chunk=CHUNK)
    memory = cache.bytes(CONTEXT, WANTED)
    recorder = Recorder(
        path, max_model_len=CONTEXT, max_num_seqs=WANTED, max_num_batched_tokens=CHUNK, kv_cache_dtype=kv,
        kv_cache_memory_bytes=memory, threads=2, max_inter_token_ms=0,
    )  # fmt: skip
    info = recorder.engine.info
    assert info.cache_bytes == memory, "to the byte"
    assert info.concurrency >= WANTED > memory // cache.page_bytes // (CONTEXT // 32)
    wanted = alone(path, calls, max_model_len=CONTEXT, kv_cache_dtype=kv)
    for n, call in enumerate(calls):
        recorder.add(str(n), call)
    together = 0
    while recorder.engine.has_work:
        recorder.step()
        together = max(together, recorder.engine.stats().running)
    assert together == WANTED
    assert [recorder.answers[str(n)] for n in range(WANTED)] == wanted
    stats = recorder.engine.stats()
    assert stats.preemptions == 0
    assert (stats.slots, stats.slots_used) == (info.slots, 0) and 0 < stats.slots_cached <= info.slots
    recorder.engine.close()


def test_no_bit_differs_where_there_is_little_room() -> None:
    """Room for four conversations: others wait, and hits end where slots are gone."""
    path = tiny.TINY / "gemma3"
    calls = draw_calls(tiny.VOCAB, 12, 9, [1, 20, 33, 64, 90, 120], max_tokens=(5, 60, 120))
    memory = 4 * of_path(path, CpuBackend()).cache.least_bytes(CONTEXT)
    wanted = alone(path, calls, max_model_len=CONTEXT)
    recorder = Recorder(
        path, max_model_len=CONTEXT, max_num_batched_tokens=CHUNK, threads=2, kv_cache_memory_bytes=memory
    )
    for seed in range(3):
        schedule(recorder, calls, random.Random(seed), list(range(len(calls))))
        assert compare(recorder, wanted) > 100
    stats = recorder.engine.stats()
    assert stats.slots == 8 and stats.prefix_hits > 0
    recorder.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_differs_on_pages_of_an_earlier_process(kind: str, tmp_path: Path) -> None:
    path, calls = tiny.TINY / kind, draw_calls(tiny.VOCAB, 8, 4, [64, 100, 200], max_tokens=(1, 5, 20))
    wanted = alone(path, calls, max_model_len=CONTEXT)
    loaded = 0
    for chunk in (512, 40):
        recorder = Recorder(
            path, max_model_len=CONTEXT, max_num_batched_tokens=chunk, kv_cache_dir=str(tmp_path / "kv")
        )
        schedule(recorder, calls, random.Random(chunk), list(range(len(calls))))
        assert compare(recorder, wanted) and recorder.engine.info.slots
        loaded += recorder.engine.scheduler.loaded
        assert recorder.engine.stats().file_traffic[2] == 0
        recorder.engine.close()
    assert loaded > 100
