"""How many tokens to guess for whom: as many as let the step give the most tokens a second.

Owes: guesses only where they should pay, by the learnt times of steps and by how good guesses like them were; and the
counts that are told. What is guessed never changes what is said: a step verifies it. Does not know: clocks, requests.

The chance that a guess after a match of m tokens is right is learnt for lengths of its order of magnitude, for each
sequence, beginning with what others have shown. The n-th of a chain counts as after m + n - 1 tokens, as those before
it must have been right. What a match foretells is judged by the token that comes, drafted or not: so chances stay known
while it does not pay. A match that was wrong is looked for anew, after twice as many tokens as the last time while no
match of a few tokens goes on, and when look-ups have taken no more than a hundredth of the time of steps.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from headrace.base.speculation import Speculation
from headrace.core.scheduler import Batch, Scheduled
from headrace.core.sequence import Sequence
from headrace.runtime.draft.lookup import I32, History
from headrace.runtime.draft.past import Past
from headrace.runtime.draft.prices import Prices
from headrace.runtime.draft.tally import Tally
from headrace.runtime.times import StepTimes

Guess = tuple[Scheduled, tuple[int, ...]]

CHANCES = (0.0, 0.25, 0.4, 0.6, 0.75, 0.85, 0.9)  # at first, by bits of the match's length
_LAST = len(CHANCES) - 1
_OWN, _SHARED = 0.1, 0.01  # what one guess changes of a sequence's chances, and of those that others begin with
_LEAST = 0.05  # less likely guesses are not looked at
_EXTRA = 120e-6  # seconds: what a step that cannot go on from the last one's arrays takes besides
_GAIN = 1.05  # what a draft must promise: tokens a second against none; rows and chances are known to a few per cent
_CROWD = 16  # sequences beyond which nothing is guessed
_LOOK_UP = 30e-6  # seconds, with cold caches
_SHARE = 0.01  # of the time of steps, for look-ups
_PAUSE = 8  # tokens of a text after which a match is looked for, however often in vain
_TELLING = 3  # tokens of a match that is no chance
_TOKEN = 0.25e-9  # seconds that a look-up in what others said takes for each of its tokens


class _Trail(History):
    """One sequence's tokens, and how good guesses at them were. pause: tokens from one look-up to the next."""

    __slots__ = ("chances", "pause")

    def __init__(self, tokens: list[int], chances: list[float]) -> None:
        super().__init__(tokens)
        self.chances = chances.copy()
        self.pause = 0


