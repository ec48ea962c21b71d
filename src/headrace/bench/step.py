"""One step, against what the machine could do: milliseconds, bytes and multiply-adds a second, share of the roof.

A step's time is all of it: scheduling, arrays, the native call, what is done with its tokens.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from headrace.backends.cpu import CpuExecutor
from headrace.base.errors import CapacityError, EngineError, SettingError
from headrace.base.settings import PAGE, EngineSettings
from headrace.bench.offline import opened
from headrace.bench.work import Lengths, asks
from headrace.core.sampling import SamplingParams
from headrace.engine.llm import LLM
from headrace.engine.requests import checked
from headrace.program import Sampled, Step
from headrace.program.cost import Load, total
from headrace.program.roof import Rates, least_seconds


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was run: its extents; seconds of all of it, and of the executor's call alone."""

    load: Load
    seconds: float
    native: float


class _Watched:
    """An executor that notes what it was asked and how long it took."""

    def __init__(self, executor: CpuExecutor, kv_bytes: float) -> None:
        self._run, self._kv_bytes = executor.run, kv_bytes
        self.weight_bytes = executor.weight_bytes
        self.page_bytes, self.slot_bytes = executor.page_bytes, executor.slot_bytes
        self.threads, self.isa = executor.threads, executor.isa
        self.close, self.rates, self.page = executor.close, executor.rates, executor.page
        self.load, self.seconds = Load([], [], 0), 0.0

    def run(self, step: Step) -> Sampled:
        start = time.perf_counter()
        out = self._run(step)
        self.seconds = time.perf_counter() - start
        rows = (step.query_start[1:] - step.query_start[:-1]).tolist()
        self.load = Load(rows, step.context.tolist(), len(step.logit_rows), self._kv_bytes)
        return out


