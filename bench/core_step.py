"""Cost of Python in a step: microseconds with 64 sequences that decode, in a loop that does nothing else.

    python bench/core_step.py [sequences] [steps] [window]

First the scheduler and the trace by themselves, then an engine's whole step (scheduler, arrays, commit, updates, trace)
on an executor that only writes tokens. Design limit of that: 100 us at 64. The means hold page turns: every 32nd token
of a sequence takes a page and hashes one. Between native steps, which leave cold caches, it all takes two to four times
as long. window: of a model some of whose layers see so many tokens; 0: none does.
"""

from __future__ import annotations

import sys
from statistics import fmean, median
from time import perf_counter_ns

import numpy as np

from headrace.base.settings import EngineSettings
from headrace.core.sampling import SamplingParams
from headrace.core.scheduler import Limits, Outcome, Scheduler
from headrace.core.sequence import Sequence
from headrace.core.trace import StepTrace
from headrace.core.windows import window_pages
from headrace.engine.engine import Engine
from headrace.engine.messages import Add, ModelInfo
from headrace.program import Program, Sampled, Step
from headrace.runtime.load import LoadedModel


def build(sequences: int, steps: int, window: int) -> Scheduler:
    """A scheduler whose sequences have had their prompts computed, at mixed places in their pages."""
    pages = sequences * (steps // 32 + 8)
    scheduler = Scheduler(Limits(sequences, 1 << 20, 1 << 20, pages, window=window, slots=_slots(sequences, window)))
    params = SamplingParams(max_tokens=steps + 100, ignore_eos=True)
    for i in range(sequences):
        prompt = [1000 * i + k for k in range(100 + i)]
        scheduler.add(Sequence(i, f"r{i}", 0, params, seed=i, tokens=prompt))
    batch = scheduler.schedule()
    assert batch is not None and len(batch.items) == sequences
    scheduler.commit(batch, Outcome([[7]] * sequences))
    return scheduler


def _slots(sequences: int, window: int) -> int:
    return sequences * (window_pages(window, 32) + 8) if window else 0


def measure(scheduler: Scheduler, sequences: int, steps: int) -> tuple[list[int], list[int], list[int]]:
    """Nanoseconds of schedule, commit and trace for each step."""
    schedule_ns, commit_ns, trace_ns = [], [], []
    trace = StepTrace()
    for step in range(steps):
        tokens = [[(step * 31 + i) % 50_000] for i in range(sequences)]
        t0 = perf_counter_ns()
        batch = scheduler.schedule()
        t1 = perf_counter_ns()
        assert batch is not None
        outcome = Outcome(tokens)
        t2 = perf_counter_ns()
        scheduler.commit(batch, outcome)
        t3 = perf_counter_ns()
        trace.record(batch, scheduler, schedule_s=(t1 - t0) * 1e-9, run_s=0.0, commit_s=(t3 - t2) * 1e-9)
        t4 = perf_counter_ns()
        schedule_ns.append(t1 - t0)
        commit_ns.append(t3 - t2)
        trace_ns.append(t4 - t3)
    return schedule_ns, commit_ns, trace_ns


class Nothing:
    """An executor whose step is free."""

    def run(self, step: Step) -> Sampled:
        rows = len(step.logit_rows)
        floats, ids = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
        return Sampled(ids + 7, floats, ids, np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32), ids)


def engine_steps(sequences: int, steps: int, window: int) -> list[int]:
    """Nanoseconds of each step of an engine."""
    settings = EngineSettings(max_num_seqs=sequences, max_num_batched_tokens=1 << 16)
    pages, context = sequences * (steps // 32 + 8), steps + 1000
    info = ModelInfo(name="", architecture="", max_model_len=context, vocab_size=100, page_tokens=32, pages=pages,
                     page_bytes=1, weight_bytes=1, max_logprobs=0, threads=1, isa="", load_seconds=0.0,
                     window=window, slots=_slots(sequences, window))  # fmt: skip
    program = Program((), {}, None)  # type: ignore[arg-type]
    model = LoadedModel(None, program, Nothing(), "", {})  # type: ignore[arg-type]
    engine = Engine(model, settings, info, settings.max_num_batched_tokens)
    params = SamplingParams(max_tokens=steps + 100, ignore_eos=True)
    for i in range(sequences):
        engine.add(Add(f"r{i}", [1] * (100 + i), params, i, []))
    times = []
    for _ in range(steps):
        start = perf_counter_ns()
        engine.step()
        times.append(perf_counter_ns() - start)
    return times[1:]


def main() -> None:
    sequences = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    window = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    parts = measure(build(sequences, steps, window), sequences, steps)
    both = [a + b for a, b in zip(parts[0], parts[1], strict=True)]
    print(f"{sequences} sequences, {steps} steps, us per step")
    for name, ns in (
        ("schedule", parts[0]),
        ("commit", parts[1]),
        ("together", both),
        ("trace", parts[2]),
        ("engine", engine_steps(sequences, steps, window)),
    ):
        print(f"  {name:9} median {median(ns) / 1e3:6.1f}   mean {fmean(ns) / 1e3:6.1f}   best {min(ns) / 1e3:6.1f}")


if __name__ == "__main__":
    main()
