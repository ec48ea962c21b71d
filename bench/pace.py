"""How well steps are predicted, and how even tokens come while prompts arrive: `python bench/pace.py [MODEL]`.

First: predicted over measured time of steps of 1 to 512 rows, prompts and decoding, after one round of them. Then 8
streams decode while prompts of 512 tokens arrive, without a limit and with the engine's own: time between tokens.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.bench.report import write
from headrace.core.scheduler import Scheduled
from headrace.engine.requests import checked

RESULTS = Path(__file__).parent / "results" / "pace.json"

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
STREAMS, SECONDS, EVERY = 8, 9.0, 1.5
Items = list[Scheduled]


class Steps:
    """Asks an engine, and notes each step's items, predicted and measured seconds."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.rng = random.Random(0)
        self.seen: list[tuple[Items, float, float]] = []
        self._times = llm.engine.times
        self._learn = self._times.learn
        self._times.learn = self._note  # type: ignore[method-assign]
        self._names = 0

    def _note(self, items: Items, seconds: float) -> None:
        self.seen.append((items, self._times.seconds(items), seconds))
        self._learn(items, seconds)

    def add(self, tokens: int, new: int) -> str:
        ids = [self.rng.randrange(100, 40000) for _ in range(tokens)]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        self._names += 1
        call = checked(ids, params, self.llm.info, self.llm.get_tokenizer(), request_id=str(self._names))
        self.llm.engine.add(call)
        return call.request_id

    def run(self, sequences: int, tokens: int, new: int) -> list[tuple[int, float]]:
        """(rows, predicted over measured) of each step."""
        self.seen.clear()
        for _ in range(sequences):
            self.add(tokens, new)
        while self.llm.engine.has_work:
            self.llm.engine.step()
        return [(sum(i.count for i in items), predicted / took) for items, predicted, took in self.seen]


def predicted(llm: LLM) -> dict[str, float]:
    """By kind and rows: the median of predicted over measured in the second and third round."""
    steps = Steps(llm)
    ratios: dict[str, list[float]] = {}
    for turn in range(3):
        for rows in SIZES:
            pieces = [("prompt", steps.run(1, rows, 1))] + ([("decode", steps.run(rows, 8, 4))] if rows <= 64 else [])
            for kind, found in pieces:
                if turn:
                    ratios.setdefault(f"{kind} {rows}", []).extend(ratio for size, ratio in found if size == rows)
    return {name: statistics.median(found) for name, found in ratios.items()}


def gaps(model: str | None, limit: float | None) -> dict[str, Any]:
    """Between tokens of streams that decode while prompts arrive; milliseconds."""
    with LLM(model, max_model_len=4096, enable_prefix_caching=False, max_inter_token_ms=limit) as llm:
        steps = Steps(llm)
        steps.run(1, 300, 20)
        streams = {steps.add(32, 3000): 0.0 for _ in range(STREAMS)}
        asked: dict[str, float] = {}
        between, first = [], []
        began = time.perf_counter()
        while (now := time.perf_counter()) < began + SECONDS:
            if now > began + (len(asked) + 0.5) * EVERY:
                asked[steps.add(512, 1)] = now
            for update in llm.engine.step():
                now = time.perf_counter()
                if update.request_id in asked:
                    first.append(now - asked[update.request_id])
                elif streams[update.request_id]:
                    between.append(now - streams[update.request_id])
                if update.request_id in streams:
                    streams[update.request_id] = now
    percentiles = statistics.quantiles(between, n=100)
    return {
        "median_ms": 1e3 * percentiles[49],
        "p99_ms": 1e3 * percentiles[98],
        "p99_over_median": percentiles[98] / percentiles[49],
        "tokens": len(between),
        "prompts": len(first),
        "time_to_first_token_ms": 1e3 * statistics.median(first),
    }


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with LLM(model, max_model_len=4096, enable_prefix_caching=False) as llm:
        ratios = predicted(llm)
    for name, ratio in ratios.items():
        print(f"predicted / measured, {name:10s} {ratio:5.2f}")
    rows = {}
    for name, limit in (("no limit", 0.0), ("the engine's own", None)):
        rows[name] = gaps(model, limit)
        print(f"{name}: " + "  ".join(f"{k} {v:.4g}" for k, v in rows[name].items()))
    write(RESULTS, "pace", {"model": model}, {"predicted": ratios, "gaps": rows})
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
