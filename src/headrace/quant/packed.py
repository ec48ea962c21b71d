"""What packed weights of other libraries have in common: integers times scales, by groups of a row's inputs.

Owes: blocks of ours that hold the same numbers, made without a float in between: value = (quant - zero) * scale.
Four bits with one zero point for all become q4_0, with zero points of their own q4_z; eight bits become q8_0. Exact
where float16 holds a scale, as it does those that are float16 and, from 2^-17 to 65504, bfloat16; others are rounded.
Does not know files: a part is a shape, a format and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.base.formats import FORMATS, Q4_Z, Format
from headrace.quant.blocks import LAYOUTS, Bytes, Floats, dequantize

Q4_0, Q8_0 = FORMATS["q4_0"], FORMATS["q8_0"]
RUN = 32  # values of a block in all three
FLOATS = ("f16", "bf16", "f32")
MOST_GROUPS = 1 << 16  # of a row; no model has as many inputs


class Stored(Protocol):
    """A part as it lies in a file. rows: uint8 [product of all dimensions but the last, bytes a row]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> Format: ...

    def rows(self) -> Bytes: ...


Parts = Mapping[str, Stored]
"""The parts of one weight by the ends of their names."""


class Unfit(ValueError):
    """A part that cannot be what it is called. part: the end of its name; "" for the configuration."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(reason)
        self.part = part


@dataclass(frozen=True, slots=True)
class Outline:
    """What parts make, known before they are read. group: how many inputs share a scale."""

    shape: tuple[int, int]
    format: Format
    group: int


class Scheme(Protocol):
    """One library's way of storing weights.

    about: for people. parts: ends of names -> whether each weight has one. unused: ends of names that tell nothing
    which is needed here.
    """

    @property
    def about(self) -> str: ...

    @property
    def parts(self) -> Mapping[str, bool]: ...

    @property
    def unused(self) -> frozenset[str]: ...

    def outline(self, parts: Parts) -> Outline:
        """Raises `Unfit` for parts that do not fit each other, or that mean what is not done here."""
        ...

    def rows(self, parts: Parts, outline: Outline) -> Bytes:
        """The weight, uint8 [outputs, bytes a row], in the outline's format."""
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


def integers(part: Stored) -> NDArray[Any]:
    """An integer part as it is: views of the file, not to be written to."""
    kind = {"i8": "<i1", "i32": "<u4", "i64": "<i8"}[part.format.name]
    return np.ascontiguousarray(part.rows()).reshape(-1).view(kind).reshape(part.shape)


def scales_of(parts: Parts, name: str) -> Floats:
    values = dequantize(parts[name].format, parts[name].rows()).reshape(parts[name].shape)
    if not np.isfinite(values).all():
        raise Unfit(name, "holds NaN or Inf")
    if (np.abs(values) >= 65520).any():
        raise Unfit(name, "holds scales that float16 cannot")
    return values


def nibbles(words: NDArray[Any]) -> NDArray[np.uint8]:
    """uint32 [rows, n], eight values a word, the first in the lowest bits -> uint8 [rows, 8 n]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(words), -1)


def paired(words: NDArray[Any]) -> NDArray[np.uint8]:
    """Words as of `nibbles`, uint32 [rows, n], as the bytes of blocks: uint8 [rows, n / 4, 16].

    Byte i of a block holds value i in its low bits, value i + 16 in its high ones.
    """
    low, high = np.moveaxis(np.ascontiguousarray(words).reshape(len(words), -1, 2, 2), 2, 0)
    mask = np.uint32(0x0F0F0F0F)
    even = (low & mask) | ((high & mask) << np.uint32(4))
    odd = ((low >> np.uint32(4)) & mask) | (high & ~mask)
    both = np.stack([even.view(np.uint8), odd.view(np.uint8)], axis=-1)
    return both.reshape(len(words), -1, RUN // 2)


def made(outline: Outline, quants: NDArray[Any], scales: Floats, zeros: NDArray[np.uint8] | None = None) -> Bytes:
    """Blocks, uint8 [rows, row bytes].

    quants: [rows, blocks, 16] as `paired` has them, or int8 [rows, blocks, 32]. scales, zeros: [rows, groups]; zeros
    for q4_z alone.
    """
    rows, columns = outline.shape
    blocks = np.empty((rows, columns // RUN), LAYOUTS[outline.format.name])
    group = np.arange(columns // RUN) * RUN // outline.group
    blocks["qs"] = quants
    blocks["d"] = scales.astype(np.float16)[:, group]
    if outline.format is Q4_Z:
        assert zeros is not None
        blocks["zero"] = zeros[:, group]
    return blocks.view(np.uint8).reshape(rows, outline.format.row_bytes(columns))
