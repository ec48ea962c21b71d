"""Floats into blocks: the best steps for each block of a format, given how much each input matters.

Owes: for q8_0, q5_0, q4_1, q4_0, q4_k and q6_k, `encode`: the grid (step and offset of each run of values) that has the
least weighted squared error among many candidates, never more than plain rounding has; and `fit`, `quants_of` and
`pack`, its three parts, for those who choose the quants themselves (`headrace.quant.second_order`).
Does not know: layers, files, where the weights of the errors come from.

The weights are those of the inputs (second moments of what a linear reads: the diagonal of the error's quadratic form),
the idea of AWQ (Lin et al. 2023) without its change of the graph. A candidate is a step near the largest value's over
the top quant; for each, quants are rounded and step and offset then solved for by least squares.

Arrays are [values of a run, rows, runs of a row], so that all arithmetic is over long contiguous rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.base.formats import Format
from headrace.quant.blocks import LAYOUTS, Bytes, Floats, dequantize, inverse, quantize

Halves = NDArray[np.float32]  # float32 that float16 can hold
CHUNK = 1 << 16  # values encoded in one go: temporaries stay in the cache
TRIES = 11  # steps beside the one that spans a run
REFINED = 2  # rounds of quants, then steps


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """What values may become: step * quant + low. step, low: float32 [rows, runs]. fields: as stored in the blocks."""

    step: Floats
    low: Floats
    fields: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Coding:
    """A format that can be encoded. run: values that share a step. least, most: quants."""

    run: int
    least: int
    most: int
    fit: Callable[[Coding, Floats, Floats], Grid]
    put: Callable[[NDArray[np.uint8], NDArray[Any]], None]


def encode(format: Format, values: Floats, importance: Floats | None = None, threads: int = 1) -> Bytes:
    """Float32 [rows, columns] of whole blocks as uint8 [rows, row bytes].

    importance: float32 [columns], at least 0, what a squared error weighs in each; None: all alike.
    """
    rows, columns = values.shape
    weights = np.ones(columns, np.float32) if importance is None else _positive(importance)
    out = np.empty((rows, format.row_bytes(columns)), np.uint8)
    step = max(1, CHUNK // max(columns, 1))

    def do(at: int) -> None:
        out[at : at + step] = _best(format, np.asarray(values[at : at + step], np.float32), weights)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(do, range(0, rows, step)))
    return out


def plain(format: Format, values: Floats) -> Bytes:
    """The nearest quants for steps that span each run: ggml's reference where a block is a run."""
    if format.name not in _NESTED:
        return quantize(format, values)
    coding = CODINGS[format.name]
    x = _runs(coding, values)
    grid = _NESTED[format.name](coding, x, *_spanned(coding, x))
    return pack(format, grid, quants_of(coding, grid, x))


def recoded(source: Format, format: Format, rows: Bytes) -> Bytes:
    """Rows of one format, uint8 [rows, row bytes], in another, by plain rounding."""
    return plain(format, dequantize(source, rows))


def weighted_error(format: Format, packed: Bytes, values: Floats, weights: Floats) -> NDArray[np.float64]:
    """Sum over each block of weight times squared error, float64 [rows, blocks]."""
    error = np.square(dequantize(format, packed) - values, dtype=np.float64) * weights
    return np.asarray(error.reshape(len(values), -1, format.block).sum(axis=2))


def _positive(importance: Floats) -> Floats:
    """Scaled to a mean of one, so that sums neither overflow nor vanish; what is never seen counts a little."""
    mean = float(np.mean(importance, dtype=np.float64))
    if not 0 < mean < np.inf:
        return np.ones(len(importance), np.float32)
    return np.asarray(np.maximum(importance / mean, 1e-4), np.float32)


def _best(format: Format, values: Floats, weights: Floats) -> Bytes:
    """The fitted blocks, and the plain ones where those have less error."""
    coding = CODINGS[format.name]
    x = _runs(coding, values)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        grid = coding.fit(coding, x, _runs(coding, weights[None]))
        fitted, rounded = pack(format, grid, quants_of(coding, grid, x)), plain(format, values)
        worse = ~(weighted_error(format, fitted, values, weights) <= weighted_error(format, rounded, values, weights))
    blocks = fitted.reshape(len(values), -1, format.bytes)
    blocks[worse] = rounded.reshape(blocks.shape)[worse]
    return fitted


