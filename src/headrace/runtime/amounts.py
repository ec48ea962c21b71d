"""How much the steps have read and multiplied, and how long they would have taken at the roof, as running sums.

Owes: the figures of `program.cost` and `program.roof`, in few operations a step. While a step goes on with the same
sequences its figures are made anew every 32nd time: contexts have grown by so much at most.
"""

from __future__ import annotations

import numpy as np

from headrace.program import Program
from headrace.program.cost import Sizes, Work
from headrace.program.roof import Rates, StepBounds
from headrace.runtime.times import F64, attention_of

_EVERY = 32


class Amounts:
    """bytes: read. macs: multiply-adds. seconds: the least that the steps could take; 0 without rates."""

    def __init__(
        self, program: Program, sizes: Sizes, work: Work, tokens: int, rates: Rates | None, bf16: bool = False
    ) -> None:
        bounds = StepBounds(program, sizes, tokens, rates, bf16)
        self.bytes = self.macs = self.seconds = 0.0
        self._tables = [[table.tolist() for table in pair] for pair in (bounds.bytes, bounds.macs, bounds.seconds)]
        self._work = work
        self._rates = rates
        self._step = (0.0, 0.0, 0.0)
        self._age = 0

    def add(self, start: F64, count: F64, logit_rows: F64, *, again: bool) -> None:
        """A step has run: each sequence's first position, rows and rows of logits. again: one row on from the last."""
        self._age = self._age + 1 if again else 0
        if self._age % _EVERY == 0:
            self._step = self._of(start, count, logit_rows)
        read, macs, seconds = self._step
        self.bytes += read
        self.macs += macs
        self.seconds += seconds

    def _of(self, start: F64, count: F64, logit_rows: F64) -> tuple[float, float, float]:
        rows = (int(count.sum()), int(logit_rows.sum()))
        read, macs, seconds = (sum(table[n] for table, n in zip(pair, rows, strict=True)) for pair in self._tables)
        for kind in self._work.attention:
            keys, context = attention_of(start, count, kind)
            of_kind = kind.bytes * float(np.sum(context)), kind.macs * float(np.sum(keys))
            read += of_kind[0]
            macs += of_kind[1]
            if self._rates is not None:
                seconds += max(of_kind[0] / self._rates.bytes, of_kind[1] / self._rates.macs["f32"])
        return read, macs, seconds
