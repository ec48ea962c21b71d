"""Measures of predictions against their definitions, number by number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.quant import quality
from headrace.quant.quality import Mean, compare, negative_log_likelihood


def probabilities(row: np.ndarray) -> list[float]:
    """Of one row of logits, with exact sums."""
    weights = [math.exp(float(x) - float(row.max())) for x in row]
    return [w / math.fsum(weights) for w in weights]


@st.composite
def logits(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two models' logits of some rows, of any spread and nearness, and what came next."""
    rows, vocab = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, apart, level = draw(st.sampled_from([0.0, 1.0, 30.0])), draw(st.sampled_from([0, 1e-3, 5])), rng.normal()
    one = (1e3 * level + spread * rng.standard_normal((rows, vocab))).astype(np.float32)
    other = (one + apart * rng.standard_normal((rows, vocab))).astype(np.float32)
    return one, other, rng.integers(vocab, size=rows).astype(np.int32)


@settings(deadline=None)
@given(logits(), st.integers(1, 200))
def test_every_row_is_what_the_definitions_say(given: tuple[np.ndarray, np.ndarray, np.ndarray], at_once: int) -> None:
    one, other, ids = given
    before, quality._VALUES = quality._VALUES, at_once
    try:
        found = compare(one, other, ids)
        alone = negative_log_likelihood(other, ids)
    finally:
        quality._VALUES = before
    for row, id in enumerate(ids):
        p, q = probabilities(one[row]), probabilities(other[row])
        kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)
        assert found.kl[row] == pytest.approx(max(kl, 0), abs=1e-11)
        assert found.nll[row] == alone[row] == pytest.approx(-math.log(q[id]), rel=1e-12, abs=1e-12)
        assert found.reference_nll[row] == pytest.approx(-math.log(p[id]), rel=1e-12, abs=1e-12)
        assert found.agreed[row] == (p.index(max(p)) == q.index(max(q)))


@settings(deadline=None)
@given(logits())
def test_no_model_is_far_from_itself(given: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    found = compare(given[0], given[0], given[2])
    assert not found.kl.any() and found.agreed.all() and (found.nll == found.reference_nll).all()


def test_sums_are_not_those_of_float32() -> None:
    """A likely id, and 262,144 that weigh as little as float32 would forget."""
    row = np.full((1, 262145), -20.0, np.float32)
    row[0, 0] = 0
    (nats,) = negative_log_likelihood(row, np.zeros(1, np.int32))
    assert nats == pytest.approx(math.log1p(262144 * math.exp(-20.0)), rel=1e-13)


def test_a_mean_has_the_error_of_its_numbers() -> None:
    mean = Mean.of(np.array([1.0, 2.0, 3.0, 6.0]))
    assert mean.value == 3 and mean.error == pytest.approx(math.sqrt(14 / 3) / 2)
    assert Mean.of(np.array([2.0])) == Mean(2.0, None)
    assert Mean.of(np.ones(5)).error == 0
