"""A sequence's tokens depend on its prompt, parameters and seed, and on nothing that the scheduler does."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from core_model import PagedModel, answer, ask, drain, said, small, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.scheduler import Limits, Outcome, Scheduler


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    length: int
    seed: int
    stop: int | None
    priority: int
    tenant: str
    after: int


COMMON = list(range(1, 30))

prompts = st.builds(
    lambda shared, own: COMMON[:shared] + own, st.integers(0, 24), st.lists(st.integers(0, 3), min_size=1, max_size=8)
)
asks = st.builds(
    Ask,
    prompt=prompts,
    length=st.integers(1, 12),
    seed=st.integers(0, 2),
    stop=st.none() | st.integers(0, 39),
    priority=st.integers(0, 1),
    tenant=st.sampled_from("aab"),
    after=st.integers(0, 6),
)
limits = st.builds(
    small,
    pages=st.integers(11, 30),  # the longest sequence needs 11
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 40),
    prefix_caching=st.booleans(),
    batching=st.sampled_from(["continuous", "static"]),
)
without_cache = st.builds(
    small, pages=st.integers(16, 30), max_num_batched_tokens=st.integers(64, 99), kv_cache=st.just(False)
)


@given(limits | without_cache, st.lists(asks, min_size=1, max_size=9), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=250, deadline=None)
def test_tokens_do_not_depend_on_the_schedule(
    limits: Limits, wanted: list[Ask], luck: random.Random, bursts: bool
) -> None:
    scheduler = Scheduler(limits)
    model = PagedModel(limits, (lambda: luck.randint(1, 4)) if bursts else lambda: 1)
    pending = [(a, ask(a.prompt, a.length, seed=a.seed, priority=a.priority, tenant=a.tenant,
                       stop_ids=() if a.stop is None else (a.stop,))) for a in wanted]  # fmt: skip
    for moment in range(7):
        for a, sequence in pending:
            if a.after == moment:
                scheduler.add(sequence)
        if scheduler.has_work:
            turn(scheduler, model)
    drain(scheduler, model)
    for a, sequence in pending:
        stops = frozenset() if a.stop is None else frozenset({a.stop})
        assert said(sequence) == answer(a.prompt, a.seed, a.length, stops)
        assert sequence.finish is not None
        stopped = said(sequence)[-1] in stops
        assert sequence.finish.reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_happens_and_changes_nothing(caching: bool) -> None:
    limits = small(pages=9, prefix_caching=caching)
    scheduler = Scheduler(limits)
    sequences = [ask([i] * 9, 20, seed=i) for i in range(4)]
    for s in sequences:
        scheduler.add(s)
    ended = drain(scheduler, PagedModel(limits))
    assert scheduler.preemptions > 0 and scheduler.preemptions == sum(s.preemptions for s in sequences)
    assert sequences[0].preemptions == 0 and ended[0] is sequences[0], "the first in order never yields"
    for i, s in enumerate(sequences):
        assert said(s) == answer([i] * 9, i, 20)


def test_a_recompute_is_mostly_found_in_the_index() -> None:
    limits = small(pages=10, max_num_batched_tokens=64)
    scheduler, model = Scheduler(limits), PagedModel(limits)
    first, second = ask([1] * 12, 12, seed=1), ask([2] * 12, 12, seed=2)
    scheduler.add(first)
    scheduler.add(second)
    while not second.preemptions:
        turn(scheduler, model)
    while scheduler.waiting:
        turn(scheduler, model)
    assert first.finish is not None and second.computed >= 8, "pages of the first life were still there"
    drain(scheduler, model)
    assert said(second) == answer([2] * 12, 2, 12)


def test_rejected_drafts_roll_computed_back() -> None:
    """Drafts are items longer than the tokens; what is not accepted does not count, and its pages go back."""
    scheduler = Scheduler(small())
    s = ask([5] * 5, 30)
    scheduler.add(s)
    turn(scheduler, PagedModel(small()))
    for accepted in ([9], [9, 8], [9, 8, 7], [1], [2], [3]):
        batch = scheduler.schedule()
        assert batch is not None
        batch.items[0].count += 2  # two drafts, and pages for them, as a proposer would have it
        s.pages += scheduler.pool.take(-(-(s.computed + 3) // 4) - len(s.pages))
        before = len(s.tokens)
        scheduler.commit(batch, Outcome([accepted]))
        assert s.tokens[before:] == accepted and s.computed == len(s.tokens) - 1
        scheduler.check()
    assert len(s.tokens) == 5 + 1 + 9


def test_tokens_after_the_end_are_dropped() -> None:
    limits = small()
    scheduler = Scheduler(limits)
    s = ask([1, 2], 10, stop_ids=[99])
    scheduler.add(s)
    batch = scheduler.schedule()
    assert batch is not None
    outcome = PagedModel(limits).run(batch)
    outcome.tokens[0][:] = [3, 99, 4]
    assert scheduler.commit(batch, outcome) == [s]
    assert said(s) == [3, 99]
