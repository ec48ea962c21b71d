"""Blocks mean what ggml says they mean: every format against the `gguf` package, and packing against unpacking."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.formats import COMPUTED, FORMATS, Q4_Z, Format
from headrace.quant.blocks import LAYOUTS, check_finite, dequantize, pack_random, quantize

ALL = list(FORMATS.values())
PLAIN = [FORMATS[n] for n in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")]
BLOCKS = [f for f in ALL if f.block > 1]
SCALES = [(f, field) for f in COMPUTED.values() for field in ("d", "m") if field in (LAYOUTS[f.name].names or ())]
# Largest error in steps of a block's scale: half a step, the scale's own rounding to half precision, and for the
# symmetric formats the end of the range that has one value less.
STEPS = {"q8_0": 0.6, "q4_0": 1.02, "q4_1": 0.52, "q5_0": 1.03, "q5_1": 0.54}


def theirs(format: Format, rows: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(format.ggml_type))


@pytest.mark.parametrize("format", COMPUTED.values(), ids=lambda f: f.name)
def test_a_block_is_as_long_as_its_format_says(format: Format) -> None:
    assert LAYOUTS[format.name].itemsize == format.bytes


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("seed", range(3))
def test_values_are_those_of_ggml_bit_for_bit(format: Format, seed: int) -> None:
    rows = pack_random(format, 5, 768, np.random.default_rng(seed))
    got = dequantize(format, rows)
    assert got.dtype == np.float32 and got.shape == (5, 768)
    np.testing.assert_array_equal(got.view(np.uint32), theirs(format, rows).view(np.uint32))


@pytest.mark.parametrize("format", BLOCKS, ids=lambda f: f.name)
def test_any_bytes_are_valid_blocks(format: Format) -> None:
    rows = np.random.default_rng(7).integers(0, 256, (3, format.row_bytes(512)), np.uint8)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantize(format, rows), theirs(format, rows))


def test_four_bits_with_a_zero_point() -> None:
    block = np.zeros(1, LAYOUTS["q4_z"])
    block["d"], block["zero"] = 0.5, 11
    block["qs"][0, 0], block["qs"][0, 15] = 0xF2, 0x0B
    values = dequantize(Q4_Z, block.view(np.uint8).reshape(1, -1))[0]
    assert (values[0], values[16], values[15], values[31], values[1]) == (-4.5, 2.0, 0.0, -5.5, -5.5)


@pytest.mark.parametrize("format", PLAIN, ids=lambda f: f.name)
def test_packing_is_that_of_ggml(format: Format) -> None:
    values = np.random.default_rng(3).normal(0, 1, (16, 256)).astype(np.float32)
    values[3, :32] = 0
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType(format.ggml_type)).view(np.uint8)
    np.testing.assert_array_equal(quantize(format, values), expected)


@pytest.mark.parametrize("name", STEPS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_packed_value_is_within_a_step(name: str, data: st.DataObject) -> None:
    format = FORMATS[name]
    finite = st.floats(-100, 100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
    values = np.array([data.draw(st.lists(finite, min_size=64, max_size=64))], np.float32)
    packed = quantize(format, values)
    step = np.abs(packed.reshape(-1).view(LAYOUTS[name])["d"].astype(np.float32))
    error = np.abs(dequantize(format, packed) - values).reshape(2, 32).max(axis=1)
    offset = np.abs(values).reshape(2, 32).max(axis=1) * 2.0**-10  # what rounding the offset to half precision costs
    assert (error <= step * STEPS[name] + offset + 1e-6).all()


def test_formats_without_a_plain_packer_say_so() -> None:
    with pytest.raises(ValueError, match="q4_k"):
        quantize(FORMATS["q4_k"], np.zeros((1, 256), np.float32))


@pytest.mark.parametrize("format", COMPUTED.values(), ids=lambda f: f.name)
def test_random_blocks_are_sane(format: Format) -> None:
    values = dequantize(format, pack_random(format, 32, 1024, np.random.default_rng(0)))
    assert np.isfinite(values).all()
    assert 0.02 < values.std() < 0.3 and abs(values.mean()) < 0.1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("format", "field"), SCALES, ids=lambda x: getattr(x, "name", x))
def test_one_bad_scale_is_found(format: Format, bad: float, field: str) -> None:
    layout = LAYOUTS[format.name]
    rows = pack_random(format, 4, 512, np.random.default_rng(1))
    assert check_finite(format, rows)
    blocks = rows.reshape(-1).view(layout)
    blocks[field][len(blocks) - 1] = np.float32(bad).view(np.uint32) >> 16 if format.name == "bf16" else bad
    assert not check_finite(format, rows)


def test_large_scales_are_not_called_bad() -> None:
    rows = pack_random(FORMATS["q4_1"], 1, 32, np.random.default_rng(1))
    rows.reshape(-1).view(LAYOUTS["q4_1"])["d"] = 65504
    assert check_finite(FORMATS["q4_1"], rows)
