"""What the linears of a model read while it goes through a text: second moments of their inputs.

Owes: for each weight, the mean of x^T x over the rows x that it multiplied, for as many weights at a time as a bound on
memory allows: when another is asked for, the text is run again for it and those that come after it. Deterministic.
Does not know what becomes of the moments, or where the text is from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.backends import Backend, Executor, Limits
from headrace.base.settings import PAGE
from headrace.program import Step
from headrace.program.step import F32
from headrace.runtime.load import Prepared

LENGTH = 256  # tokens of a sequence; all are computed in one step
_READS = ("linear", "qkv", "route", "experts")


class Calibration:
    """A model that is ready to go through a text.

    sequences: token ids, at most LENGTH each. full: all of x^T x, [width, width]; else its diagonal, [width].
    bound: bytes that moments may take at a time; those of one weight are taken whatever they need.
    done: is told the tokens of each sequence that has been run. `backend` must allow taps.
    """

    def __init__(
        self,
        prepared: Prepared,
        backend: Backend,
        sequences: Sequence[Sequence[int]],
        *,
        full: bool,
        bound: int = 1 << 30,
        done: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._sequences, self._full, self._bound, self._done = sequences, full, bound, done
        ops = [op for op in prepared.program.ops if op.kind in _READS]
        self._inputs = {op.weights[0]: op.inputs[0].name for op in ops}
        self._widths = {op.inputs[0].name: op.inputs[0].width for op in ops}
        self._last = ops[-1].inputs[0].name  # is read in the rows with logits alone
        if prepared.model.table.entries["head"].same_as == "embed":
            self._inputs["embed"] = self._inputs["head"]
        self._held: dict[str, F32] = {}
        limits = Limits(LENGTH, 1, -(-LENGTH // PAGE), LENGTH, prepared.config.vocab)
        self._executor: Executor = backend.executor(prepared.program, prepared.weights, limits)

    def close(self) -> None:
        self._executor.close()

    def moments(self, weight: str) -> F32 | None:
        """Of the weight's input, float32; None for a weight that multiplies nothing, or whose input nobody sees."""
        value = self._inputs.get(weight)
        if value is None:
            return None
        if value not in self._held:
            self._held = self._run(self._group(value))
        return self._held[value]

    def _bytes(self, value: str) -> int:
        return 4 * self._widths[value] ** (2 if self._full else 1)

    def _group(self, value: str) -> tuple[str, ...]:
        """The value and those after it, in the order of the program, as many as fit."""
        names = list(self._widths)
        group, size = [value], self._bytes(value)
        for name in names[names.index(value) + 1 :]:
            size += self._bytes(name)
            if size > self._bound:
                break
            group.append(name)
        return tuple(group)

    def _run(self, values: tuple[str, ...]) -> dict[str, F32]:
        self._held = {}  # before others take memory
        shape = (lambda n: (n, n)) if self._full else (lambda n: (n,))
        total = {value: np.zeros(shape(self._widths[value]), np.float32) for value in values}
        for sequence in self._sequences:
            taps = self._executor.run(Step.alone(sequence, head=self._last in values, taps=values)).taps
            for value, x in taps.items():
                total[value] += x.T @ x if self._full else np.einsum("tn,tn->n", x, x)
            self._done(len(sequence))
        rows = max(1, sum(map(len, self._sequences)))
        for moments in total.values():
            moments /= np.float32(rows)
        return total
