"""Cost of the native sampler: microseconds a row, one thread.

    PYTHONPATH=src python bench/sampler.py [isa] [rows]

Logits look like a language model's: a bulk around zero and a short head of likely tokens above it. Beside each time
stands the rate at which it reads the row's float32 logits once, to be held against what the machine can stream.
"""

from __future__ import annotations

import sys
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace import _native

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 64 penalties": {"temperature": 0.0, "repetition": 1.1, "penalties": 64},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "greedy, mask of half": {"temperature": 0.0, "mask": True},
    "T=1": {"temperature": 1.0},
    "T=1, 64 penalties": {"temperature": 1.0, "repetition": 1.1, "penalties": 64},
    "T=1, 5 logprobs": {"temperature": 1.0, "logprobs": 5},
    "T=0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "T=0.8, top_k 40": {"temperature": 0.8, "top_k": 40},
    "T=0.8, top_k 40, top_p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "T=1, min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def logits_like_a_model(rows: int, vocab: int) -> NDArray[np.float32]:
    """float32 [rows, vocab]: normal noise of deviation 2, and 60 raised tokens that fall off from 18."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, vocab), np.float32) * np.float32(2)
    for row in x:
        row[rng.choice(vocab, 60, replace=False)] = 18 - 2.2 * np.log1p(np.arange(60)) + rng.normal(0, 0.5, 60)
    return x


def parameters(
    rows: int, vocab: int, *, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0,
    repetition: float = 1, penalties: int = 0, logprobs: int = -1, mask: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The arrays of `headrace.program.step.Sampling`, the same for every row but for the position."""

    def full(value: float, kind: type = np.int32) -> NDArray[Any]:
        return np.full(rows, value, kind)

    rng = np.random.default_rng(1)
    words = rng.integers(-(2**31), 2**31, (1, -(-vocab // 32))).astype(np.int32)
    return {
        "temperature": full(temperature, np.float32), "top_k": full(top_k), "top_p": full(top_p, np.float32),
        "min_p": full(min_p, np.float32), "repetition": full(repetition, np.float32),
        "presence": full(0, np.float32), "frequency": full(0, np.float32), "seed": full(5, np.uint64),
        "position": np.arange(rows, dtype=np.int32), "choice": full(0), "target": full(-1), "logprobs": full(logprobs),
        "bias_indptr": np.zeros(rows + 1, np.int32), "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
        "penalty_indptr": np.arange(rows + 1, dtype=np.int32) * penalties,
        "penalty_ids": rng.integers(0, vocab, rows * penalties).astype(np.int32),
        "penalty_counts": np.ones(rows * penalties, np.int32),
        "mask_rows": full(0 if mask else -1), "masks": words,
    }  # fmt: skip


def best_of(times: int, isa: str, logits: NDArray[np.float32], at: dict[str, Any]) -> float:
    """Microseconds a row, the best of `times` calls."""
    best = float("inf")
    for _ in range(times):
        start = perf_counter_ns()
        _native.sample(isa, logits, logits.shape[1], **at)
        best = min(best, (perf_counter_ns() - start) / 1000 / len(logits))
    return best


def main(isa: str = "", rows: str = "64") -> None:
    for vocab in (49152, 262144):
        logits = logits_like_a_model(int(rows), vocab)
        print(f"{rows} rows x {vocab}, {isa or 'best'}")
        for name, case in CASES.items():
            us = best_of(7, isa, logits, parameters(int(rows), vocab, **case))
            print(f"  {name:30} {us:8.1f} us/row {vocab * 4e-3 / us:7.1f} GB/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
