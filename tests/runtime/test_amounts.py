"""Running sums of what steps do, against the walk over the ops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from headrace.program.cost import Load, total, work
from headrace.program.roof import Rates, least_seconds
from headrace.runtime.amounts import Amounts
from headrace.runtime.load import prepare

RATES = Rates(40e9, {"int8": 300e9, "bf16": 60e9, "f32": 30e9})
PREPARED = {kind: prepare(tiny.TINY / kind) for kind in ("llama", "gemma2", "mixtral")}
SEQUENCE = st.tuples(st.integers(0, 90), st.integers(1, 12), st.integers(0, 1))


def amounts(kind: str) -> Amounts:
    program, sizes = PREPARED[kind].program, PREPARED[kind].sizes()
    return Amounts(program, sizes, work(program, sizes), 64, RATES)


@settings(deadline=None)
@given(st.sampled_from(list(PREPARED)), st.lists(SEQUENCE, min_size=1, max_size=5))
def test_a_step_is_counted_as_the_walk_counts_it(kind: str, items: list[tuple[int, int, int]]) -> None:
    found = amounts(kind)
    start, count, logits = np.array(items, np.float64).T
    found.add(start, count, logits, again=False)
    program, sizes = PREPARED[kind].program, PREPARED[kind].sizes()
    load = Load([n for _, n, _ in items], [at + n for at, n, _ in items], sum(x for *_, x in items))
    cost = total(program, sizes, load)
    assert (found.bytes, found.macs) == (pytest.approx(cost.bytes), pytest.approx(cost.macs))
    assert found.seconds == pytest.approx(least_seconds(program, sizes, load, RATES))


def test_steps_that_go_on_are_close() -> None:
    found, exact = amounts("gemma2"), amounts("gemma2")
    start, one = np.array([10.0, 50.0, 3.0]), np.ones(3)
    for step in range(100):
        found.add(start + step, one, one, again=step > 0)
        exact.add(start + step, one, one, again=False)
    for name in ("bytes", "macs", "seconds"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=0.05)
        assert getattr(found, name) <= getattr(exact, name)


def test_without_rates_nothing_is_said_of_the_roof() -> None:
    program, sizes = PREPARED["llama"].program, PREPARED["llama"].sizes()
    found = Amounts(program, sizes, work(program, sizes), 64, None)
    found.add(np.zeros(1), np.ones(1), np.ones(1), again=False)
    assert found.bytes > 0 and found.macs > 0 and found.seconds == 0
