"""Any integers, zero points and scales that a scheme can pack mean what its description says, in blocks of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packings
from headrace.base.formats import F16, F32, INTEGERS, Format
from headrace.quant import awq, compressed, gptq
from headrace.quant.blocks import Bytes, dequantize
from headrace.quant.packed import Scheme, Unfit, rows_of

FORMATS = {"f2": F16, "f4": F32, "i1": INTEGERS["i8"], "i4": INTEGERS["i32"], "i8": INTEGERS["i64"]}


@dataclass
class Part:
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def format(self) -> Format:
        return FORMATS[self.array.dtype.str[1:]]

    def rows(self) -> Bytes:
        rows = int(np.prod(self.shape[:-1]))
        return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8).reshape(rows, -1)


def parts(tensors: Mapping[str, np.ndarray]) -> dict[str, Part]:
    return {name.rpartition(".")[2]: Part(array) for name, array in tensors.items()}


def values(scheme: Scheme, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    held = parts(tensors)
    outline = scheme.outline(held)
    rows = rows_of(scheme, held, outline)
    assert rows.shape == (outline.shape[0], outline.format.row_bytes(outline.shape[1]))
    return dequantize(outline.format, rows)


@st.composite
def grouped(draw: st.DrawFn, bits: int = 4, symmetric: bool = False) -> packings.Grouped:
    """Of any shape that fills words and runs, any quants, any scales that are float16."""
    rows, runs, each = 8 * draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns, group = 32 * runs, min(32 * each, 32 * runs)
    shape = (rows, -(-columns // group))
    zeros = np.full(shape, 2 ** (bits - 1)) if symmetric else rng.integers(0, 2**bits, shape)
    scales = rng.integers(0, 0x7C00, shape, np.uint16).view(np.float16) * np.float16(2.0**-8)  # the sums stay finite
    scales = (scales * rng.choice(np.array([-1, 1], np.float16), shape)).astype(np.float32)
    return packings.Grouped(rng.integers(0, 2**bits, (rows, columns)), scales, zeros, group, bits)


def of_groups(bits: int, symmetric: bool, size: int, format: str = "pack-quantized") -> Scheme:
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": size, "type": "int"}
    return compressed.scheme({"format": format, "config_groups": {"g": {"weights": weights}}})


@given(g=grouped(), symmetric=grouped(symmetric=True))
@settings(deadline=None, max_examples=40)
def test_gptq(g: packings.Grouped, symmetric: packings.Grouped) -> None:
    scheme = gptq.scheme({"bits": 4, "group_size": g.group, "sym": False})
    np.testing.assert_array_equal(values(scheme, packings.gptq("m", g)), g.values)
    scheme = gptq.scheme({"bits": 4, "group_size": symmetric.group})
    np.testing.assert_array_equal(values(scheme, packings.gptq("m", symmetric)), symmetric.values)


@given(g=grouped(), eight=grouped(bits=8, symmetric=True))
@settings(deadline=None, max_examples=40)
def test_gptq_v2(g: packings.Grouped, eight: packings.Grouped) -> None:
    scheme = gptq.scheme({"bits": 4, "group_size": g.group, "sym": False, "checkpoint_format": "gptq_v2"})
    np.testing.assert_array_equal(values(scheme, packings.gptq("m", g, 2)), g.values)
    scheme = gptq.scheme({"bits": 8, "group_size": eight.group, "checkpoint_format": "gptq_v2"})
    np.testing.assert_array_equal(values(scheme, packings.gptq("m", eight, 2)), eight.values)


@given(g=grouped())
@settings(deadline=None, max_examples=40)
def test_awq(g: packings.Grouped) -> None:
    scheme = awq.scheme({"w_bit": 4, "q_group_size": g.group, "version": "GEMM"})
    np.testing.assert_array_equal(values(scheme, packings.awq("m", g)), g.values)


@given(g=grouped(), eight=grouped(bits=8, symmetric=True))
@settings(deadline=None, max_examples=40)
def test_compressed_tensors(g: packings.Grouped, eight: packings.Grouped) -> None:
    np.testing.assert_array_equal(
        values(of_groups(4, False, g.group), packings.pack_quantized("m", g, False)), g.values
    )
    for scheme, tensors in (
        (of_groups(8, True, eight.group), packings.pack_quantized("m", eight, True)),
        (of_groups(8, False, eight.group), packings.pack_quantized("m", eight, False)),
        (of_groups(8, True, eight.group, "int-quantized"), packings.int_quantized("m", eight)),
    ):
        np.testing.assert_array_equal(values(scheme, tensors), eight.values)


@given(g=grouped(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_act_order_rounds_each_value_once(g: packings.Grouped, seed: int) -> None:
    plain = g.groups
    g.order = np.random.default_rng(seed).permutation(plain)
    scheme = gptq.scheme({"bits": 4, "group_size": g.group, "sym": False, "checkpoint_format": "gptq_v2"})
    with np.errstate(over="ignore"):
        rounded = g.values.astype(np.float16).astype(np.float32)
    expected = g.values if (g.order == plain).all() else rounded
    np.testing.assert_array_equal(values(scheme, packings.gptq("m", g, 2)), expected)


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "int"])
def test_large_matrices_are_made_a_stretch_at_a_time(kind: str) -> None:
    rng = np.random.default_rng(4)
    symmetric = kind == "int"
    bits, shape = 8 if symmetric else 4, (264, 4096)
    zeros = np.full((264, 32), 128) if symmetric else rng.integers(0, 16, (264, 32))
    scales = rng.random((264, 32)).astype(np.float16).astype(np.float32)
    g = packings.Grouped(rng.integers(0, 2**bits, shape), scales, zeros, 128, bits)
    found = {
        "gptq": (gptq.scheme({"bits": 4, "group_size": 128, "sym": False}), packings.gptq),
        "awq": (awq.scheme({"bits": 4, "group_size": 128}), packings.awq),
        "packed": (of_groups(4, False, 128), lambda m, g: packings.pack_quantized(m, g, False)),
        "int": (of_groups(8, True, 128, "int-quantized"), packings.int_quantized),
    }
    scheme, pack = found[kind]
    np.testing.assert_array_equal(values(scheme, pack("m", g)), g.values)


HOSTILE: list[Any] = [np.zeros((0, 0), np.int32), np.zeros((), np.int32), np.zeros((3, 5, 7), np.int32)]


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize(
    "array", [*HOSTILE, *(a.astype(np.float16) for a in HOSTILE)], ids=lambda a: f"{a.dtype}{a.ndim}"
)
def test_parts_of_any_shape_are_refused(name: str, array: np.ndarray) -> None:
    good = packings.gptq("m", packings.rounded(np.random.default_rng(0).normal(size=(8, 64)), 32))
    scheme = gptq.scheme({"bits": 4, "group_size": 32, "sym": False})
    assert np.isfinite(values(scheme, good)).all()
    with pytest.raises(Unfit):
        scheme.outline(parts(good | {f"m.{name}": array}))
    if name != "g_idx":
        with pytest.raises(Unfit):
            awq.scheme({"bits": 4, "group_size": 32}).outline(parts(good | {f"m.{name}": array}))
