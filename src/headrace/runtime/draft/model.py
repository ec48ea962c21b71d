"""Guesses by another model: the model's own copy in 4 bits, which shares its KV pages, or a smaller model beside it.

The drafting model draws each token with the settings and the noise that the model will draw it with, so the two agree
wherever their logits are close. A copy's keys and values are written over by the step that verifies them, in which the
model computes the same rows: nothing of the copy stays. A model with pages of its own reads what the sequence says
besides, in a pass's first rows; a prompt, in chunks, once the sequence has had its first token and where guesses should
save more time than that takes. Does not know: requests, why a guess was wrong.

How many tokens to guess: what gives most tokens a second, by how often guesses were right, by what a pass of the
drafting model took, and by the learnt times of the model's steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.backends import Executor, Limits
from headrace.base.speculation import Speculation
from headrace.core.scheduler import Batch, Scheduled
from headrace.core.sequence import Sequence
from headrace.program import Step
from headrace.runtime.draft.held import Held
from headrace.runtime.draft.prices import Prices
from headrace.runtime.draft.tally import Tally
from headrace.runtime.runner import Runner
from headrace.runtime.times import StepTimes

I32 = NDArray[np.int32]
Guess = tuple[Scheduled, tuple[int, ...]]

UNKNOWN = -1  # a token that is guessed once there is a page for it
_CHANCE = 0.8  # at first
_OWN, _SHARED = 0.05, 0.01  # what one guess changes of a sequence's chance, and of what others begin with
_EXTRA = 150e-6  # seconds: what a step that cannot go on from the last one's arrays takes besides
_GAIN = 1.05  # what a draft must promise: tokens a second against none; rows and chances are known to a few per cent
_PROBE = 64  # steps without drafts after which one is tried again
_CROWD = 16  # sequences beyond which nothing is guessed
_SLOW = 0.2  # what one pass changes of what a pass is taken to last
_OUTLIER = 3.0  # times what was expected: other work held it up, or it was the first
_FADING = 0.005  # of the difference between what passes took and what they should, in each step without
_NEAR = 16  # tokens that the drafting model may lack and yet guess after; fewer rows than that hide behind its weights
_LEAST = 32  # rows of a chunk
_HOPED = 128  # tokens: the least that an answer without a limit is taken to go on for


@dataclass(frozen=True, slots=True, eq=False)
class Drafter:
    """A model that guesses. limits: its own. share: its weights over the model's. apart: its KV cache is its own."""

    executor: Executor
    limits: Limits
    share: float
    apart: bool