class StepBench:
    """A loaded model whose steps are measured. Nobody uses it, it caches no prefixes, and `max_inter_token_ms` is 0."""

    def __init__(self, llm: LLM) -> None:
        executor = llm.engine.model.executor
        if not isinstance(executor, CpuExecutor):
            raise SettingError("only the cpu back end's steps can be measured", param="backend")
        self.llm = llm
        self._executor = executor
        self._watched = _Watched(executor, llm.engine.model.kv_bytes)
        llm.engine.runner.executor = self._watched
        self._bf16 = llm.settings.dtype == "bfloat16"
        self._budget = llm.settings.max_num_batched_tokens
        self._seed = 0

    def decode(self, sequences: int, context: int, steps: int) -> dict[str, Any]:
        """The median step of `sequences` that all decode, from `context` tokens on."""
        before = self._executor.rates()
        self._begin(sequences, context, steps)
        taken = [self._step() for _ in range(steps)]
        self._end()
        if any(len(step.load.rows) != sequences for step in taken):
            raise EngineError(f"{sequences} sequences did not stay together")
        return self._told("decode", [_middle(taken)], faster(before, self._executor.rates()))

    def prefill(self, tokens: int, rounds: int = 3) -> dict[str, Any]:
        """A prompt alone, in as many steps as it takes; the median of so many."""
        before = self._executor.rates()
        runs = [self._prompt(tokens) for _ in range(rounds + 1)][1:]
        chosen = sorted(runs, key=lambda steps: sum(step.seconds for step in steps))[len(runs) // 2]
        return self._told("prefill", chosen, faster(before, self._executor.rates()))

    def phases(self, sequences: int, context: int, steps: int) -> list[dict[str, Any]]:
        """Where the steps of `decode` spend their time: one row for each kind of phase, the longest first."""
        self._begin(sequences, context, steps)
        self._executor.profile(True)
        for _ in range(steps):
            self.llm.engine.step()
        timings = self._executor.timings()
        self._executor.profile(False)
        self._end()
        return folded(timings, steps)

    def _prompt(self, tokens: int) -> list[Taken]:
        self._add(1, tokens, 1)
        taken = []
        while self.llm.engine.has_work:
            taken.append(self._step())
        return taken

    def _begin(self, sequences: int, context: int, steps: int) -> None:
        """Sequences whose prompts are computed, and two steps more. The first decode while others are computed."""
        meanwhile = -(-sequences * context // max(self._budget - sequences, 1))
        self._add(sequences, context - 2, steps + meanwhile + 4)
        engine, watched = self.llm.engine, self._watched
        while engine.scheduler.waiting or len(watched.load.rows) < sequences or max(watched.load.rows) > 1:
            if not engine.has_work:
                raise EngineError(f"{sequences} sequences never decoded together")
            engine.step()
        engine.step()

    def _add(self, sequences: int, prompt: int, tokens: int) -> None:
        """Requests; SettingError if they are too long, CapacityError if they cannot all run at once."""
        info = self.llm.info
        if prompt + tokens > info.max_model_len:
            raise SettingError(
                f"{sequences} sequences reach {prompt + tokens} tokens while they are measured, and the context has "
                f"{info.max_model_len}; ask for less, or give --max-model-len",
                param="max_model_len",
            )
        needed = sequences * (-(-(prompt + tokens) // PAGE) + 1)  # the scheduler keeps some back
        if needed > info.pages:
            raise CapacityError(
                f"{sequences} sequences of {prompt + tokens} tokens need {needed} KV pages and there are {info.pages}; "
                f"give --kv-cache-memory-bytes {needed * (info.page_bytes + info.slot_bytes)}"
            )
        self._seed += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        length = Lengths(prompt, prompt)
        for number, ask in enumerate(asks(sequences, length, length, seed=self._seed)):
            name = f"{self._seed}-{number}"
            self.llm.engine.add(checked(ask.prompt, params, info, self.llm.get_tokenizer(), request_id=name))

    def _step(self) -> Taken:
        start = time.perf_counter()
        self.llm.engine.step()
        return Taken(self._watched.load, time.perf_counter() - start, self._watched.seconds)

    def _end(self) -> None:
        for number in range(self.llm.engine.scheduler.running):
            self.llm.engine.abort(f"{self._seed}-{number}")

    def _told(self, work: str, taken: Sequence[Taken], rates: Rates) -> dict[str, Any]:
        """Figures of steps that follow each other, against rates measured before and after them."""
        model = self.llm.engine.model
        seconds = sum(step.seconds for step in taken)
        costs = [total(model.program, model.sizes, step.load) for step in taken]
        least = sum(least_seconds(model.program, model.sizes, t.load, rates, self._bf16) for t in taken)
        read = sum(cost.bytes for cost in costs) / seconds
        return {
            "work": work,
            "sequences": len(taken[-1].load.rows),
            "context": round(mean(taken[-1].load.contexts)),
            "ms": 1e3 * seconds,
            "python_us": 1e6 * (seconds - sum(step.native for step in taken)) / len(taken),
            "tokens_per_s": sum(step.load.total for step in taken) / seconds,
            "gb_per_s": read / 1e9,
            "of_memory": read / rates.bytes,
            "gmac_per_s": sum(cost.macs for cost in costs) / seconds / 1e9,
            "roof_ms": 1e3 * least,
            "of_roof": least / seconds,
            "memory_gb_per_s": rates.bytes / 1e9,
            "int8_gmac_per_s": rates.macs["int8"] / 1e9,
        }


def faster(a: Rates, b: Rates) -> Rates:
    """The higher of each rate: a disturbed probe must not flatter a step."""
    return Rates(max(a.bytes, b.bytes), {kind: max(rate, b.macs[kind]) for kind, rate in a.macs.items()})


def _middle(taken: Sequence[Taken]) -> Taken:
    """Medians of the times, extents of the middle."""
    return Taken(taken[len(taken) // 2].load, median(t.seconds for t in taken), median(t.native for t in taken))


def folded(timings: Sequence[tuple[str, int, float]], steps: int) -> list[dict[str, Any]]:
    """Timings of phases with the numbers of layers left out, the longest first. ms: a step."""
    kinds: dict[str, tuple[int, float]] = {}
    for name, _, seconds in timings:
        kind = re.sub(r"\b\d+\.", "", name)
        count, before = kinds.get(kind, (0, 0.0))
        kinds[kind] = (count + 1, before + seconds)
    whole = sum(seconds for _, seconds in kinds.values()) or 1.0
    return [
        {"phase": kind, "count": count, "ms": 1e3 * seconds / steps, "share": seconds / whole}
        for kind, (count, seconds) in sorted(kinds.items(), key=lambda item: -item[1][1])
    ]


def measured(
    settings: EngineSettings,
    *,
    sequences: Sequence[int],
    context: int,
    steps: int,
    prefill: int,
    profile: bool,
) -> dict[str, Any]:
    """Rows for each batch size, and for a prompt of `prefill` tokens (0: none); with `profile`, phases of each."""
    settings = replace(
        settings,
        max_num_seqs=max(settings.max_num_seqs, *sequences),
        enable_prefix_caching=False,
        max_inter_token_ms=0,  # prompts need not wait for anybody
    )
    with opened(settings) as llm:
        bench = StepBench(llm)
        rows = [bench.prefill(prefill)] if prefill else []
        rows += [bench.decode(n, context, steps) for n in sequences]
        phases = {str(n): bench.phases(n, context, steps) for n in sequences} if profile else {}
        info = llm.info
        return {"model": info.name, "isa": info.isa, "threads": info.threads, "rows": rows, "phases": phases}
