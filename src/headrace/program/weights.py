"""Weights as data: what a back end is given to load. Bytes stay in the file's own block format until the back end
repacks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.base.formats import Format
from headrace.program.program import Weight


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one format. data: uint8 [rows, bytes a row] in the file's layout (views of a mapping wherever
    possible)."""

    format: Format
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WeightData:
    """A weight's rows, in parts that lie one under the other (a stack of experts: expert 0's rows, then expert 1's,
    ...).

    A vector is one row. Two weights may share storage (a tied head): then `same_as` names the other and parts are
    equal.
    """

    weight: Weight
    parts: tuple[Part, ...]
    same_as: str | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """How a weight's rows lie in a file, known before they are read: (format, rows) of each part, as `WeightData` has
    them. Of a vector: float32, one row."""

    weight: Weight
    parts: tuple[tuple[Format, int], ...]
    same_as: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as stored; those that are shared count here too."""
        return sum(rows * format.row_bytes(self.weight.columns) for format, rows in self.parts)


class WeightSource(Protocol):
    """Where a back end takes weights from, each once, in any order."""

    def load(self, name: str) -> WeightData: ...

    def release(self, name: str) -> None:
        """The back end has repacked it: the mapping's pages may go."""
