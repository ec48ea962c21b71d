"""What the bytes of a block mean: the plain numpy reference of every weight format.

Owes: `dequantize` for all formats, `quantize` (round to nearest) for those with 32 values a block, random valid blocks
for kernel tests, and a quick look for NaN or Inf. Each faster unpacking elsewhere is tested against this one.
Does not know: files, layouts of kernels, models.

Layouts are those of the block structs in ggml (ggml-org/ggml, src/ggml-common.h); a row is a run of whole blocks. In
the formats with 32 values, byte i of `qs` holds value i (low nibble) and value i + 16 (high nibble).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.formats import Format

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_Blocks = npt.NDArray[Any]  # one record a block, fields as in LAYOUTS

_F16: tuple[str, str] = ("d", "<f2")  # the scale
_MIN: tuple[str, str] = ("m", "<f2")  # the offset
_HIGH: tuple[str, str] = ("qh", "<u4")  # bit i: fifth bit of value i
_NIBBLES: tuple[str, str, int] = ("qs", "u1", 16)
_SIXES: tuple[str, str, int] = ("scales", "u1", 12)  # eight 6-bit scales and eight 6-bit offsets

LAYOUTS: dict[str, np.dtype[Any]] = {
    "f32": np.dtype([("d", "<f4")]),
    "f16": np.dtype([_F16]),
    "bf16": np.dtype([("d", "<u2")]),
    "q4_0": np.dtype([_F16, _NIBBLES]),
    "q4_1": np.dtype([_F16, _MIN, _NIBBLES]),
    "q5_0": np.dtype([_F16, _HIGH, _NIBBLES]),
    "q5_1": np.dtype([_F16, _MIN, _HIGH, _NIBBLES]),
    "q8_0": np.dtype([_F16, ("qs", "i1", 32)]),
    "q4_k": np.dtype([_F16, _MIN, _SIXES, ("qs", "u1", 128)]),
    "q5_k": np.dtype([_F16, _MIN, _SIXES, ("qh", "u1", 32), ("qs", "u1", 128)]),
    "q6_k": np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _F16]),
    "q4_z": np.dtype([_F16, ("zero", "u1"), _NIBBLES]),  # ours: value = (quant - zero) * d
}

_FLOAT_FIELDS = ("d", "m")
_EXPONENT = {"f32": ("<u4", 0x7F800000), "bf16": ("<u2", 0x7F80)}  # all ones there: NaN or Inf
_HALF_EXPONENT = ("<u2", 0x7C00)
_LEAST_STEP = np.float32(2.0**-126)


def dequantize(format: Format, rows: Bytes) -> Floats:
    """Values of `rows`, uint8 [n, row bytes], as float32 [n, columns]; a rounding each operation, in ggml's order."""
    blocks = _blocks(format, rows)
    # Inf times a zero quant is NaN: a value like any other here; `check_finite` is who complains.
    with np.errstate(invalid="ignore", over="ignore"):
        values = _UNPACK[format.name](blocks)
    return values.reshape(rows.shape[0], rows.shape[1] // format.bytes * format.block)


def quantize(format: Format, values: npt.ArrayLike) -> Bytes:
    """Float32 [n, columns] of whole blocks as uint8 [n, row bytes]: round to nearest, as ggml's reference.

    For f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1; another format is a ValueError.
    """
    if format.name not in _PACK:
        raise ValueError(f"there is no plain packer for {format.name}; it can pack {', '.join(_PACK)}")
    rows = np.asarray(values, np.float32)
    assert rows.ndim == 2 and rows.shape[1] % format.block == 0, rows.shape
    blocks = np.empty(rows.size // format.block, LAYOUTS[format.name])
    with np.errstate(over="ignore", invalid="ignore"):
        _PACK[format.name](rows.reshape(-1, format.block), blocks)
    return _as_rows(format, blocks, rows.shape[0])


def pack_random(format: Format, rows: int, columns: int, rng: np.random.Generator) -> Bytes:
    """Random valid blocks, uint8 [rows, row bytes]: any bits as integers, values of about ±0.2 around zero."""
    assert columns % format.block == 0, (format.name, columns)
    count = rows * columns // format.block
    blocks = rng.integers(0, 256, count * format.bytes, np.uint8).view(LAYOUTS[format.name])
    if format.block == 1:
        return quantize(format, rng.normal(0, 0.05, (rows, columns)))
    step, low = _RANDOM_SCALE[format.name]
    blocks["d"] = step * rng.uniform(0.5, 1.0, count)
    if low:
        blocks["m"] = low * rng.uniform(0.5, 1.0, count)
    if "zero" in (blocks.dtype.names or ()):
        blocks["zero"] &= 15
    return _as_rows(format, blocks, rows)


def check_finite(format: Format, rows: Bytes) -> bool:
    """Whether every scale (for plain floats: every element) of `rows`, uint8 [n, row bytes], is finite."""
    integer, mask = _EXPONENT.get(format.name, _HALF_EXPONENT)
    blocks = _blocks(format, rows)
    fields = [name for name in _FLOAT_FIELDS if name in (blocks.dtype.names or ())]
    chunk = 1 << 18  # blocks looked at in one go: temporaries stay in the cache
    for start in range(0, len(blocks), chunk):
        for name in fields:
            bits = blocks[start : start + chunk][name].view(integer)
            if ((bits & mask) == mask).any():
                return False
    return True


def _blocks(format: Format, rows: Bytes) -> _Blocks:
    assert rows.dtype == np.uint8 and rows.ndim == 2 and rows.shape[1] % format.bytes == 0, (rows.dtype, rows.shape)
    return np.ascontiguousarray(rows).reshape(-1).view(LAYOUTS[format.name])


def _as_rows(format: Format, blocks: _Blocks, rows: int) -> Bytes:
    packed: Bytes = blocks.view(np.uint8).reshape(rows, len(blocks) // max(rows, 1) * format.bytes)
    return packed


# --- unpacking: records [blocks] -> float32 [blocks, values] ---------------------------------------------------------


def _column(blocks: _Blocks, field: str) -> Floats:
    values: Floats = blocks[field].astype(np.float32)[:, None]
    return values


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fives(blocks: _Blocks) -> npt.NDArray[np.uint8]:
    high = (blocks["qh"][:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return (_nibbles(blocks["qs"]) | high * 16).astype(np.uint8)


def _from_f32(blocks: _Blocks) -> Floats:
    values: Floats = blocks["d"].astype(np.float32)
    return values


def _from_bf16(blocks: _Blocks) -> Floats:
    return (blocks["d"].astype(np.uint32) << 16).view(np.float32)


def _from_q4_0(blocks: _Blocks) -> Floats:
    return (_nibbles(blocks["qs"]).astype(np.float32) - np.float32(8)) * _column(blocks, "d")


def _from_q4_1(blocks: _Blocks) -> Floats:
    return _nibbles(blocks["qs"]).astype(np.float32) * _column(blocks, "d") + _column(blocks, "m")


def _from_q5_0(blocks: _Blocks) -> Floats:
    return (_fives(blocks).astype(np.float32) - np.float32(16)) * _column(blocks, "d")


def _from_q5_1(blocks: _Blocks) -> Floats:
    return _fives(blocks).astype(np.float32) * _column(blocks, "d") + _column(blocks, "m")


def _from_q4_z(blocks: _Blocks) -> Floats:
    return (_nibbles(blocks["qs"]).astype(np.float32) - _column(blocks, "zero")) * _column(blocks, "d")


def _from_q8_0(blocks: _Blocks) -> Floats:
    values: Floats = blocks["qs"].astype(np.float32) * _column(blocks, "d")
    return values


def unpack_sixes(packed: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """The 6-bit scales and offsets of Q4_K and Q5_K: uint8 [n, 12] -> two uint8 [n, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 offsets 0-3 in their low six bits; byte 8 + i holds the low four bits of
    scale and offset 4 + i, whose upper two bits are the upper two of bytes i and 4 + i.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (low & 15) | ((first >> 6) << 4)], axis=1)
    offsets = np.concatenate([second & 63, (low >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, offsets


def _k_values(blocks: _Blocks, quants: npt.NDArray[np.uint8]) -> Floats:
    """quants [n, 8, 32]: eight runs of 32 values, each with its own scale and offset."""
    scales, offsets = unpack_sixes(blocks["scales"])
    step = _column(blocks, "d") * scales.astype(np.float32)
    low = _column(blocks, "m") * offsets.astype(np.float32)
    values: Floats = step[:, :, None] * quants.astype(np.float32) - low[:, :, None]
    return values


def _k_nibbles(blocks: _Blocks) -> npt.NDArray[np.uint8]:
    """32 bytes give two runs: the low nibbles, then the high ones. [n, 8, 32]."""
    packed = blocks["qs"].reshape(-1, 4, 32)
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)


def _from_q4_k(blocks: _Blocks) -> Floats:
    return _k_values(blocks, _k_nibbles(blocks))


def _from_q5_k(blocks: _Blocks) -> Floats:
    # bit r of byte i: the fifth bit of value i in run r
    high = (blocks["qh"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _k_values(blocks, (_k_nibbles(blocks) | high * 16).astype(np.uint8))


def _from_q6_k(blocks: _Blocks) -> Floats:
    """Two halves of 128 values; in each, four runs of 32 share 64 bytes of low nibbles and 32 of upper bit pairs."""
    low = blocks["ql"].reshape(-1, 2, 2, 32)
    low = np.stack([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    pairs = (blocks["qh"].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    quants = (low | (pairs << 4)).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    step = _column(blocks, "d") * blocks["scales"].astype(np.float32)
    values: Floats = step[:, :, None] * quants
    return values


_UNPACK: dict[str, Callable[[_Blocks], Floats]] = {
    "f32": _from_f32,
    "f16": _from_f32,
    "bf16": _from_bf16,
    "q4_0": _from_q4_0,
    "q4_1": _from_q4_1,
    "q5_0": _from_q5_0,
    "q5_1": _from_q5_1,
    "q8_0": _from_q8_0,
    "q4_k": _from_q4_k,
    "q5_k": _from_q5_k,
    "q6_k": _from_q6_k,
    "q4_z": _from_q4_z,
}


# --- packing: float32 [blocks, values] into records [blocks] --------------------------------------------------


def inverse(step: Floats) -> Floats:
    """1 / step, or 0 for a step so small that this might overflow."""
    return np.divide(np.float32(1), step, out=np.zeros_like(step), where=np.abs(step) >= _LEAST_STEP)


def _put_float(values: Floats, blocks: _Blocks) -> None:
    blocks["d"] = values[:, 0]


def _put_bf16(values: Floats, blocks: _Blocks) -> None:
    bits = np.ascontiguousarray(values[:, 0]).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
    blocks["d"] = np.where(np.isnan(values[:, 0]), (bits >> 16) | 64, rounded)


def _put_quants(quants: npt.NDArray[np.uint8], blocks: _Blocks) -> None:
    low = quants & 15
    blocks["qs"] = low[:, :16] | (low[:, 16:] << 4)
    if "qh" in (blocks.dtype.names or ()):
        bits = (quants >> 4).astype(np.uint32) << np.arange(32, dtype=np.uint32)
        blocks["qh"] = bits.sum(axis=1, dtype=np.uint32)  # no two share a place


def _symmetric(half: int) -> Callable[[Floats, _Blocks], None]:
    """Quants 0 .. 2 half - 1 stand for -half .. half - 1; the value of largest size becomes -half exactly."""

    def put(values: Floats, blocks: _Blocks) -> None:
        largest = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
        step = largest / np.float32(-half)
        quants = np.trunc(values * inverse(step) + np.float32(half + 0.5))
        blocks["d"] = step[:, 0]
        _put_quants(np.clip(quants, 0, 2 * half - 1).astype(np.uint8), blocks)

    return put


def _affine(top: int) -> Callable[[Floats, _Blocks], None]:
    """Quants 0 .. top spread over the block's least to greatest value."""

    def put(values: Floats, blocks: _Blocks) -> None:
        low = values.min(axis=1, keepdims=True) + np.float32(0)  # never -0
        step = (values.max(axis=1, keepdims=True) + np.float32(0) - low) / np.float32(top)
        quants = np.trunc((values - low) * inverse(step) + np.float32(0.5))
        blocks["d"], blocks["m"] = step[:, 0], low[:, 0]
        _put_quants(np.clip(quants, 0, top).astype(np.uint8), blocks)

    return put


def _put_q8_0(values: Floats, blocks: _Blocks) -> None:
    step: Floats = np.divide(np.max(np.abs(values), axis=1, keepdims=True), np.float32(127))
    scaled: Floats = np.multiply(values, inverse(step))
    blocks["d"] = step[:, 0]
    blocks["qs"] = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled).astype(np.int8)


_PACK: dict[str, Callable[[Floats, _Blocks], None]] = {
    "f32": _put_float,
    "f16": _put_float,
    "bf16": _put_bf16,
    "q8_0": _put_q8_0,
    "q4_0": _symmetric(8),
    "q4_1": _affine(15),
    "q5_0": _symmetric(16),
    "q5_1": _affine(31),
}

# What `pack_random` draws the scale and the offset from (times 0.5 to 1), so that values lie around zero.
_RANDOM_SCALE: dict[str, tuple[float, float]] = {
    "q4_0": (0.02, 0),
    "q4_1": (0.02, -0.16),
    "q5_0": (0.01, 0),
    "q5_1": (0.01, -0.16),
    "q8_0": (0.0015, 0),
    "q4_k": (0.0005, 0.004),
    "q5_k": (0.00025, 0.004),
    "q6_k": (0.0001, 0),
    "q4_z": (0.02, 0),
}
