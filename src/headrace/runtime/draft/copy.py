"""Guesses by the model's own copy in 4 bits, which reads and writes the model's KV pages.

The copy draws each token with the settings and the noise that the model will draw it with, so the two agree wherever
their logits are close. Its keys and values are written over by the step that verifies them, in which the model computes
the same rows: nothing of the copy stays. Does not know: requests, why a guess was wrong.

How many tokens to guess: what gives most tokens a second, by how often guesses were right, by what a pass of the copy
took, and by the learnt times of the model's steps.
"""

from __future__ import annotations

import time

import numpy as np

from headrace.backends import Executor
from headrace.base.speculation import Speculation
from headrace.core.scheduler import Batch, Scheduled
from headrace.core.sequence import Sequence
from headrace.runtime.draft.prices import Prices
from headrace.runtime.draft.tally import Tally
from headrace.runtime.runner import Runner
from headrace.runtime.times import StepTimes

Guess = tuple[Scheduled, tuple[int, ...]]

UNKNOWN = -1  # a token that is guessed once there is a page for it
_CHANCE = 0.8  # at first
_OWN, _SHARED = 0.05, 0.01  # what one guess changes of a sequence's chance, and of what others begin with
_EXTRA = 150e-6  # seconds: what a step that cannot go on from the last one's arrays takes besides
_GAIN = 1.02  # what a draft must promise: tokens a second against none
_PROBE = 64  # steps without drafts after which one is tried again
_CROWD = 16  # sequences beyond which nothing is guessed
_SLOW = 0.2  # what one pass changes of what a pass is taken to last


class SelfDraft:
    """Drafts of a model's copy. times: prices of the model's steps. share: bytes of the copy's weights over its."""

    def __init__(self, config: Speculation, times: StepTimes, copy: Executor, runner: Runner, share: float) -> None:
        self.tally = Tally(config.num_speculative_tokens)
        self._most = config.num_speculative_tokens
        self._prices = Prices(times, config.num_speculative_tokens)
        self._copy = copy
        self._runner = runner
        self._share = share
        self._chance = _CHANCE
        self._chances: dict[int, float] = {}
        self._passes: dict[int, float] = {}  # seconds of one, by sequences
        self._idle = 0

    def guesses(self, items: list[Scheduled]) -> list[Guess]:
        """How many tokens to guess for whom; none while prompts are computed, as rows have their price then."""
        if len(items) > _CROWD or not all(item.count == 1 and item.sample for item in items):
            return []
        able = [item for item in items if item.sequence.drafted != 0]
        count = self._count(items, able) if able else 0
        self._idle = 0 if count else self._idle + 1
        return [(item, (UNKNOWN,) * min(count, self._limit(item.sequence))) for item in able] if count else []

    def fill(self, batch: Batch) -> list[Guess]:
        """The guesses: the copy's own, for items that have rows and pages for them."""
        items = [item for item in batch.items if item.draft]
        if not items:
            return []
        if batch.copies:  # the model's step makes them, and no page may be written to before
            return [(item, ()) for item in items]
        count = min(len(item.draft) for item in items)
        began = time.perf_counter()
        chains = self._run(items, count, batch.fresh)
        taken = (time.perf_counter() - began) / count
        before = self._passes.get(len(items), taken)
        self._passes[len(items)] = before + _SLOW * (taken - before)
        return [(item, _allowed(item.sequence, chain)) for item, chain in zip(items, chains, strict=True)]

    def learn(self, items: list[Scheduled], seconds: float) -> int:
        """A step has been taken in, which took so long; how many drafted tokens were right."""
        self._prices.learn(items, seconds)
        verified = self.tally.add(items)
        for item, right in verified:
            chance = self._chances.get(item.sequence.id, self._chance)
            for n in range(min(right + 1, len(item.draft))):
                chance += _OWN * ((n < right) - chance)
                self._chance += _SHARED * ((n < right) - self._chance)
            self._chances[item.sequence.id] = chance
        return sum([right for _, right in verified])

    def forget(self, sequence: Sequence) -> None:
        """Nothing more is asked about a sequence."""
        self._chances.pop(sequence.id, None)
        self.tally.forget(sequence)

    def _limit(self, sequence: Sequence) -> int:
        return self._most if sequence.drafted is None else min(self._most, sequence.drafted)

    def _count(self, items: list[Scheduled], able: list[Scheduled]) -> int:
        """How many tokens to guess for each that may have any."""
        if self._idle >= _PROBE:
            return 1
        chances = [self._chances.get(item.sequence.id, self._chance) for item in able]
        seconds = self._prices.of(items)
        each = self._passes.get(len(able), self._share * seconds[0])
        tokens, best, kept = float(len(items)), _GAIN * len(items) / seconds[0], 0
        right = [1.0] * len(able)
        for n in range(1, min(self._most, (len(seconds) - 1) // len(able)) + 1):
            right = [a * b for a, b in zip(right, chances, strict=True)]
            tokens += sum(right)
            rate = tokens / (seconds[n * len(able)] + _EXTRA + n * each)
            if rate > best:
                best, kept = rate, n
        return kept

    def _run(self, items: list[Scheduled], count: int, fresh: list[int]) -> list[tuple[int, ...]]:
        step = self._runner.guessing(items, fresh)
        drawn = np.empty((count, len(items)), np.int32)
        for n in range(count):
            drawn[n] = self._copy.run(step).tokens
            step.tokens[:] = drawn[n]
            for counter in (step.positions, step.context, step.sampling.position):
                counter += 1
            step.fresh = step.fresh[:0]
        return [tuple(chain) for chain in drawn.T.tolist()]


def _allowed(sequence: Sequence, guess: tuple[int, ...]) -> tuple[int, ...]:
    """As far as the sequence's grammar follows."""
    return guess if sequence.constraint is None else guess[: sequence.constraint.valid(guess)]
