"""Weights in other formats than their file's, rounded as they are asked for.

Owes: which format each part of a matrix gets, by the recipes of `headrace quantize`; a source that has it so, holding
one weight at a time, and a stretch of it in float32 for each thread. Does not know files, or how blocks are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.base.errors import BadModelFile, SettingError
from headrace.base.formats import F32, FLOATS, FORMATS, Format
from headrace.models import Config, Model
from headrace.models.export import Target, targets
from headrace.program import Layout, Part, WeightData, WeightSource
from headrace.quant.blocks import Bytes, check_finite
from headrace.quant.recipes import RECIPES, Rule, chosen, fitting

Encode = Callable[[Format, Format, Bytes], Bytes]
"""Rows of one format in another: `Backend.encode`."""
Formats = Mapping[str, tuple[Format, ...]]
"""Of each part of a matrix, by its name."""

RECIPE = RECIPES["mixed"]
KEPT = ("_norm.weight", "ffn_gate_inp.weight", ".bias")  # ends of the names of what stays in float32
DRAFT = FORMATS["q4_1"]
_VALUES = 1 << 20  # that a thread takes at a time


def format_wanted(target: Target, rules: tuple[Rule, ...], base: str, c: Config, tied: bool) -> Format:
    """The format of a tensor, whatever the length of its rows."""
    kept = len(target.shape) == 1 or target.name.endswith(KEPT)
    return F32 if kept else chosen(target.name, rules, base, c.layers, tied)


def recipe_formats(model: Model, base: str) -> Formats:
    """The formats of all matrices when most are `base`."""
    entries = model.table.entries
    tied = entries["head"].same_as is not None
    found = {name: [F32] * len(entry.sources) for name, entry in entries.items() if len(entry.weight.shape) > 1}
    for target in targets(model):
        if len(target.shape) == 1:
            continue
        format = fitting(format_wanted(target, RECIPE, base, model.config, tied), target.shape[-1])
        for part in target.parts:
            found[target.weight][part] = format
    return {name: tuple(found[entries[name].same_as or name]) for name in found}


def served_formats(model: Model, stored: Mapping[str, Layout], base: str, path: Path, packed: bool = False) -> Formats:
    """The same for a checkpoint: floats are rounded, blocks stay.

    packed: whether another library chose what to quantise, and left the rest, as a rule the embedding and the head, as
    floats. SettingError for other models unless most of what is quantised already is in that format: rounding twice
    costs quality.
    """
    held: Counter[str] = Counter()
    for layout in stored.values():
        for format, rows in layout.parts:
            held[format.name] += 0 if format in FLOATS else rows * layout.weight.columns
    most = max(held, key=lambda name: held[name], default="")
    if held[most] and most != base and not packed:
        raise SettingError(
            f"quantization is {base}, but {path} is {most} already, and quantising twice costs quality: leave it out,"
            " or take the model's float weights",
            param="quantization",
        )
    recipe = recipe_formats(model, base)
    return {
        name: tuple(new if old in FLOATS else old for (old, _), new in zip(layout.parts, recipe[name], strict=True))
        for name, layout in stored.items()
        if name in recipe
    }


def draft_formats(stored: Mapping[str, Layout], kept: frozenset[str]) -> Formats:
    """Of a copy in four bits: kept are the weights named so, vectors, what is smaller, and rows that are no blocks."""
    return {
        name: tuple(format if format.bits <= DRAFT.bits else DRAFT for format, _ in layout.parts)
        for name, layout in stored.items()
        if name not in kept and len(layout.weight.shape) > 1 and layout.weight.columns % DRAFT.block == 0
    }


def in_formats(layouts: Mapping[str, Layout], formats: Formats) -> dict[str, Layout]:
    """How weights lie once they are in these formats; those that are not named stay."""
    return {
        name: replace(layout, parts=tuple(zip(formats[name], [rows for _, rows in layout.parts], strict=True)))
        if name in formats
        else layout
        for name, layout in layouts.items()
    }


class Encoded:
    """A `WeightSource` over another. BadModelFile for numbers that a format cannot hold."""

    def __init__(self, source: WeightSource, formats: Formats, encode: Encode, threads: int) -> None:
        self._source, self._formats, self._encode, self._threads = source, formats, encode, threads

    def load(self, name: str) -> WeightData:
        data = self._source.load(name)
        if name not in self._formats:
            return data
        with ThreadPoolExecutor(self._threads) as pool:
            pairs = zip(data.parts, self._formats[name], strict=True)
            return replace(data, parts=tuple(self._in_format(part, format, name, pool) for part, format in pairs))

    def release(self, name: str) -> None:
        self._source.release(name)

    def _in_format(self, part: Part, format: Format, name: str, pool: ThreadPoolExecutor) -> Part:
        if part.format == format:
            return part
        rows, columns = len(part.data), part.data.shape[1] // part.format.bytes * part.format.block
        out = np.empty((rows, format.row_bytes(columns)), np.uint8)
        step = max(1, _VALUES // columns)

        def rounded(at: int) -> bool:
            stretch = np.ascontiguousarray(part.data[at : at + step])
            out[at : at + step] = self._encode(part.format, format, stretch)
            return check_finite(format, out[at : at + step])

        if not all(pool.map(rounded, range(0, rows, step))):
            raise BadModelFile("the model", f"holds values that {format.name} cannot hold", tensor=name)
        return Part(format, out)
