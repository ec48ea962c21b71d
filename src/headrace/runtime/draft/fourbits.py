"""A model's weights in 4 bits, rounded as they are asked for: good enough to guess what the model itself will say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from headrace.base.formats import FORMATS
from headrace.program import Part, WeightData, WeightSource
from headrace.quant.blocks import dequantize, quantize

FORMAT = FORMATS["q4_1"]
_ROWS = 512  # at a time: bounds the memory that float32 values take


class FourBits:
    """A `WeightSource` over another. kept: names of weights that stay as they are, as vectors and smaller ones do."""

    def __init__(self, source: WeightSource, threads: int, kept: frozenset[str] = frozenset()) -> None:
        self._source = source
        self._threads = threads
        self._kept = kept

    def load(self, name: str) -> WeightData:
        data = self._source.load(name)
        weight = data.weight
        if len(weight.shape) == 1 or name in self._kept or weight.columns % FORMAT.block:
            return data
        with ThreadPoolExecutor(self._threads) as pool:
            return replace(data, parts=tuple(self._rounded(part, pool) for part in data.parts))

    def release(self, name: str) -> None:
        self._source.release(name)

    def _rounded(self, part: Part, pool: ThreadPoolExecutor) -> Part:
        if part.format.bits <= FORMAT.bits:
            return part

        def rounded(first: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
            rows = np.ascontiguousarray(part.data[first : first + _ROWS])
            return np.asarray(quantize(FORMAT, dequantize(part.format, rows)))

        return Part(FORMAT, np.concatenate(list(pool.map(rounded, range(0, len(part.data), _ROWS)))))
