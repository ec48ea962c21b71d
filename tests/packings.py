"""Packed checkpoints as other libraries write them, made from their descriptions, value by value; and what they mean.

Each function takes integers and scales, and gives the tensors of a module. Nothing of Headrace is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Grouped:
    """value[o, i] = (quants[o, i] - zeros[o, i // group]) * scales[o, i // group]. quants, zeros: from 0 on.

    order: the group of each input, where they do not follow each other.
    """

    quants: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: int
    bits: int = 4
    order: np.ndarray | None = None

    @property
    def groups(self) -> np.ndarray:
        return np.arange(self.quants.shape[1]) // self.group if self.order is None else self.order

    @property
    def values(self) -> np.ndarray:
        group = self.groups
        whole = self.quants.astype(np.int64) - self.zeros.astype(np.int64)[:, group]
        return (whole * self.scales.astype(np.float64)[:, group]).astype(np.float32)


def rounded(w: np.ndarray, group: int, bits: int = 4, symmetric: bool = False, scale: Any = np.float16) -> Grouped:
    """Round to nearest by groups. scale: to what type scales are rounded."""
    rows, columns = w.shape
    size = columns if group == -1 else group
    groups = -(-columns // size)
    padded = np.concatenate([w, np.repeat(w[:, -1:], groups * size - columns, axis=1)], axis=1)
    parts = padded.reshape(rows, groups, size).astype(np.float64)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        step, zeros = np.abs(parts).max(axis=2) / (middle - 1), np.full((rows, groups), middle)
    else:
        low, high = np.minimum(parts.min(axis=2), 0), np.maximum(parts.max(axis=2), 0)
        step = (high - low) / most
        zeros = np.clip(np.rint(-low / step), 0, most).astype(np.int64)
    step = scale(step).astype(np.float64)
    quants = np.clip(np.rint(parts / step[:, :, None]) + zeros[:, :, None], 0, most).astype(np.int64)
    return Grouped(quants.reshape(rows, -1)[:, :columns], step.astype(np.float32), zeros, size, bits)


def scattered(w: np.ndarray, group: int, bits: int = 4, **how: Any) -> Grouped:
    """As GPTQ does with act-order: inputs are rounded in an order of their own, and lie in the file in the model's."""
    turn = np.random.default_rng(w.shape[1]).permutation(w.shape[1])
    found = rounded(w[:, turn], group, bits, **how)
    back = np.argsort(turn)
    return replace(found, quants=found.quants[:, back], order=back // group)


def brain(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def words(values: np.ndarray, axis: int, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Integers packed into int32 along an axis: value order[j] of each word's at bit j * bits."""
    each = 32 // bits
    moved = np.moveaxis(values, axis, -1).astype(np.uint64)
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // each), np.uint64)
    for j, place in enumerate(order or range(each)):
        packed |= moved[..., place::each] << np.uint64(j * bits)
    return np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis))


def gptq(module: str, g: Grouped, version: int = 1) -> Arrays:
    """Version 1 takes one from each value of a word, all at once: 0 borrows from the next."""
    zeros, less = words(g.zeros.T, 1, g.bits), sum(1 << j for j in range(0, 32, g.bits))
    return {
        f"{module}.qweight": words(g.quants.T, 0, g.bits),
        f"{module}.qzeros": (zeros.view(np.uint32) - np.uint32(less if version == 1 else 0)).view(np.int32),
        f"{module}.scales": np.ascontiguousarray(g.scales.T).astype(np.float16),
        f"{module}.g_idx": g.groups.astype(np.int32),
    }


def awq(module: str, g: Grouped) -> Arrays:
    return {
        f"{module}.qweight": words(g.quants.T, 1, 4, AWQ_ORDER),
        f"{module}.qzeros": words(g.zeros.T, 1, 4, AWQ_ORDER),
        f"{module}.scales": np.ascontiguousarray(g.scales.T).astype(np.float16),
    }


def pack_quantized(module: str, g: Grouped, symmetric: bool) -> Arrays:
    found = {
        f"{module}.weight_packed": words(g.quants, 1, g.bits),
        f"{module}.weight_scale": g.scales,
        f"{module}.weight_shape": np.array(g.quants.shape, np.int64),
    }
    return found if symmetric else found | {f"{module}.weight_zero_point": words(g.zeros, 0, g.bits)}


def int_quantized(module: str, g: Grouped) -> Arrays:
    return {
        f"{module}.weight": (g.quants - 2 ** (g.bits - 1)).astype(np.int8),
        f"{module}.weight_scale": g.scales,
    }


def bf16(x: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 numbers that float32 holds: uint16, which `write` takes for BF16."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


DTYPES = {"f4": "F32", "f2": "F16", "i1": "I8", "i4": "I32", "i8": "I64", "u2": "BF16"}


def write(folder: Path, config: Mapping[str, Any], tensors: Arrays) -> Path:
    """A checkpoint's folder. uint16 stands for bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, a in tensors.items():
        header[name] = {"dtype": DTYPES[a.dtype.str[1:]], "shape": a.shape, "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for a in tensors.values():
            file.write(np.ascontiguousarray(a).tobytes())
    return folder