class ModelDraft:
    """Drafts of a `Drafter`. times: prices of the model's steps. held: what is in the drafter's cache."""

    def __init__(self, config: Speculation, times: StepTimes, drafter: Drafter, runner: Runner, held: Held) -> None:
        self.tally = Tally(config.num_speculative_tokens)
        self._most = config.num_speculative_tokens
        self._times = times
        self._prices = Prices(times, config.num_speculative_tokens)
        self._drafter = drafter
        self._runner = runner
        self._held = held
        self._chance = _CHANCE
        self._chances: dict[int, float] = {}
        self._passes: dict[int, float] = {}  # seconds of one, by sequences
        self._step = 0.0  # seconds of the model's next step without drafts
        self._row = 0.0  # seconds of one row of a chunk; 0: none has run
        self._chunk: Scheduled | None = None  # what the next pass reads of a sequence that has not been read
        self._ran: dict[int, tuple[int, int]] = {}  # of each sequence in the last pass: its `moves`, tokens drawn
        self._idle = 0

    def guesses(self, items: list[Scheduled]) -> list[Guess]:
        """How many tokens to guess for whom; none while prompts are computed, as rows have their price then."""
        self._chunk = None
        if len(items) > _CROWD or not all(item.count == 1 and item.sample for item in items):
            return []
        able = [item for item in items if self._limit(item) > 0]
        ready = [item for item in able if self._lag(item) < _NEAR]
        count, gain = self._count(items, ready or able) if able else (0, 1.0)
        probing = not count and self._idle >= _PROBE
        self._idle = 0 if count or probing else self._idle + 1
        if not count and not probing:
            self._fade(len(ready or able))
            return []
        if len(ready) < len(able) and not probing:
            self._chunk = self._chunk_of(items, [item for item in able if item not in ready], gain)
        guesses: list[Guess] = [(item, (UNKNOWN,) * min(count or 1, self._limit(item))) for item in ready]
        return guesses or ([] if self._chunk is None else [(items[0], ())])

    def fill(self, batch: Batch) -> list[Guess]:
        """The guesses: the drafter's own, for items that have rows and pages for them."""
        items = [item for item in batch.items if item.draft]
        self._ran = {}
        if not items and self._chunk is None:
            return []
        if batch.copies:  # the model's step makes them, and no page may be written to before
            return [(item, ()) for item in items]
        chains = self._run(batch, items)
        return [(item, _allowed(item.sequence, chain)) for item, chain in zip(items, chains, strict=True)]

    def learn(self, items: list[Scheduled], seconds: float) -> int:
        """A step has been taken in, which took so long; how many drafted tokens were right."""
        self._prices.learn(items, seconds)
        verified = self.tally.add(items)
        for item, right in verified:
            sequence = item.sequence
            moves, drawn = self._ran.get(sequence.id, (-1, 0))
            if moves == sequence.moves:  # else its pages may be others, or have gone
                self._held.wrote(sequence, item.start + min(right + 1, drawn))
            chance = self._chances.get(sequence.id, self._chance)
            for n in range(min(right + 1, len(item.draft))):
                chance += _OWN * ((n < right) - chance)
                self._chance += _SHARED * ((n < right) - self._chance)
            self._chances[sequence.id] = chance
        return sum([right for _, right in verified])

    def forget(self, sequence: Sequence) -> None:
        """Nothing more is asked about a sequence."""
        self._chances.pop(sequence.id, None)
        self._held.forget(sequence)
        self.tally.forget(sequence)

    # -- what it is worth

    def _limit(self, item: Scheduled) -> int:
        """Most tokens to guess: those asked for, and no place beyond the drafter's context."""
        asked = item.sequence.drafted
        return min(self._most if asked is None else min(self._most, asked), self._drafter.limits.context - item.start)

    def _lag(self, item: Scheduled) -> int:
        """Tokens before the item's own that the drafter has not read."""
        return max(item.start - self._held.length(item.sequence), 0)

    def _count(self, items: list[Scheduled], able: list[Scheduled]) -> tuple[int, float]:
        """How many tokens to guess for each that may have any; how many times as many a second that should give."""
        chances = [self._chances.get(item.sequence.id, self._chance) for item in able]
        seconds = self._prices.of(items)
        self._step = seconds[0]
        each = self._pass(len(able))
        plain = len(items) / seconds[0]
        tokens, best, kept = float(len(items)), _GAIN * plain, 0
        right = [1.0] * len(able)
        for n in range(1, min(self._most, (len(seconds) - 1) // len(able)) + 1):
            right = [a * b for a, b in zip(right, chances, strict=True)]
            tokens += sum(right)
            rate = tokens / (seconds[n * len(able)] + _EXTRA + n * each)
            if rate > best:
                best, kept = rate, n
        return kept, best / plain

    def _chunk_of(self, items: list[Scheduled], late: list[Scheduled], gain: float) -> Scheduled | None:
        """What to read of the first sequence whose guesses should save the time that it takes to read all of it.

        An answer is taken to go on for as long as it has. A chunk takes no longer than a step, but for the least.
        """
        step, each, most = self._step, self._pass(1), self._drafter.limits.tokens
        row = self._row or self._drafter.share * (self._times.rates(most)[0] or step)
        rows = min(max(int((step - each) / row), _LEAST), most - _NEAR * len(items))
        for item in late:
            sequence, lag = item.sequence, self._lag(item)
            to_come = min(sequence.max_len - len(sequence.tokens), max(sequence.generated, _HOPED))
            if lag * (row + each / rows) < to_come * (1 - 1 / gain) * step / len(items):
                return Scheduled(sequence, item.start - lag, min(rows, lag), False)
        return None

    # -- what it is

    def _run(self, batch: Batch, items: list[Scheduled]) -> list[tuple[int, ...]]:
        """As many tokens after each item's own as it has drafts, one a pass; the first pass reads the chunk, too."""
        counts = [len(item.draft) for item in items]
        passes = max(counts, default=0)
        ahead = max(passes - 1, 0)
        reads = [self._lacked(item) for item in items]
        if self._chunk:
            reads.append(self._chunk)
        began = time.perf_counter()
        step = self._runner.guessing(reads, self._held.unused(batch, reads, ahead), ahead)
        rows, drawn = len(step.tokens), np.full((max(passes, 1), len(items)), UNKNOWN, np.int32)
        drawn[0] = self._draw(step)
        for read in reads:
            self._held.wrote(read.sequence, read.start + read.count)
        first = time.perf_counter()
        left = list(range(len(items)))
        for n in range(1, passes):
            fewer = [i for i in left if counts[i] > n]
            anew = len(fewer) < len(left) or len(step.tokens) > len(left)
            if anew:
                left = fewer
                alone = [Scheduled(items[i].sequence, items[i].start, 1, True) for i in left]
                step = self._runner.guessing(alone, [], ahead)
            step.tokens[:] = drawn[n - 1, left]
            for counter in (step.positions, step.context, step.sampling.position):
                counter += n if anew else 1
            step.fresh, step.window_fresh = step.fresh[:0], step.window_fresh[:0]
            drawn[n, left] = self._draw(step)
        self._took(len(items), passes, rows, first - began, time.perf_counter() - first)
        self._ran = {item.sequence.id: (item.sequence.moves, len(item.draft)) for item in items}
        return [tuple(chain) for chain in drawn.T.tolist()]

    def _lacked(self, item: Scheduled) -> Scheduled:
        """The rows up to an item's own that the drafter has not computed, the last of which draws."""
        lag = self._lag(item)
        return Scheduled(item.sequence, item.start - lag, lag + 1, True)

    def _draw(self, step: Step) -> I32:
        """The tokens that a step gives, or UNKNOWN. Ids that the drafter does not know are read as 0."""
        step.tokens[step.tokens.view(np.uint32) >= self._drafter.limits.vocab] = 0
        sampled = self._drafter.executor.run(step)
        return np.where(sampled.status == 0, sampled.tokens, np.int32(UNKNOWN))

    def _took(self, items: int, passes: int, rows: int, first: float, rest: float) -> None:
        """What the passes took, the first of which had so many rows."""
        each = self._pass(items)
        if rows == items:
            first, rest = 0.0, first + rest
        else:
            passes -= 1
        if passes > 0:
            self._passes[items] = each + _SLOW * (min(rest / passes, _OUTLIER * each) - each)
        if self._chunk is not None:
            row = max(first - each, first / 4) / self._chunk.count
            self._row = self._row + _SLOW * (row - self._row) if self._row else row

    def _fade(self, items: int) -> None:
        """A bad measurement must not keep drafts away for good."""
        if items in self._passes:
            self._passes[items] += _FADING * (self._drafter.share * self._step - self._passes[items])

    def _pass(self, items: int) -> float:
        """Seconds of a pass for so many sequences; before there was one, by the weights that it reads."""
        return self._passes.get(items, self._drafter.share * self._step)


def _allowed(sequence: Sequence, guess: tuple[int, ...]) -> tuple[int, ...]:
    """As far as tokens were drawn and the sequence's grammar follows."""
    if UNKNOWN in guess:
        guess = guess[: guess.index(UNKNOWN)]
    return guess if sequence.constraint is None else guess[: sequence.constraint.valid(guess)]
