"""Whatever is asked for together, windows, kept pages, formats, guesses, little room: no bit differs from one alone.

Schedules draw settings that have tests of their own each; what holds for each need not hold for two. The file of kept
pages is also copied while it is written, as a crash would leave it, and the next engine starts on the copy.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from company import Call, Recorder, alone, compare, draw_calls, schedule
from test_speculation import eager

import tiny
from headrace.backends.cpu import CpuBackend
from headrace.backends.cpu.executor import KvFormat
from headrace.runtime.plan import beside, of_path

KINDS = ("gemma3", "gemma2", "mistral-sliding", "llama")  # the last sees everything
KV: tuple[KvFormat, ...] = ("float16", "int8", "bfloat16")
LENGTHS = [1, 31, 32, 33, 64, 97, 128, 200]
TORN = 0.05  # of the steps, after which the file is copied


def draw_guesses(rng: random.Random) -> dict[str, Any] | None:
    others = [{"model": str(tiny.TINY / kind), "num_speculative_tokens": 4} for kind in KINDS]
    copy = {"method": "self", "num_speculative_tokens": 3}
    return rng.choice([None, {"method": "suffix", "shared_history_tokens": 500}, copy, rng.choice(others)])


def cache_bytes(path: Path, kv: KvFormat, context: int, guesses: dict[str, Any] | None) -> int:
    """Of one request that fills the context."""
    subject = of_path(path, CpuBackend(kv=kv))
    if guesses and "model" in guesses:
        subject = beside(subject, of_path(Path(guesses["model"]), CpuBackend(kv=kv)))
    return subject.cache.least_bytes(context)


def run(recorder: Recorder, calls: list[Call], rng: random.Random, torn: Path) -> None:
    """A random schedule, some of whose steps are followed by a crash as far as the copied file can tell."""
    step = recorder.step
    assert recorder.engine.store is not None

    def step_and_copy() -> None:
        step()
        if rng.random() < TORN:
            shutil.copyfile(torn.parent / "kept" / "pages", torn / "pages")

    recorder.step = step_and_copy  # type: ignore[method-assign]
    schedule(recorder, calls, rng, rng.choices(range(len(calls)), k=rng.randint(4, 12)))
    recorder.step = step  # type: ignore[method-assign]


def together(seed: int, folder: Path) -> dict[str, int]:
    """Three engines after each other, on the pages that the last one, or a crash of it, left."""
    rng = random.Random(seed)
    path, kv, context = tiny.TINY / rng.choice(KINDS), rng.choice(KV), rng.choice([64, 128, 256])
    fixed = {"kv_cache_dtype": kv, "max_model_len": context, "quantization": rng.choice([None, "q4_0"])}
    lengths = [n for n in LENGTHS if n < context - 4]
    calls = draw_calls(tiny.VOCAB, 8, seed, lengths, max_tokens=(1, 30, 100, 250))
    wanted, guesses = alone(path, calls, **fixed), draw_guesses(rng)
    least = cache_bytes(path, kv, context, guesses)
    kept, torn = folder / "kept", folder / "torn"
    torn.mkdir(mode=0o700)
    seen = {"rows": 0, "loaded": 0, "drafted": 0, "preempted": 0}
    for _ in range(3):
        recorder = Recorder(
            path, **fixed, threads=rng.choice([1, 2]), max_num_seqs=rng.choice([3, 8]), speculative_config=guesses,
            max_num_batched_tokens=rng.choice([16, 40, 512]), kv_cache_dir=str(kept),
            kv_cache_memory_bytes=int(least * rng.choice([1.0, 1.2, 2.0])),
            kv_cache_dir_bytes=rng.choice([200_000, 1 << 24]),
        )  # fmt: skip
        if guesses is not None:
            eager(recorder.engine)
        run(recorder, calls, rng, torn)
        seen["rows"] += compare(recorder, wanted)
        seen["loaded"] += recorder.engine.scheduler.loaded
        seen["preempted"] += recorder.engine.scheduler.preemptions
        seen["drafted"] += recorder.engine.speculator.tally.drafted if recorder.engine.speculator else 0
        if rng.random() < 0.5:  # it ends while it still has work
            for n in range(4):
                recorder.add(f"0.{n}", calls[n])
                recorder.step()
        recorder.engine.close()
        if rng.random() < 0.5 and (torn / "pages").exists():
            (torn / "pages").replace(kept / "pages")
    return seen


@pytest.mark.parametrize("seed", [9, 11, 13])
def test_no_bit_differs_whatever_comes_together(seed: int, tmp_path: Path) -> None:
    seen = together(seed, tmp_path)
    assert all(seen[name] > 0 for name in ("rows", "loaded", "drafted")), seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 124))
def test_no_bit_differs_in_many_schedules(seed: int, tmp_path: Path) -> None:
    assert together(seed, tmp_path)["rows"] > 0
