"""The first promise: a request's bits depend on nothing but itself.

A request's logits are hashed by position while it runs alone, one thread, cold. Then it runs again among random others,
cut into chunks of any size, on warm or cold pages, with too few pages (so that sequences are preempted and start
again), on one thread or two: every row must hash the same, and so must the tokens drawn and all else it is told.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from company import Call, Recorder, alone, compare, draw_calls, schedule

from headrace import SamplingParams
from headrace.backends.cpu import CpuBackend
from headrace.backends.cpu.executor import KvFormat
from headrace.runtime.load import prepare

LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 300]  # around pages and splits
SETTINGS = [  # threads, chunk, prefix cache, pages
    (2, 512, True, 20),
    (1, 64, True, 14),
    (2, 33, False, 16),
    (2, 8, True, 30),
    (1, 512, True, 14),
    (2, 100, True, 16),
    (2, 1, True, 18),
]


def pool(size: int, seed: int) -> list[Call]:
    return draw_calls(290, size, seed, LENGTHS, max_tokens=(1, 5, 20, 90, 130))


def run_schedules(path: Path, calls: list[Call], count: int, seed: int, kv: KvFormat) -> Iterator[tuple[int, int]]:
    """`count` random schedules, spread over SETTINGS; yields (rows compared, preemptions) for each setting."""
    wanted = alone(path, calls, kv_cache_dtype=kv)
    page_bytes = CpuBackend(kv=kv).page_bytes(prepare(path).program)
    for at, (threads, chunk, cached, pages) in enumerate(SETTINGS):
        rng = random.Random(seed + at)
        recorder = Recorder(
            path,
            threads=threads,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=cached,
            kv_cache_memory_bytes=pages * page_bytes,
            kv_cache_dtype=kv,
        )
        compared = 0
        for _ in range(count // len(SETTINGS) + 1):
            schedule(recorder, calls, rng, [rng.randrange(len(calls)) for _ in range(rng.randint(1, 10))])
            compared += compare(recorder, wanted)
        yield compared, recorder.engine.stats().preemptions
        recorder.engine.close()


def check_schedules(path: Path, count: int, seed: int, preempted: int, kv: KvFormat = "float16") -> None:
    """At least `preempted` sequences must have run out of pages on the way."""
    results = list(run_schedules(path, pool(24, seed), count, seed, kv))
    assert all(compared > count for compared, _ in results)
    assert sum(preemptions for _, preemptions in results) >= preempted, "no schedule ran out of pages"


@pytest.mark.slow
@pytest.mark.timeout(900)  # about a minute on two cores that have nothing else to do
def test_no_bit_differs_in_500_random_schedules(tiny: Path) -> None:
    check_schedules(tiny, 500, seed=1, preempted=10)


@pytest.mark.parametrize("kv", ["float16", "bfloat16", "int8"])
def test_no_bit_differs_in_a_few_random_schedules(tiny: Path, kv: KvFormat) -> None:
    check_schedules(tiny, 6, seed=2, preempted=0, kv=kv)


@pytest.mark.slow
def test_no_bit_differs_in_100_random_schedules_over_int8_pages(tiny: Path) -> None:
    check_schedules(tiny, 100, seed=4, preempted=2, kv="int8")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_no_bit_differs_in_thousands_of_random_schedules(tiny: Path, seed: int) -> None:
    check_schedules(tiny, 1000, seed, preempted=20)


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_logits_are_the_same_on_every_instruction_set(tiny: Path, isa: str) -> None:
    calls = pool(6, seed=3)
    assert alone(tiny, calls, isa=isa) == alone(tiny, calls)


def test_a_real_model_says_the_same_in_company(smollm2: Path) -> None:
    """SmolLM2: eight requests together, in chunks, on warm pages, against each alone."""
    rng = random.Random(5)
    calls = [
        Call(
            tuple(rng.randrange(100, 40000) for _ in range(n)),
            SamplingParams(max_tokens=8, ignore_eos=True, temperature=t),
            n,
        )
        for n, t in [(5, 0.0), (40, 0.8), (33, 0.0), (257, 1.0), (300, 0.0), (64, 0.5), (1, 0.0), (511, 0.0)]
    ]
    wanted = alone(smollm2, calls, max_model_len=600)
    for chunk in (512, 37):
        recorder = Recorder(smollm2, max_model_len=600, threads=2, max_num_batched_tokens=chunk, max_num_seqs=8)
        for k in range(2):
            schedule(recorder, calls, random.Random(k), list(range(len(calls))))
            compare(recorder, wanted)
        recorder.engine.close()
