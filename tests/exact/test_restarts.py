"""Pages of an earlier process: every row of logits is the one that was computed without them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from company import Recorder, alone, compare, draw_calls, schedule

from headrace.backends.cpu import CpuBackend
from headrace.backends.cpu.executor import KvFormat
from headrace.runtime.load import prepare

LENGTHS = [31, 33, 64, 65, 100, 255, 257, 300]


@pytest.mark.parametrize("kv", ["float16", "int8"])
def test_no_bit_differs_on_pages_of_an_earlier_process(tiny: Path, tmp_path: Path, kv: KvFormat) -> None:
    calls = draw_calls(290, 12, 7, LENGTHS, max_tokens=(1, 5, 40))
    wanted = alone(tiny, calls, kv_cache_dtype=kv)
    loaded = 0
    page_bytes = CpuBackend(kv=kv).page_bytes(prepare(tiny).program)
    for threads, chunk, pages in [(2, 512, 14), (1, 64, 60), (2, 33, 16)]:  # with few, pages go while they are written
        recorder = Recorder(
            tiny,
            threads=threads,
            max_num_batched_tokens=chunk,
            kv_cache_dtype=kv,
            kv_cache_memory_bytes=pages * page_bytes,
            kv_cache_dir=str(tmp_path / "kv"),
        )
        rng = random.Random(chunk)
        for _ in range(2):
            schedule(recorder, calls, rng, rng.sample(range(len(calls)), 6))
            assert compare(recorder, wanted)
        loaded += recorder.engine.scheduler.loaded
        assert recorder.engine.stats().file_traffic[2] == 0
        recorder.engine.close()
    assert loaded > 500


def test_pages_of_other_keys_and_values_are_not_used(tiny: Path, tmp_path: Path) -> None:
    """Another back end, another format: each begins afresh, and then finds its own."""
    (call,) = draw_calls(290, 1, 7, [100], max_tokens=(3,))
    for settings in ({"kv_cache_dtype": "int8"}, {}, {"dtype": "bfloat16"}, {"backend": "reference"}, {}):
        for loaded in (0, 96):
            recorder = Recorder(tiny, kv_cache_dir=str(tmp_path / "kv"), **settings)
            recorder.says("x", call)
            assert recorder.engine.scheduler.loaded == loaded
            recorder.engine.close()
