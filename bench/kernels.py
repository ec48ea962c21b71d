"""How fast the native kernels are: multiply-adds and bytes a second of each format, 1 to 64 rows; packing and encoding.

One thread. "hot": panels that stay in the cache, so arithmetic shows; "stream": a matrix larger than it, so memory
shows. Run it on a quiet machine: `python bench/kernels.py --isa avx512`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from headrace import _native
from headrace.base.formats import BF16, COMPUTED, ENCODED
from headrace.quant import blocks

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 64)
COLUMNS = 1024
STREAM_BYTES = 48 << 20


def packed(name: str, rows: int, rng: np.random.Generator) -> tuple[_native.Packed, float]:
    """A random matrix [rows, COLUMNS], and the bytes of file rows packed a second."""
    some = blocks.pack_random(COMPUTED[name], min(rows, 4096), COLUMNS, rng)
    matrix = _native.Packed(name, rows, COLUMNS)
    best = 0.0
    for first in range(0, rows, len(some)):
        part = some[: rows - first]
        start = time.perf_counter()
        matrix.pack(first, part)
        best = max(best, part.nbytes / (time.perf_counter() - start))
    return matrix, best


def line(isa: str, name: str, matrix: _native.Packed, panels: int, repeats: int, rng: np.random.Generator) -> str:
    """GMAC/s for each number of rows, and GB/s of weights at one row."""
    cells = []
    share = matrix.nbytes / matrix.panels * panels
    gigabytes = 0.0
    for rows in ROWS:
        x = rng.normal(0, 1, (rows, COLUMNS)).astype(np.float32)
        seconds = _native.time_linear(isa, matrix, x, panels, repeats)
        cells.append(f"{16 * panels * COLUMNS * rows / seconds / 1e9:7.1f}")
        gigabytes = gigabytes or share / seconds / 1e9
    return f"{name:6}" + "".join(cells) + f"   {gigabytes:6.1f} GB/s"


def encoded(isa: str, name: str, rng: np.random.Generator) -> float:
    """bf16 values made into blocks a second."""
    rows = blocks.pack_random(BF16, 512, COLUMNS, rng)
    out = np.empty((len(rows), COMPUTED[name].row_bytes(COLUMNS)), np.uint8)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        _native.encode(isa, "bf16", name, rows, out)
        seconds.append(time.perf_counter() - start)
    return len(rows) * COLUMNS / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", default=_native.isa_names()[0], choices=_native.isa_names())
    parser.add_argument("--formats", nargs="*", default=_native.formats())
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    print(f"{arguments.isa}, one thread; GMAC/s for {COLUMNS} inputs and this many rows; GB/s of weights at one row")
    print("       " + "".join(f"{rows:>7}" for rows in ROWS))
    for name in arguments.formats:
        bytes_a_row = _native.Packed(name, 16, COLUMNS).nbytes // 16
        matrix, pack_rate = packed(name, STREAM_BYTES // bytes_a_row, rng)
        hot = max(1, (384 << 10) // (16 * bytes_a_row))
        print(line(arguments.isa, name, matrix, hot, 30, rng), " hot")
        made = f"packs {pack_rate / 1e9:.2f} GB/s"
        if name in ENCODED:
            made += f", encodes {encoded(arguments.isa, name, rng) / 1e9:.2f} G values/s"
        print(line(arguments.isa, name, matrix, matrix.panels, 3, rng), f" stream; {made}")


if __name__ == "__main__":
    main()
