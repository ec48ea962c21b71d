"""The short set: start-up, prefill and decoding of one model, and the scheduler's share: `make bench`.

Speeds are medians of three; `--model` takes any reference.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from machine import save

from headrace import LLM, SamplingParams

WORK = [(1, 512, 64), (1, 16, 64), (8, 128, 32), (32, 128, 16)]


def timed(llm: LLM, b: int, p: int, n: int, rng: random.Random) -> float:
    prompts = [{"prompt_token_ids": [rng.randrange(100, 40000) for _ in range(p)]} for _ in range(b)]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - start


def measured(llm: LLM, b: int, p: int, g: int) -> dict[str, Any]:
    rng = random.Random(0)
    prefill, decode = [], []
    for _ in range(3):
        first, whole = timed(llm, b, p, 1, rng), timed(llm, b, p, g + 1, rng)
        prefill.append(b * p / first)
        decode.append(b * g / (whole - first))
    records = [r for r in llm.engine.records(g) if r["decode_tokens"] == b]
    python = statistics.median(r["schedule_s"] + r["commit_s"] for r in records)
    step = statistics.median(r["run_s"] for r in records)
    return {
        "sequences": b,
        "prompt": p,
        "prefill_tokens_per_s": statistics.median(prefill),
        "decode_tokens_per_s": statistics.median(decode),
        "step_ms": 1e3 * step,
        "scheduler_us": 1e6 * python,
        "weights_gb_per_s": llm.info.weight_bytes / step / 1e9,
    }


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model")
    args = ap.parse_args()
    start = time.perf_counter()
    with LLM(args.model, max_model_len=2048, enable_prefix_caching=False) as llm:
        loaded = time.perf_counter() - start
        print(f"{llm.info.name}: loaded in {loaded:.2f} s; {llm.info.threads} threads, {llm.info.isa}")
        rows = []
        for work in WORK:
            rows.append(measured(llm, *work))
            print("  ".join(f"{k} {v:.5g}" for k, v in rows[-1].items()))
    print(f"written: {save('run', {'model': llm.info.name, 'load_s': loaded, 'rows': rows})}")


if __name__ == "__main__":
    main()
