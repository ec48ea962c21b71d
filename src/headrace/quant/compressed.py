"""compressed-tensors checkpoints (llm-compressor): integers of 4 or 8 bits with scales by group, row or matrix.

pack-quantized: weight_packed int32 [outputs, inputs * bits / 32], consecutive inputs from the lowest bits up, each
value plus 2^(bits - 1); weight_shape [2]. int-quantized, naive-quantized: weight int8 [outputs, inputs]. Both:
weight_scale [outputs, groups], [outputs, 1] or one number; where they are asymmetric weight_zero_point, int8 of that
shape, or packed down the outputs; weight_g_idx int32 [inputs], each input's group. value = (quant - zero) * scale.
Activations that are to be rounded to 8 bits (W8A8) are rounded as always here, by the largest of each 32. That is never
coarser than one scale for a token or for all of them, so their scales (input_scale) are not needed.
Which modules are packed, the tensors themselves say: what `ignore` leaves out has a plain weight.
Source: vllm-project/compressed-tensors, src/compressed_tensors/compressors and src/compressed_tensors/quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headrace.base.formats import F16, Q4_Z
from headrace.quant.blocks import Floats
from headrace.quant.config import one_of, whole
from headrace.quant.packed import (
    FLOATS,
    Q4_0,
    Q8_0,
    Outline,
    Parts,
    Unfit,
    Words,
    Zeros,
    grouped,
    in_order,
    integers,
    matrix,
    scales_of,
    unpacked,
)

PACKED, WHOLE, SCALE, ZERO, SHAPE, ORDER = (
    "weight_packed",
    "weight",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
UNSET = 2**32 - 1  # in weight_g_idx, for all inputs: -1
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")


@dataclass(frozen=True, slots=True)
class Compressed:
    """bits, group: None where modules differ and their shapes must tell."""

    about: str
    bits: int | None
    group: int | None
    parts: ClassVar[Mapping[str, bool]] = {
        SCALE: True,
        PACKED: False,
        WHOLE: False,
        SHAPE: False,
        ZERO: False,
        ORDER: False,
    }
    order: ClassVar[str] = ORDER
    unused: ClassVar[frozenset[str]] = frozenset(
        ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
    )

    def outline(self, parts: Parts) -> Outline:
        if PACKED not in parts and WHOLE not in parts:
            raise Unfit(PACKED, "is missing")
        bits, shape = self._packed(parts) if PACKED in parts else (8, matrix(parts, WHOLE, "i8"))
        groups = _groups(parts, shape[0])
        group = grouped(shape[1], groups, self.group, SCALE)
        _check_zeros(parts, shape[0], groups, bits)
        format = Q8_0 if bits == 8 else Q4_Z if ZERO in parts else Q4_0
        return Outline(shape, format if in_order(parts, ORDER, shape[1], group, UNSET) else F16, group, bits)

    def _packed(self, parts: Parts) -> tuple[int, tuple[int, int]]:
        """Bits, and the shape."""
        outputs, words = matrix(parts, PACKED, "i32")
        if SHAPE not in parts:
            raise Unfit(SHAPE, "is missing")
        if parts[SHAPE].format.name not in ("i32", "i64") or parts[SHAPE].shape != (2,):
            raise Unfit(SHAPE, f"must be two integers, found {parts[SHAPE].format.name} {parts[SHAPE].shape}")
        rows, inputs = map(int, integers(parts[SHAPE]))
        bits = self.bits or (32 * words // inputs if inputs > 0 else 0)
        if bits not in (4, 8):
            raise Unfit(PACKED, f"has {bits} bits a value; 4 and 8 are supported")
        if (rows, inputs * bits) != (outputs, 32 * words):
            raise Unfit(SHAPE, f"is {(rows, inputs)}, which {bits} bits of {PACKED} {(outputs, words)} do not give")
        return bits, (outputs, inputs)

    def grid(self, parts: Parts, outline: Outline) -> tuple[Floats, Zeros | None]:
        scales = scales_of(parts, SCALE)
        one_for_all = scales.ndim < 2 or len(scales) == 1
        shape = (outline.shape[0], 1 if one_for_all else scales.shape[1])
        each = np.broadcast_to(scales.reshape(-1, 1), shape) if one_for_all else scales
        return np.asarray(each), _zeros(parts, *shape, outline)

    def words(self, parts: Parts, outline: Outline, outputs: slice) -> Words:
        if PACKED in parts:
            return integers(parts[PACKED])[outputs]
        return (integers(parts[WHOLE])[outputs].view(np.uint8) ^ np.uint8(128)).view(np.uint32)


def _groups(parts: Parts, outputs: int) -> int:
    scale = parts[SCALE]
    if scale.format.name not in FLOATS:
        raise Unfit(SCALE, f"is {scale.format.name}, not {' or '.join(FLOATS)}")
    if scale.shape in ((), (1,), (outputs,), (1, 1)):
        return 1
    if len(scale.shape) != 2 or scale.shape[0] != outputs:
        raise Unfit(SCALE, f"expected shape ({outputs}, groups), found {scale.shape}")
    return scale.shape[1]


def _check_zeros(parts: Parts, rows: int, groups: int, bits: int) -> None:
    """Of the scales' shape, or packed down the outputs."""
    if ZERO not in parts:
        return
    found, packed = parts[ZERO], (-(-rows * bits // 32), groups)
    good = found.shape == packed if found.format.name == "i32" else found.shape == parts[SCALE].shape
    if found.format.name not in ("i8", "i32") or not good:
        wanted = f"int8 {parts[SCALE].shape} or int32 {packed}"
        raise Unfit(ZERO, f"expected {wanted}, found {found.format.name} {found.shape}")


def _zeros(parts: Parts, rows: int, groups: int, outline: Outline) -> Zeros | None:
    """uint8 [rows, groups], none where all are the middle. Raises `Unfit` for those that there is no block for."""
    if ZERO not in parts:
        return None
    middle, found = 2 ** (outline.bits - 1), integers(parts[ZERO])
    if parts[ZERO].format.name == "i32":
        zeros = np.ascontiguousarray(unpacked(found.T, outline.bits)[:, :rows].T).astype(np.int16)
    else:
        zeros = np.broadcast_to(found.reshape(-1, groups), (rows, groups)).astype(np.int16) + np.int16(middle)
    if outline.format is Q8_0 and (zeros != middle).any():
        raise Unfit(ZERO, "8 bits with zero points other than 0 (asymmetric) are not supported")
    if (zeros < 0).any() or (zeros >= 2 * middle).any():
        raise Unfit(ZERO, f"holds zero points outside {-middle} to {middle - 1}")
    return zeros.astype(np.uint8)


def scheme(config: Mapping[str, Any]) -> Compressed:
    """From a quantization_config. Raises `Unfit` for what is not supported."""
    format = one_of(config, "format", FORMATS, "pack-quantized")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise Unfit("", "config_groups must say how weights are quantised")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise Unfit("", f"sparsity_config = {sparsity!r:.60} is not supported")
    described = [_weights(str(name), group) for name, group in groups.items()]
    texts = ", ".join(dict.fromkeys(text for _, _, text in described))
    bits, sizes = {bits for bits, _, _ in described}, {size for _, size, _ in described}
    return Compressed(f"compressed-tensors, {texts}, {format}", _only(bits), _only(sizes))


def _only(found: set[int]) -> int | None:
    return next(iter(found)) if len(found) == 1 else None


def _weights(name: str, group: Any) -> tuple[int, int, str]:
    """Bits, inputs of a group (-1: a whole row), and all of it for people."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise Unfit("", f"config_groups.{name:.60} says nothing of weights")
    bits = whole(weights, "num_bits", 1, 32)
    if bits not in (4, 8):
        raise Unfit("", f"config_groups.{name:.60}: num_bits = {bits} is not supported, only 4 and 8")
    one_of(weights, "type", ("int",), "int")
    strategy = one_of(weights, "strategy", ("group", "channel", "tensor"), "tensor")
    size = whole(weights, "group_size", 1, 1 << 20) if strategy == "group" else -1
    by = {"group": f"groups of {size}", "channel": "whole rows", "tensor": "whole matrices"}[strategy]
    return bits, size, f"{bits} bits, {by}"
