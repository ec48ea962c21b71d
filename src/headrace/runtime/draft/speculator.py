"""How many tokens to guess for whom: as many as let the step give the most tokens a second.

Owes: guesses only where they should pay, from what was learnt of guesses like them, and the counts that are told. What
is guessed never changes what is said: a step verifies it. Does not know: clocks, requests, how a guess is verified.

A guess after a match of m tokens is right with a chance that is learnt for lengths of its order of magnitude, for
each sequence, beginning with what others have shown. The n-th of a chain counts as after m + n - 1 tokens, as the
ones before it must have been right. A look-up costs microseconds, so it is made for each token and judged by the next
one even if nothing is drafted: that is how chances stay known while it does not pay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from headrace.base.speculation import Speculation
from headrace.core.scheduler import Scheduled
from headrace.core.sequence import Sequence
from headrace.runtime.draft.lookup import History
from headrace.runtime.times import StepTimes

CHANCES = (0.0, 0.25, 0.4, 0.6, 0.75, 0.85, 0.9)  # at first, by bits of the match's length
_LAST = len(CHANCES) - 1
_OWN, _SHARED = 0.1, 0.01  # what one guess changes of a sequence's chances, and of those that others begin with
_LEAST = 0.05  # less likely guesses are not looked at
_EXTRA = 120e-6  # seconds: what a step that cannot go on from the last one's arrays takes besides
_GAIN = 1.01  # what a draft must promise: tokens a second against none
_FRESH = 32  # steps after which prices are asked for again
_CROWD = 16  # sequences beyond which nothing is guessed


@dataclass(slots=True)
class Counts:
    """drafts: chains that were verified. drafted, accepted: their tokens. at: accepted ones by place in the chain."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    at: list[int] = field(default_factory=list)


class _Trail:
    """One sequence's tokens, and how good guesses at them were.

    length, guess: of the match that was looked up last, and the token that should follow it.
    """

    __slots__ = ("chances", "counts", "guess", "history", "length", "place")

    def __init__(self, tokens: list[int], chances: list[float]) -> None:
        self.history = History(tokens)
        self.chances = chances.copy()
        self.counts = Counts()
        self.length = self.place = 0
        self.guess = -1


