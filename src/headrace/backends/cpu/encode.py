"""Rows in another format by the native encoders, where there is one. Gives the bits of `quant.encode.recoded`."""

from __future__ import annotations

import numpy as np

from headrace import _native
from headrace.base.formats import ENCODED, F32, FLOATS, Format
from headrace.quant.blocks import Bytes, dequantize
from headrace.quant.encode import recoded


def encode(isa: str, source: Format, format: Format, rows: Bytes) -> Bytes:
    """Rows of `source`, uint8 [n, row bytes], as such rows of `format`. Several threads may do this at once."""
    if format.name not in ENCODED:
        return recoded(source, format, rows)
    if source not in FLOATS:
        source, rows = F32, dequantize(source, rows).view(np.uint8)
    columns = rows.shape[1] // source.bytes
    out = np.empty((len(rows), format.row_bytes(columns)), np.uint8)
    _native.encode(isa, source.name, format.name, rows, out)
    return out
