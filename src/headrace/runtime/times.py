"""How long a step takes on this machine, as learnt from the steps that were run, and how large it may be for its pace.

Owes: predictions that are positive and grow with a step, close to what was measured where there are measurements, and
sane before there are any. Does not know: clocks (times are handed in), requests, the kernels behind the times.

A step's time is a sum of shares with rates that are never negative: something fixed (the weights are read once), its
rows, the same again for rows beyond the first few (whose arithmetic hides behind the reading of the weights: the curve
is flat first and steep later), rows of logits, attention by multiply-adds and by bytes.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from headrace.core.scheduler import Scheduled
from headrace.program.cost import Attention, Work

HIDDEN = 8  # rows whose arithmetic hides, more or less, behind the reading of the weights
KEPT = 8  # steps of one size that are remembered
EVERY = 8  # once that many are known, one in so many is looked at
PATIENCE = 2.0  # how many times a step without prompts one with them may take, if nobody says: an even share for each

# Seconds a byte and a multiply-add until there are measurements: those of a slow machine.
_BYTE, _MAC = 1 / 10e9, 1 / 50e9
_TRUST = 0.003  # the weight of that guess beside one step's measurement
_USUAL = 0.1  # deviations from the prediction beyond which a step counts less and less
_ROUNDS, _SWEEPS = 3, 12

F64 = NDArray[np.float64]
Extent = tuple[list[int], list[int], int]  # of each item the first position and the rows; rows of logits


class StepTimes:
    """Predicts the seconds of a step from its items."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._factors: F64 = np.ones(6)  # by which the shares of a slow machine are multiplied
        self._known: dict[int, deque[tuple[Extent, float]]] = {}
        self._steps: Counter[int] = Counter()
        self._stale = False

    def seconds(self, items: list[Scheduled]) -> float:
        """What a step of these items should take."""
        if self._stale:
            self._fit()
        return float(self._shares(_extent(items)) @ self._factors)

    def learn(self, items: list[Scheduled], seconds: float) -> None:
        """A step of these items took so long. Most steps of sizes that are known well are passed over."""
        size = sum([item.count for item in items]).bit_length()
        known = self._known.get(size)
        if known is None:
            known = self._known[size] = deque(maxlen=KEPT)
        self._steps[size] += 1
        if len(known) < KEPT or self._steps[size] % EVERY == 0:
            known.append((_extent(items), seconds))
            self._stale = True

    def _shares(self, extent: Extent) -> F64:
        """Seconds that each share would take on a slow machine."""
        w = self._work
        start, count = np.array(extent[0], np.float64), np.array(extent[1], np.float64)
        rows = float(count.sum())
        macs = sum(kind.macs * _keys(start, count, kind) for kind in w.attention)
        read = sum(kind.bytes * _context(start, count, kind) for kind in w.attention)
        return np.array(
            (
                w.weight_bytes * _BYTE,
                rows * w.row * _MAC,
                max(0.0, rows - HIDDEN) * w.row * _MAC,
                extent[2] * w.logit_row * _MAC,
                macs * _MAC,
                read * _BYTE,
            )
        )

    def _fit(self) -> None:
        """Least squares of relative deviations, each size counting alike; what is far off counts less (Huber)."""
        self._stale = False
        shares = np.array([self._shares(e) / seconds for known in self._known.values() for e, seconds in known])
        even = np.array([1 / len(known) for known in self._known.values() for _ in known])
        weights = even
        for _ in range(_ROUNDS):
            weighed = shares.T * weights
            gram, right = weighed @ shares, weighed.sum(axis=1)
            self._factors = _nonnegative(gram + _TRUST * np.eye(6), right + _TRUST, self._factors)
            weights = even / np.maximum(1.0, np.abs(shares @ self._factors - 1) / _USUAL)


def _extent(items: list[Scheduled]) -> Extent:
    return [i.start for i in items], [i.count for i in items], sum([i.sample for i in items])


def _nonnegative(gram: F64, right: F64, start: F64) -> F64:
    """Minimises x gram x / 2 - right x over x >= 0 by coordinate descent from `start`."""
    g, r, x = gram.tolist(), right.tolist(), start.tolist()
    for _ in range(_SWEEPS):
        for i, row in enumerate(g):
            gradient = sum(a * b for a, b in zip(row, x, strict=True)) - r[i]
            x[i] = max(0.0, x[i] - gradient / row[i])
    return np.array(x)


def _keys(start: F64, count: F64, kind: Attention) -> float:
    """Keys that rows `start` .. `start + count` of each sequence see, together."""
    return float((_triangle(start + count, kind) - _triangle(start, kind)).sum())


def _triangle(n: F64, kind: Attention) -> F64:
    full = n if kind.window is None else np.minimum(n, kind.window)
    return full * (full + 1) / 2 + (n - full) * full


def _context(start: F64, count: F64, kind: Attention) -> float:
    """Keys of each sequence that are read, once for all of its rows."""
    end = start + count
    return float((end if kind.window is None else np.minimum(end, kind.window + count - 1)).sum())


class Pace:
    """How many tokens of prompts may join sequences that decode, for a step to last no longer than `seconds`.

    seconds: None takes `PATIENCE` times the step without prompts. most: tokens of a step. A `core.scheduler.Pace`.
    """

    def __init__(self, times: StepTimes, seconds: float | None, most: int) -> None:
        self._times = times
        self._seconds = seconds
        self._most = most

    def __call__(self, items: list[Scheduled], start: int) -> int:
        """By bisection; 0 where the decoding alone takes as long."""
        seconds = self._times.seconds
        limit = PATIENCE * seconds(items) if self._seconds is None else self._seconds
        fits, not_fits = 0, self._most + 1
        while not_fits - fits > 1:
            middle = (fits + not_fits) // 2
            chunk = Scheduled(items[0].sequence, start, middle, False)
            if seconds([*items, chunk]) <= limit:
                fits = middle
            else:
                not_fits = middle
        return fits
