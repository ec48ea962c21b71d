"""The native encoders give numpy's blocks, bit for bit, on every instruction set, whatever the values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace import _native as native
from headrace.base.formats import BF16, ENCODED, F16, F32, FORMATS, Format
from headrace.quant.blocks import LAYOUTS, Bytes, dequantize, quantize
from headrace.quant.encode import plain, recoded

ISAS: list[str] = native.isa_names()
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ODD = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 2.0**-126, 6e-8, 65504.0, 3e38, -3e38, 0.5, 15.0])
ROWS = arrays.arrays(np.float32, (2, 512), elements=st.one_of(FINITE, ODD), fill=st.one_of(FINITE, ODD))


def encoded(isa: str, source: Format, format: Format, rows: Bytes) -> Bytes:
    columns = rows.shape[1] // source.bytes
    out = np.full((len(rows), format.row_bytes(columns)), 255, np.uint8)
    native.encode(isa, source.name, format.name, rows, out)
    return out


def same(format: Format, ours: Bytes, theirs: Bytes) -> None:
    """Bit for bit but for blocks whose steps are not finite, which none may be in one alone."""
    ours, theirs = (rows.reshape(-1).view(LAYOUTS[format.name]) for rows in (ours, theirs))
    fields = [name for name in ("d", "m") if name in (ours.dtype.names or ())]
    whole = [np.all([np.isfinite(blocks[name]) for name in fields], axis=0) for blocks in (ours, theirs)]
    np.testing.assert_array_equal(whole[0], whole[1])
    assert ours[whole[0]].tobytes() == theirs[whole[0]].tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("source", [F32, F16, BF16], ids=lambda f: f.name)
def test_weights_as_they_are(name: str, isa: str, source: Format) -> None:
    """Normal, heavy-tailed, with ties of either sign, all alike, and none."""
    rng = np.random.default_rng(5)
    values = rng.normal(0, 0.05, (24, 5120)).astype(np.float32)
    values[3] *= np.exp(rng.normal(0, 3, 5120))
    values[5] = rng.integers(-8, 9, 5120) / 8
    values[6] = rng.integers(-1, 2, 5120) * np.float32(0.1)
    values[7], values[8], values[9] = 0, -0.0, -1.5
    values[10] = np.abs(values[10])
    values[11] = -np.abs(values[11])
    rows = quantize(source, values)
    theirs = recoded(source, FORMATS[name], rows)
    assert encoded(isa, source, FORMATS[name], rows).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", ENCODED)
@settings(max_examples=60, deadline=None)
@given(values=ROWS)
def test_any_finite_values(name: str, values: np.ndarray) -> None:
    format = FORMATS[name]
    with np.errstate(all="ignore"):
        theirs = plain(format, values)
    for isa in ISAS:
        same(format, encoded(isa, F32, format, values.view(np.uint8)), theirs)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ENCODED)
def test_what_is_not_finite_is_seen_in_its_block_alone(name: str, bad: float) -> None:
    format = FORMATS[name]
    values = np.random.default_rng(1).normal(0, 1, (1, 1024)).astype(np.float32)
    good = plain(format, values)
    for at in (256, 300, 511):
        spoilt = values.copy()
        spoilt[0, at] = bad
        with np.errstate(all="ignore"):
            theirs = plain(format, spoilt)
        first = at // format.block * format.bytes
        for isa in ISAS:
            ours = encoded(isa, F32, format, spoilt.view(np.uint8))
            same(format, ours, theirs)
            block = slice(first, first + format.bytes)
            assert not np.isfinite(dequantize(format, ours[:, block])).all()
            ours[:, block] = good[:, block]
            assert ours.tobytes() == good.tobytes()


def test_what_does_not_fit_is_refused() -> None:
    rows = np.zeros((2, 4 * 64), np.uint8)
    for source, to, of, bytes_out in (
        ("f32", "q5_1", rows, 48),
        ("q8_0", "q4_0", rows, 36),
        ("f32", "q4_0", rows[:, : 4 * 40], 36),
        ("f32", "q4_k", rows, 144),
        ("f32", "q4_0", rows, 35),
        ("f32", "q4_0", rows[:1], 36),
        ("f32", "q3_0", rows, 36),
    ):
        with pytest.raises(ValueError, match=r"encoder|floats|whole blocks|must have|format"):
            native.encode(ISAS[0], source, to, np.ascontiguousarray(of), np.zeros((2, bytes_out), np.uint8))
    out = np.zeros((2, 36), np.uint8)
    native.encode(ISAS[0], "f32", "q4_0", rows, out)
    assert out.any()
