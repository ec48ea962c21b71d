"""What packed weights of other libraries have in common: integers times scales, by groups of a row's inputs.

Owes: blocks of ours that hold the same numbers, made without a float in between: value = (quant - zero) * scale.
Four bits with one zero point for all become q4_0, with zero points of their own q4_z; eight bits become q8_0. Exact
where float16 holds a scale, as it does those that are float16 and, from 2^-17 to 65504, bfloat16; others are rounded.
Where a group's inputs do not follow each other (act-order) no block can share its scale: such weights become float16.
Does not know files: a part is a shape, a format and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.base.formats import F16, FORMATS, Q4_Z, Format
from headrace.quant.blocks import LAYOUTS, Bytes, Floats, dequantize

Q4_0, Q8_0 = FORMATS["q4_0"], FORMATS["q8_0"]
RUN = 32  # values of a block in all three
FLOATS = ("f16", "bf16", "f32")
_VALUES = 1 << 20  # made at a time: they stay in the cache
MOST_GROUPS = 1 << 16  # of a row; no model has as many inputs


class Stored(Protocol):
    """A part as it lies in a file. rows: uint8 [product of all dimensions but the last, bytes a row]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> Format: ...

    def rows(self) -> Bytes: ...


Words = NDArray[np.uint32]
Zeros = NDArray[np.uint8]
Parts = Mapping[str, Stored]
"""The parts of one weight by the ends of their names."""


