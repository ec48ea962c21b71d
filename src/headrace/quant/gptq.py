"""GPTQ checkpoints (AutoGPTQ, GPTQModel): quants along the inputs, a zero point and a scale for each group.

qweight int32 [inputs * bits / 32, outputs]: values of consecutive inputs, the first in the lowest bits. qzeros int32
[groups, outputs * bits / 32]: zero points of consecutive outputs; format v1 (`checkpoint_format` "gptq") takes one from
all of a word's values at once, so that a zero point of 0 borrows from the next; v2 has them as they are. scales
[groups, outputs]. g_idx int32 [inputs]: each input's group. value = (quant - zero) * scale.
Which modules are packed, the tensors themselves say: what `dynamic` leaves out has a plain weight.
Sources: ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear and utils/model.py; AutoGPTQ, auto_gptq/nn_modules/qlinear.
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
    expect,
    grouped,
    in_order,
    integers,
    matrix,
    scales_of,
    unpacked,
)

UNSET = 0  # in g_idx, for all inputs


@dataclass(frozen=True, slots=True)
class Gptq:
    """bits, group: None where modules differ and their shapes must tell. less_one: how zero points are stored."""

    about: str
    bits: int | None
    group: int | None
    symmetric: bool
    less_one: bool
    parts: ClassVar[Mapping[str, bool]] = {"qweight": True, "scales": True, "qzeros": True, "g_idx": False}
    order: ClassVar[str] = "g_idx"
    unused: ClassVar[frozenset[str]] = frozenset()

    def outline(self, parts: Parts) -> Outline:
        words, outputs = matrix(parts, "qweight", "i32")
        groups = matrix(parts, "scales", *FLOATS)[0]
        bits = self.bits or 32 * matrix(parts, "qzeros", "i32")[1] // outputs
        if bits not in (4, 8):
            raise Unfit("qweight", f"has {bits} bits a value; 4 and 8 are supported")
        inputs = words * 32 // bits
        group = grouped(inputs, groups, self.group, "scales")
        expect(parts, "scales", (groups, outputs), *FLOATS)
        if outputs * bits % 32:
            raise Unfit("qweight", f"has {outputs} outputs, whose zero points fill no whole words")
        expect(parts, "qzeros", (groups, outputs * bits // 32), "i32")
        format = Q8_0 if bits == 8 else Q4_0 if self.symmetric else Q4_Z
        return Outline(
            (outputs, inputs), format if in_order(parts, "g_idx", inputs, group, UNSET) else F16, group, bits
        )

    def grid(self, parts: Parts, outline: Outline) -> tuple[Floats, Zeros]:
        middle, stored = 2 ** (outline.bits - 1), integers(parts["qzeros"])
        one_each = np.uint32(0x11111111 if outline.bits == 4 else 0x01010101)
        zeros = unpacked(stored + one_each if self.less_one else stored, outline.bits)
        if outline.format in (Q4_0, Q8_0) and (zeros != middle).any():
            raise Unfit("qzeros", f"holds zero points other than {middle}, which symmetric weights have: not supported")
        return np.ascontiguousarray(scales_of(parts, "scales").T), np.ascontiguousarray(zeros.T)

    def words(self, parts: Parts, outline: Outline, outputs: slice) -> Words:
        return np.ascontiguousarray(integers(parts["qweight"])[:, outputs].T)


def scheme(config: Mapping[str, Any]) -> Gptq:
    """From a quantization_config, or a quantize_config.json. Raises `Unfit` for what is not supported."""
    bits, group = whole(config, "bits", 2, 8), whole(config, "group_size", -1, 1 << 20)
    named = "checkpoint_format" if config.get("checkpoint_format") else "format"
    format = one_of(config, named, ("gptq", "gptq_v2"), "gptq")
    one_of(config, "pack_dtype", ("int32",), "int32")
    one_of(config, "is_marlin_format", (False,), False)
    symmetric = one_of(config, "sym", (True, False), True)
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise Unfit("", f"dynamic must be an object, not {rules!r:.60}")
    differ = any(not str(rule).startswith("-:") for rule in rules)
    if bits not in (4, 8) and not differ:
        raise Unfit("", f"bits = {bits}: GPTQ is supported with 4 and 8 bits")
    groups = "whole rows" if group == -1 else f"groups of {group}"
    return Gptq(
        about=f"GPTQ, {bits} bits, {groups}" + (", modules differ" if differ else ""),
        bits=None if differ else bits,
        group=None if differ else group,
        symmetric=bool(symmetric) and not differ,
        less_one=format == "gptq",
    )