class LookUps:
    """Guesses that a text goes on as it did before. times: prices of steps."""

    def __init__(self, config: Speculation, times: StepTimes) -> None:
        self.tally = Tally(config.num_speculative_tokens)
        self._config = config
        self._prices = Prices(times, config.num_speculative_tokens)
        self._trails: dict[int, _Trail] = {}
        self._past = Past(config.shared_history_tokens) if config.shared_history_tokens else None
        self._chances = list(CHANCES)
        self._steps = 0
        self._credit = 0.0  # seconds that look-ups may take
        self._priced: list[float] = []  # prices of the last step, and whether any draft could pay at them
        self._hopeful = False

    def guesses(self, items: list[Scheduled]) -> list[Guess]:
        """What to draft for a step of these items; [] while prompts are computed, as rows have their price then."""
        self._steps += 1
        if len(items) > _CROWD or not all(item.count == 1 and item.sample for item in items):
            return []
        seconds = self._prices.of(items)
        if seconds is not self._priced:
            self._priced, self._hopeful = seconds, self._hope(len(items), seconds)
        if not self._hopeful:
            return []
        self._credit = min(self._credit + _SHARE * seconds[0], _CROWD * _LOOK_UP)
        chains: list[tuple[Scheduled, list[float]]] = []
        first = self._steps % len(items)
        for item in (*items[first:], *items[:first]):
            chain = self._chain(item.sequence)
            if chain:
                chains.append((item, chain))
        return self._choose(chains, seconds, len(items)) if chains else []

    def fill(self, batch: Batch) -> tuple[Guess, ...]:
        """All guesses are known at once."""
        return ()

    def learn(self, items: list[Scheduled], seconds: float) -> int:
        """A step has been taken in, which took so long; how many drafted tokens were right."""
        self._prices.learn(items, seconds)
        return sum([right for _, right in self.tally.add(items)])

    def forget(self, sequence: Sequence) -> None:
        """Nothing more is asked about a sequence; what it said may serve others of the same caller."""
        trail = self._trails.pop(sequence.id, None)
        if trail is not None and self._past is not None:
            self._past.add((sequence.tenant, sequence.salt), sequence.tokens)
        self.tally.forget(sequence)

    # -- what a guess is worth

    def _chain(self, sequence: Sequence) -> list[float]:
        """Chances that the first, the first two, ... of the tokens that should follow are right."""
        config = self._config
        most = config.num_speculative_tokens if sequence.drafted is None else sequence.drafted
        if not most:
            return []
        trail = self._trails.get(sequence.id)
        if trail is None:
            trail = self._trails[sequence.id] = _Trail(sequence.tokens, self._chances)
        elif not trail.length and (len(sequence.tokens) - trail.size < trail.pause or self._credit < _LOOK_UP):
            return []
        else:
            for length, right in trail.follow(sequence.tokens[trail.size :]):
                self._judge(trail.chances, _bucket(length), right)
                if right and length >= _TELLING:
                    trail.pause = 0
        if not trail.length and self._credit >= _LOOK_UP:
            self._credit -= _LOOK_UP
            trail.pause = min(2 * trail.pause + 1, _PAUSE)
            trail.look_up(config.prompt_lookup_min, config.prompt_lookup_max)
            if trail.length < _TELLING and self._past is not None:
                self._look_back(trail, self._past.of((sequence.tenant, sequence.salt)))
        if not trail.length or trail.chances[_bucket(trail.length)] < _LEAST:
            return []
        each = [trail.chances[_bucket(trail.length + n)] for n in range(min(most, config.num_speculative_tokens))]
        return list(accumulate(each, mul))

    def _look_back(self, trail: _Trail, said: I32 | None) -> None:
        """Go on as an earlier sequence did, where this one's own text has nothing to say."""
        if said is not None:
            self._credit -= len(said) * _TOKEN
            trail.look_in(said, max(self._config.prompt_lookup_min, _TELLING), self._config.prompt_lookup_max)

    def _judge(self, chances: list[float], bucket: int, right: bool) -> None:
        chances[bucket] += _OWN * (right - chances[bucket])
        self._chances[bucket] += _SHARED * (right - self._chances[bucket])

    # -- what it costs

    def _hope(self, count: int, seconds: list[float]) -> bool:
        """Whether likely guesses could pay at all. seconds: see `Prices.of`."""
        least = _GAIN * count / seconds[0]
        return any((count + CHANCES[_LAST] * n) / (each + _EXTRA) > least for n, each in enumerate(seconds))

    def _choose(self, chains: list[tuple[Scheduled, list[float]]], seconds: list[float], sequences: int) -> list[Guess]:
        """The likeliest guesses first, up to where the step gives most tokens a second."""
        ranked = [(chance, i) for i, (_, chain) in enumerate(chains) for chance in chain if chance > _LEAST]
        ranked.sort(key=lambda each: -each[0])
        tokens, best, kept = float(sequences), _GAIN * sequences / seconds[0], 0
        for n, (chance, _) in enumerate(ranked[: len(seconds) - 1], 1):
            tokens += chance
            rate = tokens / (seconds[n] + _EXTRA)
            if rate > best:
                best, kept = rate, n
        counts = [0] * len(chains)
        for _, i in ranked[:kept]:
            counts[i] += 1
        drafts = [(item, self._draft(item.sequence, n)) for (item, _), n in zip(chains, counts, strict=True) if n]
        return [(item, draft) for item, draft in drafts if draft]

    def _draft(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Of what should follow, as much as the sequence's grammar allows."""
        draft = self._trails[sequence.id].next(count)
        return draft if sequence.constraint is None else draft[: sequence.constraint.valid(draft)]


def _bucket(length: int) -> int:
    return min(length.bit_length(), _LAST)