def _runs(coding: Coding, values: Floats) -> Floats:
    """[rows, columns] as [run, rows, runs]."""
    return np.ascontiguousarray(values.reshape(len(values), -1, coding.run).transpose(2, 0, 1))


def quants_of(coding: Coding, grid: Grid, x: Floats) -> Floats:
    """The nearest quants, as floats: x [..., rows, runs] of values."""
    return np.asarray(np.clip(np.rint((x - grid.low) * inverse(grid.step)), coding.least, coding.most), np.float32)


def pack(format: Format, grid: Grid, quants: Floats) -> Bytes:
    """The blocks of a grid and its quants [run, rows, runs]: uint8 [rows, row bytes]."""
    coding = CODINGS[format.name]
    run, rows, runs = quants.shape
    shifted = (quants - coding.least).astype(np.uint8)
    blocks = np.zeros(rows * runs * run // format.block, LAYOUTS[format.name])
    for name, field in grid.fields.items():
        blocks[name] = field.reshape(len(blocks), *field.shape[2:])
    coding.put(np.ascontiguousarray(shifted.transpose(1, 2, 0)).reshape(len(blocks), format.block), blocks)
    return np.asarray(blocks.view(np.uint8).reshape(rows, runs * run // format.block * format.bytes))


def _half(values: Floats) -> Halves:
    return values.astype(np.float16).astype(np.float32)


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


# --- one run: candidates, least squares ------------------------------------------------------------------------------


def _fit_steps(coding: Coding, x: Floats, w: Floats) -> Floats:
    """The best step without offset for each run, float32 [rows, runs]."""
    top = _largest(x)
    over, wx = inverse(top), w * x
    step, gain = np.zeros_like(top), np.zeros_like(top)

    def try_inverse(factor: Floats) -> None:
        quants = np.clip(np.rint(x * factor), coding.least, coding.most)
        found, better = _step_of(quants, wx, w)
        chosen = better > gain
        step[chosen], gain[chosen] = found[chosen], better[chosen]

    for end in (coding.most,) if coding.least == -coding.most else (coding.most, coding.least):
        for widened in np.linspace(-0.9, 0.9, TRIES):
            try_inverse(over * np.float32(end + widened))
    for _ in range(REFINED):
        try_inverse(inverse(step))
    return step


def _largest(runs: Floats) -> Floats:
    """The value of largest size along the first axis, with its sign."""
    low, high = runs.min(axis=0) + np.float32(0), runs.max(axis=0) + np.float32(0)  # never -0
    return np.asarray(np.where(-low > high, low, high))


def _step_of(quants: Floats, wx: Floats, w: Floats) -> tuple[Floats, Floats]:
    """The step of least error for given quants, and how much of the squares it explains."""
    both = np.sum(wx * quants, axis=0)
    step = _ratio(both, np.sum(w * np.square(quants), axis=0))
    return step, step * both


def _fit_lines(coding: Coding, x: Floats, w: Floats, negative: bool) -> tuple[Floats, Floats]:
    """The best step and offset for each run. negative: the offset may not be above zero."""
    step, low = _spanned_lines(coding, x, negative)
    first, over, least = low.copy(), inverse(step) / np.float32(coding.most), np.full_like(low, np.inf)
    sums = np.sum(np.broadcast_to(w, x.shape), axis=0), np.sum(w * x, axis=0), np.sum(w * np.square(x), axis=0)

    def try_line(factor: Floats, offset: Floats) -> None:
        quants = np.clip(np.rint((x - offset) * factor), 0, coding.most)
        found, below, error = _line_of(quants, x, w, sums, negative)
        chosen = error < least
        step[chosen], low[chosen], least[chosen] = found[chosen], below[chosen], error[chosen]

    for widened in np.linspace(-1.2, 0.8, TRIES):
        try_line(over * np.float32(coding.most + widened), first)
    for _ in range(REFINED):
        try_line(inverse(step), low)
    return step, low


def _spanned_lines(coding: Coding, x: Floats, negative: bool) -> tuple[Floats, Floats]:
    """Steps and offsets that span each run's values."""
    low = (np.minimum(x.min(axis=0), 0) if negative else x.min(axis=0)) + np.float32(0)  # never -0
    return (x.max(axis=0) + np.float32(0) - low) / np.float32(coding.most), low


def _line_of(
    quants: Floats, x: Floats, w: Floats, sums: tuple[Floats, Floats, Floats], negative: bool
) -> tuple[Floats, Floats, Floats]:
    """Step, offset and error of the weighted regression of values on quants."""
    sw, sx, sxx = sums
    wq = w * quants
    sq, sqq, sqx = wq.sum(axis=0), (wq * quants).sum(axis=0), (wq * x).sum(axis=0)
    step = _ratio(sw * sqx - sq * sx, sw * sqq - sq * sq)
    low = (sx - step * sq) / sw
    if negative:
        above = low > 0
        step, low = np.where(above, _ratio(sqx, sqq), step), np.where(above, 0, low)
    error = sxx - 2 * (step * sqx + low * sx) + step * step * sqq + 2 * step * low * sq + low * low * sw
    return step, low, np.where(step > 0, error, np.inf)


def _fit_one(coding: Coding, x: Floats, w: Floats) -> Grid:
    step = _half(_fit_steps(coding, x, w))
    return Grid(step, np.zeros_like(step), {"d": step})


def _fit_line(coding: Coding, x: Floats, w: Floats) -> Grid:
    step, low = map(_half, _fit_lines(coding, x, w, negative=False))
    return Grid(step, low, {"d": step, "m": low})


# --- runs within blocks of 256, whose own steps are quants -----------------------------------------------------------


def _by_block(runs: Floats, each: int) -> Floats:
    return np.asarray(runs.reshape(len(runs), -1, each))


def _pair(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Six-bit scales and offsets [..., 8] as the 12 bytes that `blocks.unpack_sixes` reads."""
    low = (first[..., 4:] & 15) | ((second[..., 4:] & 15) << 4)
    return np.concatenate(
        [first[..., :4] | (first[..., 4:] >> 4 << 6), second[..., :4] | (second[..., 4:] >> 4 << 6), low], axis=-1
    ).astype(np.uint8)


def _nest_lines(coding: Coding, x: Floats, step: Floats, low: Floats) -> Grid:
    """Q4_K: steps and offsets as six-bit multiples of the block's two."""
    steps, lows = _by_block(step, 8), _by_block(0 - low, 8)
    d, m = (_half(a.max(axis=2) / np.float32(63)) for a in (steps, lows))
    scales = np.clip(np.rint(steps * inverse(d)[:, :, None]), 0, 63)
    offsets = np.clip(np.rint(lows * inverse(m)[:, :, None]), 0, 63)
    return _lines(d, m, scales, offsets)


def _lines(d: Halves, m: Halves, scales: Floats, offsets: Floats) -> Grid:
    packed = _pair(scales.astype(np.uint8), offsets.astype(np.uint8))
    step = (d[:, :, None] * scales).reshape(len(d), -1)
    low = -(m[:, :, None] * offsets).reshape(len(d), -1)
    return Grid(step, low, {"d": d, "m": m, "scales": packed})


def _nest_steps(coding: Coding, x: Floats, step: Floats, low: Floats) -> Grid:
    """Q6_K: steps as multiples, -128 to 127, of the block's one."""
    steps = _by_block(step, 16)
    d = _half(_largest(np.moveaxis(steps, 2, 0)) / np.float32(-128))
    return _steps(d, np.clip(np.rint(steps * inverse(d)[:, :, None]), -128, 127))


def _steps(d: Halves, scales: Floats) -> Grid:
    step = (d[:, :, None] * scales).reshape(len(d), -1)
    return Grid(step, np.zeros_like(step), {"d": d, "scales": scales.astype(np.int8)})


def _spanned(coding: Coding, x: Floats) -> tuple[Floats, Floats]:
    """Steps and offsets that span each run's values."""
    if coding.least:
        top = _largest(x)
        return top / np.float32(coding.least), np.zeros_like(top)
    return _spanned_lines(coding, x, negative=True)


def _fit_q4_k(coding: Coding, x: Floats, w: Floats) -> Grid:
    """Fitted runs; then each run's multiples among their neighbours, by the error that they really give."""
    grid = _nest_lines(coding, x, *_fit_lines(coding, x, w, negative=True))
    d, m = grid.fields["d"], grid.fields["m"]
    scales, offsets = (_by_block(a, 8) for a in (_multiples(grid.step, d, 8), _multiples(-grid.low, m, 8)))
    moves = [(a, b) for a in (0, -1, 1) for b in (0, -1, 1)]
    tried = [(np.clip(scales + a, 0, 63), np.clip(offsets + b, 0, 63)) for a, b in moves]
    chosen = _least(coding, x, w, [_lines(d, m, *pair) for pair in tried])
    return _lines(d, m, _picked(chosen, [a for a, _ in tried]), _picked(chosen, [b for _, b in tried]))


def _fit_q6_k(coding: Coding, x: Floats, w: Floats) -> Grid:
    step = _fit_steps(coding, x, w)
    grid = _nest_steps(coding, x, step, np.zeros_like(step))
    d = grid.fields["d"]
    scales = _by_block(_multiples(grid.step, d, 16), 16)
    tried = [np.clip(scales + move, -128, 127) for move in (0, -1, 1)]
    chosen = _least(coding, x, w, [_steps(d, scales) for scales in tried])
    return _steps(d, _picked(chosen, tried))


def _picked(chosen: NDArray[np.int64], tried: list[Floats]) -> Floats:
    """For each run the multiple of the grid that was chosen: [rows, blocks, runs of a block]."""
    return np.asarray(np.choose(chosen.reshape(tried[0].shape), tried), np.float32)


def _multiples(runs: Floats, d: Halves, each: int) -> Floats:
    return np.asarray(np.rint(_by_block(runs, each) * inverse(d)[:, :, None]).reshape(len(runs), -1))


def _least(coding: Coding, x: Floats, w: Floats, grids: list[Grid]) -> NDArray[np.int64]:
    """Which grid has the least error on each run: [rows, runs]."""
    errors = [np.sum(w * np.square(x - (quants_of(coding, g, x) * g.step + g.low)), axis=0) for g in grids]
    return np.asarray(np.argmin(np.stack(errors), axis=0))


# --- quants into records ----------------------------------------------------------------------------------------------


def _put_nibbles(quants: NDArray[np.uint8], blocks: NDArray[Any]) -> None:
    low = quants & 15
    blocks["qs"] = low[:, :16] | (low[:, 16:] << 4)


def _put_fives(quants: NDArray[np.uint8], blocks: NDArray[Any]) -> None:
    _put_nibbles(quants, blocks)
    bits = (quants >> 4).astype(np.uint32) << np.arange(32, dtype=np.uint32)
    blocks["qh"] = bits.sum(axis=1, dtype=np.uint32)


def _put_bytes(quants: NDArray[np.uint8], blocks: NDArray[Any]) -> None:
    blocks["qs"] = quants.astype(np.int16) - 127


def _put_q4_k(quants: NDArray[np.uint8], blocks: NDArray[Any]) -> None:
    pairs = quants.reshape(-1, 4, 2, 32)
    blocks["qs"] = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)


def _put_q6_k(quants: NDArray[np.uint8], blocks: NDArray[Any]) -> None:
    """Two halves of four runs of 32: see `blocks._from_q6_k`."""
    runs = quants.reshape(-1, 2, 4, 32)
    low, high = runs & 15, runs >> 4
    blocks["ql"] = (low[:, :, :2] | (low[:, :, 2:] << 4)).reshape(-1, 128)
    shifted = high << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    blocks["qh"] = np.bitwise_or.reduce(shifted, axis=2).reshape(-1, 64)


CODINGS: dict[str, Coding] = {
    "q8_0": Coding(32, -127, 127, _fit_one, _put_bytes),
    "q5_0": Coding(32, -16, 15, _fit_one, _put_fives),
    "q4_1": Coding(32, 0, 15, _fit_line, _put_nibbles),
    "q4_0": Coding(32, -8, 7, _fit_one, _put_nibbles),
    "q4_k": Coding(32, 0, 15, _fit_q4_k, _put_q4_k),
    "q6_k": Coding(16, -32, 31, _fit_q6_k, _put_q6_k),
}
_NESTED: dict[str, Callable[[Coding, Floats, Floats, Floats], Grid]] = {"q4_k": _nest_lines, "q6_k": _nest_steps}
