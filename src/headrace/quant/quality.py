"""How good predictions are, and how far one model's are from another's: logits in, nats out.

Owes: exact sums, in float64, of log-probabilities that nothing has rounded; means with their standard errors, which
take the tokens as independent of each other. Memory beside the arguments: a few MiB.
Does not know where logits come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Ids = NDArray[np.int32]

_VALUES = 1 << 18  # logits that are in memory as float64 at a time


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its standard error, None where one number is all there is."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: F64) -> Mean:
        """Of at least one number."""
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(float(values.mean()), error)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows of logits beside a reference's, row by row.

    nll, reference_nll: nats of what came next, as each predicted it. kl: Kullback and Leibler's divergence of the
    reference's distribution from the other's, in nats. agreed: whether the most likely id is the same; of equal ones
    the lowest counts.
    """

    nll: F64
    reference_nll: F64
    kl: F64
    agreed: NDArray[np.bool_]


def negative_log_likelihood(logits: F32, ids: Ids) -> F64:
    """Nats of the id of each row. logits [rows, vocabulary], finite; ids [rows]."""
    return _joined([-_chosen(_log_softmax(logits[at]), ids[at]) for at in _blocks(logits)])


def compare(reference: F32, logits: F32, ids: Ids) -> Comparison:
    """Of logits [rows, vocabulary] with the reference's, all finite. ids [rows]: what came next."""
    columns = []
    for at in _blocks(logits):
        p, q = _log_softmax(reference[at]), _log_softmax(logits[at])
        columns.append((-_chosen(q, ids[at]), -_chosen(p, ids[at]), _kl(p, q)))
    nll, reference_nll, kl = (_joined(list(column)) for column in zip(*columns, strict=True))
    return Comparison(nll, reference_nll, kl, reference.argmax(axis=1) == logits.argmax(axis=1))


def _chosen(logs: F64, ids: Ids) -> F64:
    return np.take_along_axis(logs, ids[:, None], axis=1)[:, 0]


def _kl(p: F64, q: F64) -> F64:
    """Of distributions given by their logarithms. What rounding leaves below zero is zero."""
    nats: F64 = np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)
    return nats


def _log_softmax(logits: F32) -> F64:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def _blocks(logits: F32) -> Iterator[slice]:
    """The rows, as many at a time as the bound allows."""
    step = max(1, _VALUES // logits.shape[1])
    return (slice(at, at + step) for at in range(0, len(logits), step))


def _joined(pieces: list[F64]) -> F64:
    return np.concatenate(pieces) if pieces else np.zeros(0)
