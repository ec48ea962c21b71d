"""Channels of what linears read made alike: what stands before gives some less, and the linears weigh these more.

Owes: a factor for each channel, a power of two, so that the float model stays the same, bit for bit. A few channels of
a residual stream are tens of times as large as the others: in a block of 32 they take the steps of int8 inputs from the
rest, and their weights matter most. (SmoothQuant, arXiv 2211.10438, and AWQ, 2306.00978, with what may be moved for
nothing.) Does not know formats, or files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.models import Model
from headrace.program import Op, Program, Value
from headrace.program.step import F32

_MOST = 6  # of a factor's exponent
_LINEAR = ("linear", "qkv")


def makers(program: Program, model: Model) -> dict[str, str]:
    """For each linear's weight, if there is one, the weight that makes its inputs and may make them smaller.

    It is a norm, or a gated linear, whose second half of rows multiplies; only such linears read what it makes.
    """
    entries = model.table.entries
    shared = {name for name, entry in entries.items() if entry.same_as} | {e.same_as for e in entries.values()}
    uses = Counter(name for op in program.ops for name in op.weights)
    alone = {name for name, times in uses.items() if times == 1} - shared
    readers: dict[int, list[Op]] = defaultdict(list)
    for op in program.ops:
        for value in op.inputs:
            readers[value.id].append(op)
    found: dict[str, str] = {}
    for op in program.ops:
        made = _made(op, readers)
        after = readers[made.id] if made else []
        linear = all(reader.kind in _LINEAR and made not in reader.inputs[1:] for reader in after)
        if after and linear and alone.issuperset([op.weights[0], *(reader.weights[0] for reader in after)]):
            found |= {reader.weights[0]: op.weights[0] for reader in after}
    return found


def _made(op: Op, readers: Mapping[int, Sequence[Op]]) -> Value | None:
    """What an op makes whose weight can make it smaller: a norm, or a linear (no bias, nothing added) before a glu."""
    if op.kind == "norm":
        return op.outputs[0]
    if op.kind == "linear" and len(op.weights) == len(op.inputs) == 1:
        after = readers[op.outputs[0].id]
        if [reader.kind for reader in after] == ["glu"]:
            return after[0].outputs[0]
    return None


class Smoothing:
    """Factors of the weights of a model. strength: from 0, none, to 1, channels as large as each other.

    moments: of what a weight reads, [width] or [width, width], as `Calibration` tells them.
    """

    def __init__(self, makers: Mapping[str, str], moments: Callable[[str], F32 | None], strength: float) -> None:
        self._moments, self._strength = moments, strength
        self._makers = makers if strength else {}
        self._known: dict[str, F32 | None] = {}
        self._readers = {maker: reader for reader, maker in reversed(list(self._makers.items()))}

    def columns(self, weight: str) -> F32 | None:
        """What a matrix's columns are multiplied with; None: nothing."""
        maker = self._makers.get(weight)
        return None if maker is None else self._factors(self._readers[maker])

    def rows(self, weight: str, count: int) -> F32 | None:
        """What the rows of a matrix of so many, or a norm's values, are multiplied with; None: nothing.

        Of a gated linear's rows the second half multiplies what the first one gives, and it alone is changed.
        """
        reader = self._readers.get(weight)
        factors = None if reader is None else self._factors(reader)
        if factors is None:
            return None
        return np.concatenate([np.ones(count - len(factors), np.float32), np.float32(1) / factors])

    def _factors(self, linear: str) -> F32 | None:
        if linear not in self._known:  # a text may have to be run for it
            self._known[linear] = self._even(self._moments(linear))
        return self._known[linear]

    def _even(self, moments: F32 | None) -> F32 | None:
        if moments is None:
            return None
        squares = np.asarray(moments.diagonal() if moments.ndim == 2 else moments, np.float64)
        if not squares.any():
            return None
        size = self._strength / 2 * np.log2(np.maximum(squares, 1e-12 * squares.max()))
        factors: F32 = np.exp2(np.clip(np.rint(size - size.mean()), -_MOST, _MOST)).astype(np.float32)
        return factors
