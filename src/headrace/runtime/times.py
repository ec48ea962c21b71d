"""How long a step takes on this machine, as learnt from the steps that were run, and how large it may be for its pace.

Owes: predictions that are positive and grow with a step, close to what was measured where there are measurements, and
sane before there are any. Does not know: clocks (times are handed in), requests, the kernels behind the times.

A step's time is a sum of parts with rates that are all positive: something fixed (the weights are read once), its
rows, the same again for rows beyond the first few (whose arithmetic hides behind the reading of the weights: the curve
is flat first and steep later), rows of logits, attention by multiply-adds and by bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.scheduler import Scheduled
from headrace.program.cost import Attention, Work

HIDDEN = 8  # rows whose arithmetic hides, more or less, behind the reading of the weights
KEPT = 8  # steps of one size that are remembered
EVERY = 32  # once that many are known, one in so many is looked at
PATIENCE = 2.0  # how many times a step without prompts one with them may take, if nobody says: an even share for each

# Seconds a byte and a multiply-add until there are measurements: those of a slow machine.
_BYTE, _MAC = 1 / 10e9, 1 / 50e9
_TRUST = 0.003  # the weight of that guess beside one step's measurement
_LEAST = 1e-4  # of that guess: no machine is faster, whatever a fit makes of a few odd measurements
_SWEEPS = 40

F64 = NDArray[np.float64]


class StepTimes:
    """Predicts the seconds of a step from its items."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._factors: F64 = np.ones(6)  # by which the parts of a slow machine's time are multiplied
        self._rates: list[float] = self._factors.tolist()
        self._known: dict[int, deque[F64]] = {}  # by size: its parts over what the step took
        self._steps: Counter[int] = Counter()
        self._stale = False

    def seconds(self, items: list[Scheduled]) -> float:
        """What a step of these items should take."""
        return float(self.curve(items, 0, 0)[0])

    def curve(self, items: list[Scheduled], start: int, most: int) -> F64:
        """The same with 0 .. `most` rows of one more sequence, from position `start`, that yields no logits."""
        self.refresh()
        return np.asarray(self._factors @ self._parts(items, start, most))

    def drafting(self, items: list[Scheduled], most: int) -> list[float]:
        """The same with 0 .. `most` drafted tokens, whose rows yield logits too, after the first item's one row."""
        rows = self.curve(items[1:], items[0].start, most + 1)[1:]
        each = float(self._factors[3]) * self._work.logit_row * _MAC
        seconds: list[float] = (rows + each * np.arange(1, most + 2)).tolist()
        return seconds

    def refresh(self) -> None:
        """Take in what was learnt since the last time; 0.2 ms where that is anything."""
        if self._stale:
            self._fit()

    def shares(self, start: F64, count: F64, logit_rows: F64) -> F64:
        """`divided` by the rates of the last `refresh`."""
        return divided(self._work, self._rates, start, count, logit_rows)

    def rates(self, most: int) -> tuple[float, float]:
        """Seconds a token in a step of `most` rows, and of a step of one row; zeros before a prompt was timed."""
        if not any(size > HIDDEN.bit_length() for size in self._known):
            return 0.0, 0.0
        curve = self.curve([], 0, most)
        return float(curve[-1]) / most, float(curve[1])

    def learn(self, items: list[Scheduled], seconds: float) -> None:
        """A step of these items took so long. Most steps of sizes that are known well are passed over."""
        size = sum([item.count for item in items]).bit_length()
        known = self._known.get(size)
        if known is None:
            known = self._known[size] = deque(maxlen=KEPT)
        self._steps[size] += 1
        if len(known) < KEPT or self._steps[size] % EVERY == 0:
            known.append(self._parts(items, 0, 0)[:, 0] / seconds)
            self._stale = True

    def _parts(self, items: list[Scheduled], start: int, most: int) -> F64:
        """Seconds that each part of `curve` would take on a slow machine [6, most + 1]."""
        w = self._work
        begin, count = np.array([i.start for i in items], np.float64), np.array([i.count for i in items], np.float64)
        more = np.arange(most + 1.0)
        rows = more + count.sum()
        macs, read = np.zeros(most + 1), np.zeros(most + 1)
        for kind in w.attention:
            macs += kind.macs * (_keys(begin, count, kind).sum() + _keys(start, more, kind))
            read += kind.bytes * (_context(begin, count, kind).sum() + (more > 0) * _context(start, more, kind))
        parts = np.empty((6, most + 1))
        parts[0] = w.weight_bytes * _BYTE
        parts[1] = rows * w.row * _MAC
        parts[2] = np.maximum(0.0, rows - HIDDEN) * w.row * _MAC
        parts[3] = sum([i.sample + len(i.draft) for i in items]) * w.logit_row * _MAC
        parts[4] = macs * _MAC
        parts[5] = read * _BYTE
        return parts

    def _fit(self) -> None:
        """Least squares of deviations over measured times, each size counting alike: a step that was held up by other
        work deviates by 1 at most, however long it took."""
        self._stale = False
        parts = np.array([part for known in self._known.values() for part in known])
        weighed = parts.T * [1 / len(known) for known in self._known.values() for _ in known]
        gram, right = weighed @ parts + _TRUST * np.eye(6), weighed.sum(axis=1) + _TRUST
        self._factors = _positive(gram, right, self._factors)
        self._rates = self._factors.tolist()


