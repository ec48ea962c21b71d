"""What a step is expected to take: learnt from a made-up machine; and chunks that keep a pace."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.core.sampling import SamplingParams
from headrace.core.scheduler import Scheduled
from headrace.core.sequence import Sequence
from headrace.program.cost import Attention, Work
from headrace.runtime.times import PATIENCE, Pace, StepTimes, divided

SOMEBODY = Sequence(0, "r", 0, SamplingParams(), 0, [1])
WORK = Work(96e6, 106e6, 28e6, (Attention(None, 34560.0, 23040.0),))
WINDOWED = Work(96e6, 106e6, 28e6, (Attention(None, 17280.0, 11520.0), Attention(512, 17280.0, 11520.0)))
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
Items = list[Scheduled]


def prompt(rows: int, start: int = 0) -> Items:
    return [Scheduled(SOMEBODY, start, rows, True)]


def decoding(sequences: int, context: int) -> Items:
    return [Scheduled(SOMEBODY, context - 1, 1, True) for _ in range(sequences)]


def machine(items: Items) -> float:
    """The time of a step at 30 GB/s and 250 GMAC/s, reading and arithmetic at once; every key costs its own time."""
    rows = sum(i.count for i in items)
    keys = sum(i.count * i.start + i.count * (i.count + 1) / 2 for i in items)
    macs = rows * WORK.row + sum(i.sample for i in items) * WORK.logit_row
    return max(WORK.weight_bytes / 30e9, 1.5e-3 + macs / 250e9) + keys * 4e-7


def taught(noise: random.Random, sizes: list[int], late: float = 0.0) -> StepTimes:
    """Some steps of each size; a share of them `late`, by much."""
    times = StepTimes(WORK)
    for _ in range(6):
        for rows in sizes:
            steps = [prompt(rows), prompt(rows, 1500)] + ([decoding(rows, 40)] if rows <= 64 else [])
            for items in steps:
                slow = noise.uniform(3, 12) if noise.random() < late else 1.0
                times.learn(items, machine(items) * noise.uniform(0.97, 1.03) * slow)
    return times


@pytest.mark.parametrize(("late", "off"), [(0.0, 0.16), (0.2, 0.25)])
def test_predictions_are_close_to_what_was_measured_and_bear_outliers(late: float, off: float) -> None:
    times = taught(random.Random(1), SIZES, late)
    for rows in range(1, 513):
        assert times.seconds(prompt(rows)) == pytest.approx(machine(prompt(rows)), rel=off)
    for rows in range(1, 65):
        assert times.seconds(decoding(rows, 40)) == pytest.approx(machine(decoding(rows, 40)), rel=off)


def test_two_kinds_of_step_are_enough_for_what_lies_between() -> None:
    """A conversation that began with a prompt and has decoded: what a server knows when the next prompt comes."""
    times = StepTimes(WORK)
    for items in [prompt(300), *(decoding(1, 300 + n) for n in range(20))]:
        times.learn(items, machine(items))
    for rows in (32, 64, 128, 256):
        assert times.seconds(prompt(rows)) == pytest.approx(machine(prompt(rows)), rel=0.5)


def test_a_machine_that_changes_its_speed_is_followed() -> None:
    times = taught(random.Random(2), SIZES)
    for _ in range(300):
        for rows in SIZES:
            times.learn(prompt(rows), 2 * machine(prompt(rows)))
    for rows in SIZES:
        assert times.seconds(prompt(rows)) == pytest.approx(2 * machine(prompt(rows)), rel=0.3)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 512), st.integers(0, 4000), st.floats(1e-6, 10.0)), max_size=30),
    work=st.sampled_from([WORK, WINDOWED]),
)
@example(steps=[(9, 18, 0.00390625), (98, 0, 1.0)], work=WORK)  # all of the time is that of rows beyond the first few
def test_whatever_was_measured_predictions_are_positive_and_grow(
    steps: list[tuple[int, int, float]], work: Work
) -> None:
    times = StepTimes(work)
    for rows, start, seconds in steps:
        times.learn(prompt(rows, start), seconds)
    for grows in (
        [times.seconds(prompt(rows)) for rows in SIZES],
        [times.seconds(prompt(16, start)) for start in (0, 100, 600, 4000)],
        [times.seconds(decoding(rows, 300)) for rows in SIZES],
    ):
        assert grows[0] > 0
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(grows))


@given(count=st.integers(1, 64), context=st.integers(1, 3000), start=st.integers(0, 4000), limit=st.floats(1e-4, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_chunk_is_as_large_as_the_pace_allows(count: int, context: int, start: int, limit: float) -> None:
    times = taught(random.Random(3), [1, 8, 64, 512])
    items = decoding(count, context)
    for seconds in (limit, None):
        rows = Pace(times, seconds, 512)(items, start)
        bound = seconds or PATIENCE * times.seconds(items)
        assert 0 <= rows <= 512
        larger = [*items, Scheduled(SOMEBODY, start, rows + 1, False)]
        assert rows == 512 or times.seconds(larger) > bound
        if rows:
            assert times.seconds([*items, Scheduled(SOMEBODY, start, rows, False)]) <= bound


@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 300), st.booleans()), min_size=1, max_size=40),
    st.lists(st.floats(0, 10), min_size=6, max_size=6),
    st.sampled_from([WORK, WINDOWED]),
)
def test_a_step_is_divided_whole_and_by_what_each_does(
    items: list[tuple[int, int, bool]], factors: list[float], work: Work
) -> None:
    start, count, logits = np.array(items, np.float64).T
    shares = divided(work, factors, start, count, logits)
    assert (shares >= 0).all() and sum(shares) == pytest.approx(1, abs=1e-9)
    order = np.lexsort((logits, start, count))
    for a, b in pairwise(order.tolist()):
        if count[a] <= count[b] and start[a] <= start[b] and logits[a] <= logits[b]:
            assert shares[a] <= shares[b] * (1 + 1e-9) + 1e-15


@given(st.integers(1, 600), st.integers(1, 8), st.sampled_from([WORK, WINDOWED]))
def test_a_row_alone_is_priced_as_in_a_chunk(start: int, rows: int, work: Work) -> None:
    """Attention's share of a step of single rows, and of a step in which somebody has two."""
    ones = np.ones(rows)
    single = divided(work, [0, 0, 0, 0, 1, 0], np.full(rows, float(start)) + np.arange(rows), ones, ones)
    chunk = np.append(ones, 2.0)
    both = divided(
        work, [0, 0, 0, 0, 1, 0], np.append(np.full(rows, float(start)) + np.arange(rows), 7.0), chunk, chunk
    )
    assert both[:-1] / both[:-1].sum() == pytest.approx(single)


@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 300), st.booleans()), min_size=1, max_size=9),
    st.sampled_from([WORK, WINDOWED]),
)
@settings(deadline=None)
def test_shares_are_those_of_the_predicted_time(items: list[tuple[int, int, bool]], work: Work) -> None:
    """What has no owner by rows; attention and rows of logits to whose they are; before anything was learnt."""
    step = [Scheduled(SOMEBODY, *item) for item in items]
    common = StepTimes(Work(work.weight_bytes, work.row, 0.0, ())).seconds(step)
    alone = StepTimes(Work(0.0, 0.0, work.logit_row, work.attention))
    rows = sum(item.count for item in step)
    expected = [(common * item.count / rows + alone.seconds([item])) / StepTimes(work).seconds(step) for item in step]
    start, count, logits = np.array(items, np.float64).T
    assert divided(work, [1.0] * 6, start, count, logits) == pytest.approx(expected)