class Unfit(ValueError):
    """A part that cannot be what it is called. part: the end of its name; "" for the configuration."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(reason)
        self.part = part


@dataclass(frozen=True, slots=True)
class Outline:
    """What parts make, known before they are read.

    format: float16 where the inputs of a group do not follow each other. group: how many inputs share a scale. bits: of
    a quant.
    """

    shape: tuple[int, int]
    format: Format
    group: int
    bits: int


class Scheme(Protocol):
    """One library's way of storing weights.

    about: for people. parts: ends of names -> whether each weight has one. order: the part that says to which group
    each input belongs. unused: ends of names that tell nothing which is needed here.
    """

    @property
    def about(self) -> str: ...

    @property
    def parts(self) -> Mapping[str, bool]: ...

    @property
    def order(self) -> str: ...

    @property
    def unused(self) -> frozenset[str]: ...

    def outline(self, parts: Parts) -> Outline:
        """Raises `Unfit` for parts that do not fit each other, or that mean what is not done here."""
        ...

    def grid(self, parts: Parts, outline: Outline) -> tuple[Floats, Zeros | None]:
        """Scales and zero points, both [outputs, groups]; None: all are in the middle. Raises `Unfit`."""
        ...

    def words(self, parts: Parts, outline: Outline, outputs: slice) -> Words:
        """Quants of some outputs, [outputs, inputs * bits / 32]: inputs follow each other from the lowest bits up.

        outputs: from a multiple of 8 on.
        """
        ...


def matrix(parts: Parts, name: str, *formats: str) -> tuple[int, int]:
    """The shape of a part that must be a matrix of one of the formats."""
    part = parts[name]
    if part.format.name not in formats:
        raise Unfit(name, f"is {part.format.name}, not {' or '.join(formats)}")
    if len(part.shape) != 2 or 0 in part.shape:
        raise Unfit(name, f"must be a matrix, found shape {part.shape}")
    return part.shape[0], part.shape[1]


def expect(parts: Parts, name: str, shape: tuple[int, ...], *formats: str) -> None:
    """That a part has such a shape and one of the formats; parts that are absent are not looked at."""
    part = parts.get(name)
    if part is not None and part.format.name not in formats:
        raise Unfit(name, f"is {part.format.name}, not {' or '.join(formats)}")
    if part is not None and part.shape != shape:
        raise Unfit(name, f"expected shape {shape}, found {part.shape}")


def grouped(columns: int, groups: int, size: int | None, scales: str) -> int:
    """How many inputs share a scale. size: as the configuration says, -1 for a whole row; None if it does not.

    Raises `Unfit`, naming `scales`, for groups that do not fit the inputs, or that cut runs of 32.
    """
    if columns % RUN:
        raise Unfit(scales, f"belongs to {columns} inputs; packed weights must have a multiple of {RUN}")
    group = columns // groups if size is None and groups else size if size and size > 0 else columns
    if not 0 < groups <= MOST_GROUPS or -(-columns // max(group, 1)) != groups:
        raise Unfit(scales, f"has {groups} groups for {columns} inputs; expected groups of {group}")
    if group % RUN and groups > 1:
        raise Unfit(scales, f"has groups of {group} inputs; only multiples of {RUN} are supported")
    return group


def in_order(parts: Parts, name: str, inputs: int, group: int, unset: int) -> bool:
    """Whether inputs belong to groups one after the other: the part says so, or is absent, or `unset` everywhere."""
    if name not in parts:
        return True
    expect(parts, name, (inputs,), "i32")
    found, most = integers(parts[name]), -(-inputs // group)
    if (found == np.uint32(unset)).all():
        return True
    if (found >= most).any():  # unsigned: those below zero as well
        raise Unfit(name, f"holds groups outside 0 to {most - 1}")
    return bool((found == np.arange(inputs) // group).all())


def integers(part: Stored) -> NDArray[Any]:
    """An integer part as it is, int32 as uint32: views of the file, not to be written to."""
    kind = {"i8": "<i1", "i32": "<u4", "i64": "<i8"}[part.format.name]
    return np.ascontiguousarray(part.rows()).reshape(-1).view(kind).reshape(part.shape)


def scales_of(parts: Parts, name: str) -> Floats:
    values = dequantize(parts[name].format, parts[name].rows()).reshape(parts[name].shape)
    if not np.isfinite(values).all():
        raise Unfit(name, "holds NaN or Inf")
    if (np.abs(values) >= 65520).any():
        raise Unfit(name, "holds scales that float16 cannot")
    return values


def unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Words [rows, n], the first value of each in its lowest bits -> [rows, n * 32 / bits]. bits: 4 or 8."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(words), -1)


def rows_of(scheme: Scheme, parts: Parts, outline: Outline) -> Bytes:
    """The weight, uint8 [outputs, bytes a row], in the outline's format. Raises `Unfit`."""
    outputs, inputs = outline.shape
    scales, zeros = scheme.grid(parts, outline)
    group = integers(parts[scheme.order]) if outline.format is F16 else np.arange(inputs // RUN) * RUN // outline.group
    out = np.empty((outputs, outline.format.row_bytes(inputs)), np.uint8)
    make, step = _floats if outline.format is F16 else _blocks, max(8, _VALUES // inputs // 8 * 8)
    for first in range(0, outputs, step):
        at = slice(first, min(first + step, outputs))
        words = scheme.words(parts, outline, at)
        out[at] = make(outline, words, scales[at], None if zeros is None else zeros[at], group)
    return out


def _blocks(outline: Outline, words: Words, scales: Floats, zeros: Zeros | None, group: NDArray[Any]) -> Bytes:
    """group: of each run of 32."""
    format = outline.format
    blocks = np.empty((len(words), len(group)), LAYOUTS[format.name])
    blocks["qs"] = _paired(words) if outline.bits == 4 else _signed(unpacked(words, 8))
    blocks["d"] = scales.astype(np.float16)[:, group]
    if format is Q4_Z:
        assert zeros is not None
        blocks["zero"] = zeros[:, group]
    return blocks.view(np.uint8).reshape(len(words), -1)


def _paired(words: Words) -> NDArray[np.uint8]:
    """Four-bit values as a block has them, [rows, blocks, 16]: byte i holds value i in its low bits, i + 16 above."""
    low, high = np.moveaxis(np.ascontiguousarray(words).reshape(len(words), -1, 2, 2), 2, 0)
    mask = np.uint32(0x0F0F0F0F)
    even = (low & mask) | ((high & mask) << np.uint32(4))
    odd = ((low >> np.uint32(4)) & mask) | (high & ~mask)
    both = np.stack([even.view(np.uint8), odd.view(np.uint8)], axis=-1)
    return both.reshape(len(words), -1, RUN // 2)


def _signed(quants: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Less 128: [rows, blocks, 32]."""
    return (quants ^ np.uint8(128)).view(np.int8).reshape(len(quants), -1, RUN)


def _floats(outline: Outline, words: Words, scales: Floats, zeros: Zeros | None, group: NDArray[Any]) -> Bytes:
    """Float16, each value rounded once. group: of each input."""
    zero = np.float32(2 ** (outline.bits - 1)) if zeros is None else zeros[:, group].astype(np.float32)
    with np.errstate(over="ignore"):  # Inf is found like any other
        values = (unpacked(words, outline.bits).astype(np.float32) - zero) * scales[:, group]
        return values.astype(np.float16).view(np.uint8)
