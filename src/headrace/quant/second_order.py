"""Quants chosen one input after the other, each making up for the errors of those before it.

Owes: `encoder`, GPTQ (Frantar et al. 2022; after Optimal Brain Surgeon, Hassibi and Stork 1993) within the blocks
of any format of `headrace.quant.encode`: the order of the inputs is the file's, the grid of each block is fitted to
what its weights have become, and a row that comes out worse than without feedback is taken without.
Does not know: layers, files, where the moments come from.

The error that is made small is that of a linear's outputs, tr(E M E^T), where M are the second moments of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.base.formats import Format
from headrace.quant.blocks import Bytes, Floats, dequantize
from headrace.quant.encode import CODINGS, Grid, encode, pack

DAMPING = 0.01  # of the mean diagonal, added to it: few rows have been seen, and some inputs are never used
AT_ONCE = 1 << 12  # rows


def encoder(format: Format, moments: Floats, threads: int = 1) -> Callable[[Floats], Bytes]:
    """A function from float32 [rows, columns] to blocks, for inputs of second moments [columns, columns]."""
    importance = np.ascontiguousarray(moments.diagonal())
    feedback = _feedback(moments)
    if feedback is None:
        return lambda values: encode(format, values, importance, threads)

    def encode_rows(values: Floats) -> Bytes:
        out = encode(format, values, importance, threads)
        for at in range(0, len(values), AT_ONCE):
            rows = np.asarray(values[at : at + AT_ONCE], np.float32)
            fed = _fed(format, rows, importance, feedback)
            held = out[at : at + AT_ONCE]
            better = output_error(format, fed, rows, moments) < output_error(format, held, rows, moments)
            held[better] = fed[better]
        return out

    return encode_rows


def output_error(format: Format, packed: Bytes, values: Floats, moments: Floats) -> Floats:
    """What quantisation adds to each output, squared and averaged: float32 [rows]."""
    error = dequantize(format, packed) - values
    return np.asarray(np.einsum("rc,rc->r", error @ moments, error))


def _feedback(moments: Floats) -> Floats | None:
    """The upper Cholesky factor of the inverse of the damped moments; None if they are all zero or not finite."""
    mean = float(np.mean(moments.diagonal(), dtype=np.float64))
    if not (0 < mean < np.inf):
        return None
    damped = moments.astype(np.float64)
    damped[np.diag_indices_from(damped)] += DAMPING * mean
    try:
        inverse = np.linalg.inv(damped)
        factor = np.linalg.cholesky((inverse + inverse.T) / 2).T
    except np.linalg.LinAlgError:
        return None
    return np.ascontiguousarray(factor, np.float32)


def _fed(format: Format, values: Floats, importance: Floats, feedback: Floats) -> Bytes:
    coding = CODINGS[format.name]
    left = np.ascontiguousarray(values.T)  # what is still to be said: [columns, rows]
    blocks = []
    for at in range(0, len(left), format.block):
        block = slice(at, at + format.block)
        runs = left[block].reshape(-1, coding.run, left.shape[1])  # [runs, run, rows]
        weights = importance[block].reshape(1, -1, coding.run).transpose(2, 0, 1)
        grid = coding.fit(coding, np.ascontiguousarray(runs.transpose(1, 2, 0)), _scaled(weights))
        quants = np.empty((format.block, left.shape[1]), np.float32)
        for first in range(0, format.block, coding.run):
            _feed_run(left, at + first, grid, first // coding.run, feedback, quants[first : first + coding.run], format)
        blocks.append(pack(format, grid, quants.reshape(-1, coding.run, quants.shape[1]).transpose(1, 2, 0)))
    return np.concatenate(blocks, axis=1)


def _scaled(weights: Floats) -> Floats:
    mean = weights.mean()
    return np.asarray(np.maximum(weights / mean, 1e-4) if mean > 0 else np.ones_like(weights), np.float32)


def _feed_run(left: Floats, at: int, grid: Grid, run: int, feedback: Floats, quants: Floats, format: Format) -> None:
    """Quantises the inputs of one run and passes their errors on, first within the run, then to all that follow."""
    coding = CODINGS[format.name]
    step, low = np.ascontiguousarray(grid.step[:, run]), np.ascontiguousarray(grid.low[:, run])
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    end = at + coding.run
    errors = np.empty_like(quants)
    for i in range(coding.run):
        x = left[at + i]
        quants[i] = np.clip(np.rint((x - low) * inverse), coding.least, coding.most)
        errors[i] = (x - (quants[i] * step + low)) / feedback[at + i, at + i]
        left[at + i + 1 : end] -= feedback[at + i, at + i + 1 : end, None] * errors[i]
    left[end:] -= feedback[at:end, end:].T @ errors
