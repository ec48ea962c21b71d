"""Weights as the native kernels read them: panels of 16 rows, packed once from the file's own blocks, kept once.

Does not know what a weight is for. Memory at any moment: what is packed, and the file's pages of one weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace._native import Packed, Room, packed_bytes
from headrace.base.errors import EngineError
from headrace.base.formats import F32
from headrace.program import Layout, Part, Weight, WeightData, WeightSource
from headrace.quant.blocks import dequantize

PANEL = 16
CHUNK_BYTES = 1 << 20
MOST_PARTS = 16

Floats = NDArray[np.float32]
Piece = tuple[Packed, int, int]
"""A packed matrix, its first row, a number of rows."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight's rows as pieces, one under the other; one list of pieces for each matrix of a stack."""

    stack: tuple[tuple[Piece, ...], ...]

    @property
    def pieces(self) -> list[Piece]:
        (only,) = self.stack
        return list(only)

    @property
    def formats(self) -> set[str]:
        return {packed.format for pieces in self.stack for packed, _, _ in pieces}

    def packed(self) -> Iterator[Packed]:
        return (packed for pieces in self.stack for packed, _, _ in pieces)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, by name: matrices packed, vectors float32."""

    matrices: dict[str, Matrix]
    vectors: dict[str, Floats]

    @property
    def nbytes(self) -> int:
        """Bytes in memory; what is shared counts once."""
        packed = {id(p): p.nbytes for m in self.matrices.values() for p in m.packed()}
        return sum(packed.values()) + sum(v.nbytes for v in self.vectors.values())


@dataclass(frozen=True, slots=True)
class _Packer:
    """Where matrices go, and who packs them."""

    room: Room
    pool: ThreadPoolExecutor

    def packed(self, part: Part, first: int, rows: int, columns: int) -> Packed:
        """Rows of a part, packed by all threads."""
        packed = Packed(part.format.name, rows, columns, self.room)
        self.fill(packed, part, first, rows)
        return packed

    def fill(self, packed: Packed, part: Part, first: int, rows: int) -> None:
        step = max(PANEL, CHUNK_BYTES // max(1, packed.row_bytes) // PANEL * PANEL)

        def pack(row: int) -> None:
            packed.pack(row, np.ascontiguousarray(part.data[first + row : first + min(row + step, rows)]))

        if rows <= step:
            pack(0)
        else:
            list(self.pool.map(pack, range(0, rows, step)))


def load(
    weights: Iterable[Weight],
    source: WeightSource,
    threads: int,
    exact: frozenset[str] = frozenset(),
    halved: frozenset[str] = frozenset(),
) -> Loaded:
    """Packs one weight after the other and lets go of each one's bytes in the file.

    exact: weights that are kept in float32, so that nothing rounds their inputs. halved: those whose upper and lower
    half are used together: two pieces, whose panels lie in turn if both have one format.
    """
    loaded, all_weights = Loaded({}, {}), list(weights)
    room = Room(sum(map(_most_bytes, all_weights)))
    with ThreadPoolExecutor(threads) as pool:
        for weight in all_weights:
            _load_one(weight, source, loaded, _Packer(room, pool), weight.name in exact, weight.name in halved)
    return loaded


def loaded_bytes(layouts: Iterable[Layout], exact: frozenset[str] = frozenset()) -> int:
    """`Loaded.nbytes` of what `load` will make of weights that lie so; exact: as there."""
    found = {layout.weight.name: layout for layout in layouts}
    return sum(
        _bytes_of(layout, layout.weight.name in exact) for layout in found.values() if layout.same_as not in found
    )


def _bytes_of(layout: Layout, exact: bool) -> int:
    weight = layout.weight
    if len(weight.shape) == 1:
        return F32.row_bytes(weight.columns)
    total = at = 0
    for format, rows in layout.parts:
        cuts = [cut[1:] for cut in _cuts(at, rows, weight.rows)]
        total += sum(packed_bytes((F32 if exact else format).name, n, weight.columns) for _, n in _packs(cuts))
        at += rows
    return total


def _most_bytes(weight: Weight) -> int:
    """What a weight takes at most: no format is larger than float32, each part may add a panel."""
    matrices = weight.shape[0] if len(weight.shape) == 3 else 1
    panels = matrices * (-(-weight.rows // PANEL) + MOST_PARTS) if len(weight.shape) > 1 else 0
    return panels * PANEL * (weight.columns + 2) * 4


def _load_one(weight: Weight, source: WeightSource, loaded: Loaded, packer: _Packer, exact: bool, halved: bool) -> None:
    if weight.name in loaded.matrices:
        return
    data = source.load(weight.name)
    if exact:
        data = replace(data, parts=tuple(map(_as_floats, data.parts)))
    if len(weight.shape) == 1:
        values = np.concatenate([dequantize(p.format, p.data).reshape(-1) for p in data.parts])
        loaded.vectors[weight.name] = np.ascontiguousarray(values, np.float32)
    else:
        shared = loaded.matrices.get(data.same_as) if data.same_as else None
        loaded.matrices[weight.name] = (
            shared or (_pack_halves(weight, data, packer) if halved else None) or _pack(weight, data, packer)
        )
        if data.same_as:
            loaded.matrices[data.same_as] = loaded.matrices[weight.name]
    source.release(weight.name)


def _as_floats(part: Part) -> Part:
    values = dequantize(part.format, np.ascontiguousarray(part.data)).astype("<f4")
    return Part(F32, values.view(np.uint8).reshape(len(values), -1))


def _pack_halves(weight: Weight, data: WeightData, packer: _Packer) -> Matrix | None:
    """The halves with their panels in turn; None if they are no whole panels of one format."""
    rows, odd = divmod(weight.rows, 2)
    counts = [len(p.data) for p in data.parts]
    if odd or rows % PANEL or counts not in ([rows, rows], [2 * rows]) or len({p.format for p in data.parts}) > 1:
        return None
    halves = Packed.in_turn(data.parts[0].format.name, rows, weight.columns, packer.room)
    for i, half in enumerate(halves):
        packer.fill(half, data.parts[i % len(counts)], (i - i % len(counts)) * rows, rows)
    return Matrix((tuple((half, 0, rows) for half in halves),))


def _pack(weight: Weight, data: WeightData, packer: _Packer) -> Matrix:
    count = weight.shape[0] if len(weight.shape) == 3 else 1
    if sum(len(p.data) for p in data.parts) != count * weight.rows:
        raise EngineError(
            f"weight {weight.name}: its parts don't have the {count * weight.rows} rows of {weight.shape}"
        )
    stack: list[list[Piece]] = [[] for _ in range(count)]
    at = 0
    for part in data.parts:
        cuts = list(_cuts(at, len(part.data), weight.rows))
        for (index, _, _), piece in zip(
            cuts, _pieces(part, [c[1:] for c in cuts], weight.columns, packer), strict=True
        ):
            stack[index].append(piece)
        at += len(part.data)
    return Matrix(tuple(map(tuple, stack)))


def _cuts(at: int, rows: int, each: int) -> Iterator[tuple[int, int, int]]:
    """Where a part that begins at row `at` of a stack crosses its matrices: (matrix, first row in the part, rows)."""
    done = 0
    while done < rows:
        index, inside = divmod(at + done, each)
        n = min(each - inside, rows - done)
        yield index, done, n
        done += n


def _pieces(part: Part, cuts: list[tuple[int, int]], columns: int, packer: _Packer) -> list[Piece]:
    packs = _packs(cuts)
    made = [packer.packed(part, first, n, columns) for first, n in packs]
    if len(made) < len(cuts):
        return [(made[0], first, n) for first, n in cuts]
    return [(packed, 0, n) for packed, (_, n) in zip(made, cuts, strict=True)]


def _packs(cuts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first row, rows) of each packed matrix that a part becomes, of which every matrix of a stack gets its cut.

    One for all if each begins on a panel, else one for each.
    """
    aligned = all(first % PANEL == 0 for first, _ in cuts)
    return [(0, sum(n for _, n in cuts))] if aligned else cuts
