"""The step trace: right numbers, bounded, plain data."""

from __future__ import annotations

import json

from core_model import PagedModel, ask, small

from headrace.core.scheduler import Scheduler
from headrace.core.trace import StepTrace


def test_records_say_who_ran() -> None:
    limits = small(max_num_batched_tokens=7)
    scheduler, model, trace = Scheduler(limits), PagedModel(limits), StepTrace()
    a, b = ask([1] * 5, 3), ask([2] * 4, 2)
    scheduler.add(a)
    scheduler.add(b)
    while (batch := scheduler.schedule()) is not None:
        scheduler.commit(batch, model.run(batch))
        trace.record(batch, scheduler, schedule_s=1e-5, run_s=2e-3, commit_s=3e-5)
    records = list(trace)
    assert [r.items for r in records] == [
        ((a.id, 5), (b.id, 2)),
        ((a.id, 1), (b.id, 2)),
        ((a.id, 1), (b.id, 1)),
    ]
    assert [(r.decode_tokens, r.prefill_tokens) for r in records] == [(0, 7), (1, 2), (2, 0)]
    assert [r.number for r in records] == [0, 1, 2]
    assert [(r.running, r.pages_used) for r in records] == [(2, 3), (2, 3), (0, 0)]
    assert json.loads(json.dumps(records[0].as_dict()))["run_s"] == 2e-3
    assert trace.since(1) == records[1:]


def test_the_ring_is_bounded() -> None:
    limits = small(pages=16)
    scheduler, model, trace = Scheduler(limits), PagedModel(limits), StepTrace(size=5)
    scheduler.add(ask([1], 20))
    while (batch := scheduler.schedule()) is not None:
        scheduler.commit(batch, model.run(batch))
        trace.record(batch, scheduler, schedule_s=0, run_s=0, commit_s=0)
    assert len(trace) == 5 and [r.number for r in trace] == [15, 16, 17, 18, 19]
