"""The rules of sampling: noise, cuts, penalties, masks, ties and reports, each against a plain second telling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.program import Sampled
from headrace.program.sample import gumbel, philox, sample
from steps import sampling

F, I = np.float32, np.int32  # noqa: E741 - the two kinds of column


def draw(logits: Any, vocab: int | None = None, **columns: Any) -> Sampled:
    """One row for each value of the longest column; the same logits in each."""
    rows = max([len(v) for k, v in columns.items() if k in ROW] or [1])
    a = np.tile(np.asarray(logits, F), (rows, 1))
    ints = ("top_k", "position", "choice", "target", "logprobs", "mask_rows")
    for name, value in columns.items():
        if name in ROW:
            columns[name] = np.asarray(value, np.uint64 if name == "seed" else I if name in ints else F)
    return sample(a, sampling(rows, a.shape[1], **columns), vocab or a.shape[1])


ROW = {"temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seed", "position", "choice"}
ROW |= {"target", "logprobs", "mask_rows"}
MANY = np.arange(4000)


def hot(**columns: Any) -> dict[str, Any]:
    """4000 draws at temperature 1 at different positions."""
    one = {name: np.full(len(MANY), value) for name, value in {"temperature": 1, "seed": 11, **columns}.items()}
    return {**one, "position": MANY}


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of the authors' Random123 library
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: tuple[int, int], words: list[int]) -> None:
    assert philox(np.asarray(counter, np.uint32)[:, None], key)[:, 0].tolist() == words


def test_noise_of_an_id_does_not_depend_on_the_vocabulary() -> None:
    assert (gumbel(10, 1 << 40, 3, 1) == gumbel(103, 1 << 40, 3, 1)[:10]).all()
    assert len({gumbel(1, s, p, c)[0] for s in (0, 1 << 32) for p in (0, 1) for c in (0, 1)}) == 8


def test_noise_is_gumbel_noise_and_that_of_one_id_tells_nothing_of_another() -> None:
    """exp(-noise) of 8000 blocks: exponential (its quantiles, mean and variance), and within blocks uncorrelated."""
    e = np.exp(-gumbel(64 * 8000, 5, 6, 7)).reshape(8000, 64)
    quantiles = np.quantile(e, [0.01, 0.05, 0.5, 0.95, 0.999])
    np.testing.assert_allclose(quantiles, -np.log1p(-np.array([0.01, 0.05, 0.5, 0.95, 0.999])), rtol=0.05)
    assert abs(e.mean() - 1) < 0.01 and abs(e.var() - 1) < 0.03
    together = np.corrcoef(e.T)[~np.eye(64, dtype=bool)]
    assert np.abs(together).max() < 0.06 and abs(together.mean()) < 0.002
    low = (e < np.log(2)).sum(axis=1)  # of 64 fair coins
    assert abs(low.var() - 16) < 1.5 and len(set(e.argmin(axis=1))) == 64


@pytest.mark.slow
def test_frequencies_are_those_of_the_softmax() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    share = np.bincount(draw(logits, **hot()).tokens, minlength=4) / len(MANY)
    assert np.abs(share - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    sharp = np.bincount(draw(logits, **hot(temperature=0.5)).tokens, minlength=4) / len(MANY)
    squares = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    assert np.abs(sharp - squares / squares.sum()).max() < 0.03


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),  # the one that crosses is kept
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.6}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.3, "top_p": 0.45}, {0}),  # top_p is a share of what min_p left: 0.4 / 0.8 reaches it alone
        ({"top_k": 3, "top_p": 0.45}, {0}),
        ({"top_p": 0.45}, {0, 1}),
    ],
)
def test_cuts(columns: dict[str, float], kept: set[int]) -> None:
    logits = np.log([0.4, 0.25, 0.15, 0.1, 0.1])
    assert set(draw(logits, **hot(**columns)).tokens.tolist()) == kept


def test_ties() -> None:
    logits = [1.0, 2.0, 2.0, 2.0]
    assert draw(logits, temperature=[0]).tokens.tolist() == [1]
    assert set(draw(logits, **hot(top_k=2)).tokens.tolist()) == {1, 2}
    out = draw(logits, target=[0, 1, 2, 3], logprobs=[3, 0, 1, 2])
    assert out.rank.tolist() == [4, 1, 2, 3]
    assert out.top_ids.tolist() == [[1, 2, 3], [-1, -1, -1], [1, -1, -1], [1, 2, -1]]


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0])
    raw = logits - math.log(np.exp(logits).sum())
    lists = {"bias_indptr": np.array([0, 1], I), "bias_ids": np.array([0], I), "bias_values": np.array([50.0], F)}
    out = draw(logits, logprobs=[2], temperature=[0.3], **lists)
    assert out.tokens.tolist() == [0] and out.rank.tolist() == [4]
    assert out.logprob[0] == pytest.approx(raw[0], abs=1e-6)
    assert out.top_ids.tolist() == [[3, 2]]
    assert out.top_logprobs[0].tolist() == pytest.approx([raw[3], raw[2]], abs=1e-6)


def test_penalties() -> None:
    lists = {"penalty_indptr": np.array([0, 3], I), "penalty_ids": np.array([0, 1, 2], I)}
    lists["penalty_counts"] = np.array([2, 0, 1], I)

    def best(logits: list[float], **columns: Any) -> int:
        return int(draw(logits, **columns, **lists).tokens[0])

    assert best([4.0, 1.0, 1.0, 2.1], repetition=[2]) == 3  # 2.0
    assert best([-1.0, -9, -9, -1.5], repetition=[2]) == 3  # -2.0: negative ones are multiplied
    assert best([4.0, 1.0, 1.0, 2.1], frequency=[1]) == 3  # 4 - 2 * 1
    assert best([4.0, 1.0, 1.0, 3.1], presence=[1]) == 3
    assert best([1.0, 4.0, 1.0, 3.9], presence=[1], frequency=[1]) == 1  # in the prompt only
    assert best([1.0, 4.0, 1.0, 3.9], repetition=[1.1]) == 3


def test_masks_and_bias() -> None:
    logits = np.arange(40.0)
    masks = np.array([[0b1001, 0b10], [0, 0]], np.uint32).view(I)
    out = draw(logits, mask_rows=[0, 1, -1], masks=masks)
    assert out.tokens.tolist() == [33, 0, 39]
    assert out.status.tolist() == [0, 2, 0]
    forbidden = {"bias_indptr": np.array([0, 1, 1], I), "bias_ids": np.array([39], I)}
    out = draw(logits, temperature=[0, 0], **forbidden, bias_values=np.array([-np.inf], F))
    assert out.tokens.tolist() == [38, 39]
    assert draw(logits, temperature=[0, 0], **forbidden, bias_values=np.array([-2], F)).tokens.tolist() == [38, 39]


def test_status() -> None:
    rows = np.array([[0, np.nan], [0, np.inf], [0, -np.inf], [-np.inf, -np.inf]], F)
    out = sample(rows, sampling(4, 2), 2)
    assert out.status.tolist() == [1, 1, 0, 2]
    assert sample(np.array([[1, 2, np.nan]], F), sampling(1, 3), 2).tokens.tolist() == [1]  # padding is not looked at


def test_no_report_when_none_is_asked() -> None:
    out = draw([0.0, 1.0], logprobs=[-1])
    assert (out.logprob[0], out.rank[0], out.top_ids.shape) == (0, 0, (1, 0))


def test_no_rows() -> None:
    assert sample(np.zeros((0, 5), F), sampling(0, 5), 5).tokens.shape == (0,)


@given(
    logits=st.lists(st.floats(-20, 20, width=32) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=40),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 1 << 20),
    top_k=st.integers(0, 45),
    top_p=st.floats(0, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
)
@settings(max_examples=300, deadline=None)
def test_a_token_is_a_function_of_its_own_row(logits: list[float], seed: int, position: int, **cuts: Any) -> None:
    """Alone or beside other rows, the same; among those that each cut alone keeps; the best one is always possible."""
    one = {name: [value] for name, value in {"seed": seed, "position": position, **cuts}.items()}
    alone = draw(logits, **one).tokens[0]
    beside = draw(logits, **{k: [1, *v, 2] for k, v in one.items()}).tokens[1]
    assert alone == beside
    order = sorted(range(len(logits)), key=lambda i: (-np.float32(logits[i]), i))
    if cuts["top_k"] > 0:
        assert alone in order[: cuts["top_k"]]
    if cuts["temperature"] == 0:
        assert alone == order[0]
