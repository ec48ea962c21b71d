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
from headrace.program import Sampling, Step
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
            taps = self._executor.run(_step(sequence, self._last in values, values)).taps
            for value, x in taps.items():
                total[value] += x.T @ x if self._full else np.einsum("tn,tn->n", x, x)
            self._done(len(sequence))
        rows = max(1, sum(map(len, self._sequences)))
        for moments in total.values():
            moments /= np.float32(rows)
        return total


def _step(sequence: Sequence[int], head: bool, taps: tuple[str, ...]) -> Step:
    """All of a sequence at once. head: with logits of all rows, so that what the head reads can be seen."""
    n = len(sequence)
    positions, pages = np.arange(n, dtype=np.int32), np.arange(-(-n // PAGE), dtype=np.int32)
    rows = positions if head else positions[-1:]
    return Step(
        tokens=np.asarray(sequence, np.int32),
        positions=positions,
        query_start=np.array([0, n], np.int32),
        context=np.array([n], np.int32),
        page_indptr=np.array([0, len(pages)], np.int32),
        pages=pages,
        fresh=pages,
        logit_rows=rows,
        sampling=_greedy(len(rows)),
        taps=taps,
    )


def _greedy(rows: int) -> Sampling:
    """Nobody looks at what is drawn."""
    zero, minus = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    off, one = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    starts, nothing = np.zeros(rows + 1, np.int32), np.zeros(0, np.int32)
    return Sampling(
        temperature=off,
        top_k=zero,
        top_p=one,
        min_p=off,
        repetition=one,
        presence=off,
        frequency=off,
        seed=np.zeros(rows, np.uint64),
        position=zero,
        choice=zero,
        target=minus,
        logprobs=minus,
        bias_indptr=starts,
        bias_ids=nothing,
        bias_values=np.zeros(0, np.float32),
        penalty_indptr=starts,
        penalty_ids=nothing,
        penalty_counts=nothing,
        mask_rows=minus,
        masks=np.zeros((0, 1), np.int32),
    )