def divided(work: Work, factors: Sequence[float], start: F64, count: F64, logit_rows: F64) -> F64:
    """Each sequence's share of a step [n], positive, together 1.

    What the step does once for all rows, and the linears, are divided by rows; attention and rows of logits are the
    sequence's own. The two are weighed by what each should take: `factors` times a slow machine's rates.
    start, count, logit_rows [n]: each sequence's first position, its rows, and how many of these yield logits.
    """
    rows = float(count.sum())
    once = factors[0] * work.weight_bytes * _BYTE
    linear = (factors[1] * rows + factors[2] * max(0.0, rows - HIDDEN)) * work.row * _MAC
    price = count * ((once + linear) / rows) + logit_rows * (factors[3] * work.logit_row * _MAC)
    for kind in work.attention:
        keys, context = attention_of(start, count, kind)
        price += keys * (factors[4] * kind.macs * _MAC) + context * (factors[5] * kind.bytes * _BYTE)
    total = float(price.sum())
    return price / total if total > 0 else count / rows


def attention_of(start: F64, count: F64, kind: Attention) -> tuple[F64, F64]:
    """Keys that each sequence's rows see, together, and tokens of its cache that are read [n]."""
    if count.max() > 1:
        return _keys(start, count, kind), _context(start, count, kind)
    seen = start + 1 if kind.window is None else np.minimum(start + 1, kind.window)
    return seen, seen  # a row each: in few operations


def _positive(gram: F64, right: F64, start: F64) -> F64:
    """Minimises x gram x / 2 - right x over x >= _LEAST by coordinate descent from `start`."""
    g, r, x = gram.tolist(), right.tolist(), start.tolist()
    for _ in range(_SWEEPS):
        for i, row in enumerate(g):
            gradient = sum(a * b for a, b in zip(row, x, strict=True)) - r[i]
            x[i] = max(_LEAST, x[i] - gradient / row[i])
    return np.array(x)


def _keys(start: F64 | int, count: F64, kind: Attention) -> F64:
    """Keys that a sequence's rows `start` .. `start + count` see, together."""
    if kind.window is None:
        return count * (start + (count + 1) / 2)
    return _triangle(start + count, kind) - _triangle(np.asarray(start, np.float64), kind)


def _triangle(n: F64, kind: Attention) -> F64:
    full = n if kind.window is None else np.minimum(n, kind.window)
    return np.asarray(full * (full + 1) / 2 + (n - full) * full)


def _context(start: F64 | int, count: F64, kind: Attention) -> F64:
    """Keys of a sequence that are read, once for all of its rows."""
    end = start + count
    return end if kind.window is None else np.minimum(end, kind.window + count - 1)


class Pace:
    """How many tokens of prompts may join sequences that decode, for a step to last no longer than `seconds`.

    seconds: None takes `PATIENCE` times the step without prompts. most: tokens of a step. A `core.scheduler.Pace`.
    """

    def __init__(self, times: StepTimes, seconds: float | None, most: int) -> None:
        self._times = times
        self._seconds = seconds
        self._most = most

    def __call__(self, items: list[Scheduled], start: int) -> int:
        """0 where the decoding alone takes as long."""
        curve = self._times.curve(items, start, self._most)
        limit = PATIENCE * curve[0] if self._seconds is None else self._seconds
        return max(0, int(np.searchsorted(curve, limit, side="right")) - 1)