class Speculator:
    """Drafts for the sequences of one engine. times: prices of steps. limit: tokens drafted after one."""

    def __init__(self, config: Speculation, times: StepTimes) -> None:
        self.counts = Counts(at=[0] * config.num_speculative_tokens)
        self._config = config
        self._times = times
        self._trails: dict[int, _Trail] = {}
        self._chances = list(CHANCES)
        self._prices: dict[int, tuple[int, list[float], bool]] = {}  # by sequences: when, seconds by rows, hope
        self._steps = 0

    def guesses(self, items: list[Scheduled]) -> list[tuple[Scheduled, tuple[int, ...]]]:
        """What to draft for a step of these items; [] while prompts are computed, as rows have their price then."""
        self._steps += 1
        if len(items) > _CROWD or not all(item.count == 1 and item.sample for item in items):
            return []
        seconds, hope = self._price(items)
        if not hope:
            return []
        chains = [self._chain(item.sequence) for item in items]
        return [
            (item, drafted)
            for item, trail, count in self._choose(items, chains, seconds)
            if (drafted := _allowed(item.sequence, trail.history.after(trail.place, count)))
        ]

    def learn(self, items: Iterable[Scheduled]) -> None:
        """A step's outcome is known."""
        trails = self._trails
        for item in items:
            trail = trails.get(item.sequence.id)
            if trail is not None and item.sample:
                self._judge(trail, item)

    def forget(self, sequence: Sequence) -> None:
        """Nothing more is asked about a sequence."""
        self._trails.pop(sequence.id, None)

    def of(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens drafted for a sequence so far, and those accepted."""
        trail = self._trails.get(sequence.id)
        return (0, 0) if trail is None else (trail.counts.drafted, trail.counts.accepted)

    # -- what a guess is worth

    def _chain(self, sequence: Sequence) -> tuple[_Trail, list[float]]:
        """Chances that the first, the first two, ... of the tokens that should follow are right."""
        trail = self._trails.get(sequence.id)
        if trail is None:
            trail = self._trails[sequence.id] = _Trail(sequence.tokens, self._chances)
        else:
            trail.history.extend(sequence.tokens[trail.history.size :])
        length, trail.place = trail.history.match(self._config.prompt_lookup_max)
        trail.length = length if length >= self._config.prompt_lookup_min else 0
        if not trail.length:
            return trail, []
        (trail.guess,) = trail.history.after(trail.place, 1)
        each = [trail.chances[_bucket(length + n)] for n in range(self._config.num_speculative_tokens)]
        return trail, list(accumulate(each, mul))

    def _judge(self, trail: _Trail, item: Scheduled) -> None:
        """What followed shows how good the guesses were."""
        said = item.sequence.tokens[item.start + item.count - len(item.draft) :]
        if trail.length and said:
            for n, guess in enumerate(item.draft or (trail.guess,)):
                if n >= len(said):
                    break
                right = said[n] == guess
                bucket = _bucket(trail.length + n)
                trail.chances[bucket] += _OWN * (right - trail.chances[bucket])
                self._chances[bucket] += _SHARED * (right - self._chances[bucket])
                if not right:
                    break
            trail.length = 0
        if item.draft:
            self._count(trail, item.draft, said)

    def _count(self, trail: _Trail, draft: tuple[int, ...], said: list[int]) -> None:
        right = sum([a == b for a, b in zip(draft, said, strict=False)])
        for counts in (trail.counts, self.counts):
            counts.drafts += 1
            counts.drafted += len(draft)
            counts.accepted += right
        for n in range(right):
            self.counts.at[n] += 1

    # -- what it costs

    def _price(self, items: list[Scheduled]) -> tuple[list[float], bool]:
        """Seconds of the step with 0, 1, ... drafted tokens, and whether likely ones could pay at all."""
        count = len(items)
        known = self._prices.get(count)
        if known is None or self._steps - known[0] >= _FRESH:
            most = min(count * self._config.num_speculative_tokens, 64)
            seconds = self._times.drafting(items, most)
            drafted = np.arange(1, most + 1)
            rate = (count + CHANCES[_LAST] * drafted) / (np.array(seconds[1:]) + _EXTRA)
            known = self._steps, seconds, bool(rate.max() > _GAIN * count / seconds[0])
            self._prices[count] = known
        return known[1], known[2]

    def _choose(
        self, items: list[Scheduled], chains: list[tuple[_Trail, list[float]]], seconds: list[float]
    ) -> list[tuple[Scheduled, _Trail, int]]:
        """How many tokens each gets: the likeliest first, up to where the step gives most tokens a second."""
        ranked = sorted(
            [(chance, i) for i, (_, chain) in enumerate(chains) for chance in chain if chance > _LEAST],
            key=lambda each: -each[0],
        )
        tokens, best, kept = float(len(items)), _GAIN * len(items) / seconds[0], 0
        for n, (chance, _) in enumerate(ranked[: len(seconds) - 1], 1):
            tokens += chance
            rate = tokens / (seconds[n] + _EXTRA)
            if rate > best:
                best, kept = rate, n
        counts = [0] * len(items)
        for _, i in ranked[:kept]:
            counts[i] += 1
        return [(item, trail, n) for item, (trail, _), n in zip(items, chains, counts, strict=True) if n]


def _bucket(length: int) -> int:
    return min(length.bit_length(), _LAST)


def _allowed(sequence: Sequence, guess: tuple[int, ...]) -> tuple[int, ...]:
    """As far as the sequence's grammar follows."""
    return guess if sequence.constraint is None else guess[: sequence.constraint.valid(guess)]
