"""AWQ checkpoints (AutoAWQ's GEMM layout): four bits, packed along the outputs in the order of its kernels.

qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs]. From the lowest bits
up a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight. value = (quant - zero) * scale.
Source: casper-hansen/AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from headrace.base.formats import Q4_Z
from headrace.quant.blocks import Floats
from headrace.quant.config import one_of, whole
from headrace.quant.packed import (
    FLOATS,
    Outline,
    Parts,
    Unfit,
    Words,
    Zeros,
    expect,
    grouped,
    integers,
    matrix,
    scales_of,
)

LOW, HIGH = (0, 4, 1, 5), (2, 6, 3, 7)  # outputs in the low and in the high halves of a word's bytes


@dataclass(frozen=True, slots=True)
class Awq:
    about: str
    group: int
    parts: ClassVar[Mapping[str, bool]] = {"qweight": True, "scales": True, "qzeros": True}
    order: ClassVar[str] = ""
    unused: ClassVar[frozenset[str]] = frozenset()

    def outline(self, parts: Parts) -> Outline:
        inputs, words = matrix(parts, "qweight", "i32")
        groups = matrix(parts, "scales", *FLOATS)[0]
        group = grouped(inputs, groups, self.group, "scales")
        expect(parts, "scales", (groups, 8 * words), *FLOATS)
        expect(parts, "qzeros", (groups, words), "i32")
        return Outline((8 * words, inputs), Q4_Z, group, 4)

    def grid(self, parts: Parts, outline: Outline) -> tuple[Floats, Zeros]:
        stored = integers(parts["qzeros"])
        packed = np.ascontiguousarray(stored).view(np.uint8).reshape(*stored.shape, 4)
        zeros = np.empty((*stored.shape, 8), np.uint8)
        zeros[..., LOW], zeros[..., HIGH] = packed & 15, packed >> 4
        zeros = zeros.reshape(len(stored), -1)
        return np.ascontiguousarray(scales_of(parts, "scales").T), np.ascontiguousarray(zeros.T)

    def words(self, parts: Parts, outline: Outline, outputs: slice) -> Words:
        stored = np.ascontiguousarray(integers(parts["qweight"])[:, outputs.start // 8 : outputs.stop // 8])
        first, second = stored.view(np.uint8).reshape(len(stored) // 2, 2, -1, 4).swapaxes(0, 1)  # inputs 2i, 2i + 1
        out = np.empty((first.shape[1], 8, len(first)), np.uint8)
        out[:, LOW] = ((first & 15) | (second << 4)).transpose(1, 2, 0)
        out[:, HIGH] = ((first >> 4) | (second & 0xF0)).transpose(1, 2, 0)
        return out.reshape(-1, len(first)).view(np.uint32)


def scheme(config: Mapping[str, Any]) -> Awq:
    """From a quantization_config, or a quant_config.json. Raises `Unfit` for what is not supported."""
    bits = whole(config, "bits", 1, 8, "w_bit")
    if bits != 4:
        raise Unfit("", f"bits = {bits}: AWQ is supported with 4 bits")
    for key in ("version", "checkpoint_format", "format"):
        value = config.get(key)
        if value is not None and (not isinstance(value, str) or value.lower() != "gemm"):
            raise Unfit("", f"{key} = {value!r:.60} is not supported, only gemm")
    one_of(config, "backend", ("autoawq",), "autoawq")
    one_of(config, "zero_point", (True,), True)
    group = whole(config, "group_size", -1, 1 << 20, "q_group_size")
    return Awq(f"AWQ, 4 bits, {'whole rows' if group == -1 else f'groups of {group}'}", group)
