"""The arrays of a step: whatever came before, they are those that a runner without a past makes."""

from __future__ import annotations

import copy
import random
from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.sampling import SamplingParams
from headrace.core.scheduler import Limits, Scheduler
from headrace.core.sequence import Sequence
from headrace.program.step import Sampled, Sampling, Step
from headrace.runtime.runner import Runner

VOCAB, SEQUENCES, CONTEXT = 50, 4, 256
KINDS: list[dict[str, object]] = [
    {}, {}, {"temperature": 0.0}, {"logprobs": 2}, {"min_tokens": 3}, {"presence_penalty": 1.0},
    {"prompt_logprobs": 0}, {"bad_token_ids": [[1, 2]]}, {"allowed_token_ids": [3, 4]},
]  # fmt: skip


class Noted:
    """An executor that keeps a copy of each step and draws a token from where the row stands."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def run(self, step: Step) -> Sampled:
        self.steps.append(copy.deepcopy(step))
        rows, width = len(step.logit_rows), max(0, int(np.max(step.sampling.logprobs, initial=0)))
        drawn = np.where(step.sampling.target >= 0, step.sampling.target, (step.sampling.position * 7 + 3) % VOCAB)
        return Sampled(drawn.astype(np.int32), np.zeros(rows, np.float32), np.ones(rows, np.int32),
                       np.full((rows, width), -1, np.int32), np.full((rows, width), -np.inf, np.float32),
                       np.zeros(rows, np.int32))  # fmt: skip


def runner() -> tuple[Runner, Noted]:
    noted = Noted()
    return Runner(noted, max_num_seqs=SEQUENCES, context=CONTEXT, vocab=VOCAB), noted  # type: ignore[arg-type]


def tables(step: Step) -> list[list[int]]:
    """Each sequence's pages, as many as its context needs."""
    starts = step.page_indptr.tolist()
    return [step.pages[a : a + -(-n // 32)].tolist() for a, n in zip(starts, step.context.tolist(), strict=False)]


def same(a: Step, b: Step) -> None:
    for name in ("tokens", "positions", "query_start", "context", "fresh", "logit_rows"):
        assert getattr(a, name).tolist() == getattr(b, name).tolist(), name
        assert getattr(a, name).dtype == getattr(b, name).dtype, name
    assert tables(a) == tables(b)
    for field in fields(Sampling):
        one, other = getattr(a.sampling, field.name), getattr(b.sampling, field.name)
        assert one.tolist() == other.tolist() and one.dtype == other.dtype, field.name


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    seed=st.integers(0, 1000),
    pages=st.integers(8, 24),
    most=st.sampled_from([1, 5, 64]),
)
def test_arrays_do_not_depend_on_the_steps_before(
    kinds: list[dict[str, object]], seed: int, pages: int, most: int
) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(Limits(SEQUENCES, most, CONTEXT, pages))
    kept, noted = runner()
    waiting = [
        Sequence(i, f"r{i}", 0, SamplingParams(max_tokens=rng.randint(1, 90), **kind), i, [i % 3] * rng.randint(1, 70))  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    ]
    while waiting or scheduler.has_work:
        if waiting and (rng.random() < 0.1 or not scheduler.has_work):
            scheduler.add(waiting.pop())
        if rng.random() < 0.02 and scheduler.running:
            gone = scheduler._running[0]
            scheduler.abort(gone.id)
            kept.forget(gone)
            continue
        batch = scheduler.schedule()
        if batch is None:
            continue
        for sequence in batch.preempted:
            kept.forget(sequence)
        result = kept.run(batch)
        fresh, alone = runner()
        assert fresh.run(batch) == result
        same(noted.steps[-1], alone.steps[-1])
        if rng.random() < 0.05:
            scheduler.undo(batch)  # it comes again
            continue
        for sequence in scheduler.commit(batch, result.outcome):
            kept.forget(sequence)


def test_a_decoding_step_moves_the_last_one_on() -> None:
    scheduler = Scheduler(Limits(SEQUENCES, 64, CONTEXT, 16))
    kept, noted = runner()
    rows = kept._rows
    made: list[int] = []
    kept._rows = lambda batch: (made.append(batch.number), rows(batch))[1]  # type: ignore[method-assign]
    for i in range(2):
        scheduler.add(Sequence(i, f"r{i}", 0, SamplingParams(max_tokens=40), i, [5] * 10))
    while (batch := scheduler.schedule()) is not None:
        scheduler.commit(batch, kept.run(batch).outcome)
    assert len(noted.steps) == 40 and made == [0, 1, 23], "the prompts, the first step after, and one for a new page"
