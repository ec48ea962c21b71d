"""Cost of the scheduler in a step: microseconds of schedule + commit with 64 sequences that decode.

    PYTHONPATH=src python bench/core_step.py [sequences] [steps]

The mean holds page turns: every 32nd token of a sequence takes a page and hashes one. Design limit: 60 us at 64.
"""

from __future__ import annotations

import sys
from statistics import fmean, median
from time import perf_counter_ns

from headrace.core.sampling import SamplingParams
from headrace.core.scheduler import Limits, Outcome, Scheduler
from headrace.core.sequence import Sequence
from headrace.core.trace import StepTrace


def build(sequences: int, steps: int) -> Scheduler:
    """A scheduler whose sequences have had their prompts computed, at mixed places in their pages."""
    pages = sequences * (steps // 32 + 8)
    scheduler = Scheduler(Limits(sequences, 1 << 20, 1 << 20, pages))
    params = SamplingParams(max_tokens=steps + 100, ignore_eos=True)
    for i in range(sequences):
        prompt = [1000 * i + k for k in range(100 + i)]
        scheduler.add(Sequence(i, f"r{i}", 0, params, seed=i, tokens=prompt))
    batch = scheduler.schedule()
    assert batch is not None and len(batch.items) == sequences
    scheduler.commit(batch, Outcome([[7]] * sequences))
    return scheduler


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


def main() -> None:
    sequences = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    parts = measure(build(sequences, steps), sequences, steps)
    both = [a + b for a, b in zip(parts[0], parts[1], strict=True)]
    print(f"{sequences} sequences, {steps} steps, us per step")
    for name, ns in (("schedule", parts[0]), ("commit", parts[1]), ("together", both), ("trace", parts[2])):
        print(f"  {name:9} median {median(ns) / 1e3:6.1f}   mean {fmean(ns) / 1e3:6.1f}   best {min(ns) / 1e3:6.1f}")


if __name__ == "__main__":
    main()
