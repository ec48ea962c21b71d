"""The native sampler keeps to `headrace.program.sample`, with the same bits from every instruction set."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.program import sample as reference
from headrace.program.step import Sampled, Sampling

F64 = NDArray[np.float64]
ISAS = ("scalar", "avx2", "avx512")
CLOSE = 1e-5


def available(isa: str) -> bool:
    try:
        native(sampling(1), np.zeros((1, 4), np.float32), isa=isa)
    except ValueError:
        return False
    return True


def sampling(rows: int, **given: Any) -> Sampling:
    """Parameters for `rows` rows; each given one is a number for all rows or an array."""
    numbers = {
        "temperature": (np.float32, 1), "top_k": (np.int32, 0), "top_p": (np.float32, 1), "min_p": (np.float32, 0),
        "repetition": (np.float32, 1), "presence": (np.float32, 0), "frequency": (np.float32, 0),
        "seed": (np.uint64, 7), "position": (np.int32, 3), "choice": (np.int32, 0),
        "target": (np.int32, -1), "logprobs": (np.int32, -1), "mask_rows": (np.int32, -1),
    }  # fmt: skip
    lists: dict[str, Any] = {
        "bias_indptr": np.zeros(rows + 1, np.int32), "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32), "penalty_indptr": np.zeros(rows + 1, np.int32),
        "penalty_ids": np.zeros(0, np.int32), "penalty_counts": np.zeros(0, np.int32),
        "masks": np.zeros((0, 0), np.int32),
    }  # fmt: skip
    columns = {
        name: np.ascontiguousarray(np.broadcast_to(np.asarray(given.pop(name, default), kind), rows))
        for name, (kind, default) in numbers.items()
    }
    return Sampling(**columns, **(lists | given))


def native(at: Sampling, logits: NDArray[np.float32], vocab: int | None = None, isa: str = "") -> Sampled:
    columns = {f.name: getattr(at, f.name) for f in fields(at)}
    return Sampled(*_native.sample(isa, logits, logits.shape[1] if vocab is None else vocab, **columns))


def one_list(ids: list[int], values: list[float], kind: type = np.float32) -> tuple[Any, Any, Any]:
    return np.array([0, len(ids)], np.int32), np.array(ids, np.int32), np.array(values, kind)


def mask_of(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """int32 [1, ceil(vocab / 32)] from bool [vocab]."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<i4").reshape(1, -1).astype(np.int32)


def assert_same_bits(a: Sampled, b: Sampled) -> None:
    for name in ("tokens", "logprob", "rank", "top_ids", "top_logprobs", "status"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name


# ---- against the reference ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row to sample: its logits, its parameters."""

    logits: NDArray[np.float32]
    at: Sampling


VOCABS = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 1000, 4096, 5003]))
SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def raw_logits(draw: st.DrawFn) -> NDArray[np.float32]:
    """Smooth, coarse (many equal), or partly -inf logits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocab = draw(VOCABS)
    x = rng.normal(0, draw(st.sampled_from([0.1, 3.0, 30.0])), vocab)
    if draw(st.booleans()):
        x = np.round(x)
    if draw(st.integers(0, 3)) == 0:
        x[rng.random(vocab) < 0.5] = -np.inf
        x[rng.integers(vocab)] = 1.0
    return x.astype(np.float32)


@st.composite
def row_lists(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    """Bias, penalties and mask of one row; each may be absent."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out: dict[str, Any] = {}
    if draw(st.booleans()):
        ids = [int(i) for i in rng.integers(0, vocab, draw(st.integers(0, 12)))]
        values = [float(np.float32(v)) for v in rng.choice([-np.inf, -100.0, -1.5, 0.25, 5.0], len(ids))]
        out["bias_indptr"], out["bias_ids"], out["bias_values"] = one_list(ids, values)
    if draw(st.booleans()):
        ids = [int(i) for i in rng.permutation(vocab)[: draw(st.integers(0, 200))]]
        counts = [int(c) for c in rng.integers(0, 4, len(ids))]
        out["penalty_indptr"], out["penalty_ids"], out["penalty_counts"] = one_list(ids, counts, np.int32)
    if draw(st.booleans()):
        out["masks"] = mask_of(rng.random(vocab) < draw(st.sampled_from([0.0, 0.02, 0.9, 1.0])))
        out["mask_rows"] = 0
    return out


@st.composite
def rows(draw: st.DrawFn) -> Row:
    logits = draw(raw_logits())
    vocab = len(logits)
    return Row(
        logits,
        sampling(
            1,
            temperature=draw(st.sampled_from([0.0, 1e-30, 1e-6, 0.1, 0.7, 1.0, 2.0, 50.0])),
            top_k=draw(st.sampled_from([0, 0, 1, 2, 40, vocab - 1, vocab, vocab + 9])),
            top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01, 1e-30])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
            repetition=draw(st.sampled_from([1.0, 1.3, 0.5])),
            presence=draw(st.sampled_from([0.0, 0.75, -0.5])),
            frequency=draw(st.sampled_from([0.0, 0.25])),
            seed=draw(SEEDS),
            position=draw(st.integers(0, 2**31 - 1)),
            choice=draw(st.integers(0, 127)),
            target=draw(st.sampled_from([-1, -1, -1, vocab // 2])),
            logprobs=draw(st.sampled_from([-1, 0, 3, 20, vocab + 2])),
            **draw(row_lists(vocab)),
        ),
    )


def final_scores(row: Row) -> F64:
    """What the reference takes the arg-max of, before filters: adjusted logits, with temperature and noise if drawn."""
    at = row.at
    adjusted = reference.adjust(row.logits.astype(np.float64), reference._Row(at, 0))
    if at.temperature[0] < reference.GREEDY:
        return adjusted
    key = int(at.seed[0]), int(at.position[0]), int(at.choice[0])
    return adjusted / float(at.temperature[0]) + reference.gumbel(len(adjusted), *key)


def tolerance(row: Row) -> float:
    """How close two scores may be for float32 to choose the other: changed logits are rounded once or twice."""
    at = row.at
    finite = np.abs(row.logits[np.isfinite(row.logits)]).max(initial=1.0) + 100
    changed = len(at.bias_ids) + len(at.penalty_ids) > 0
    scale = 1.0 if at.temperature[0] < reference.GREEDY else 1 / min(1.0, float(at.temperature[0]))
    return CLOSE + (float(finite) * 2.0**-22 * scale if changed else 0.0)


def at_the_edge_of_top_p(row: Row, token: int) -> bool:
    """Whether the nucleus ends so near to the token that float32 sums may decide otherwise."""
    at = row.at
    z = reference.adjust(row.logits.astype(np.float64), reference._Row(at, 0)) / max(float(at.temperature[0]), 1e-5)
    z = reference._cut_top_k(reference._cut_min_p(z, float(at.min_p[0])), int(at.top_k[0]))
    mass = np.cumsum(np.sort(np.exp(z - z.max()))[::-1])
    return bool((np.abs(mass / mass[-1] - at.top_p[0]) < CLOSE).any())


@given(rows())
@settings(max_examples=400, deadline=None)
def test_same_as_the_reference(row: Row) -> None:
    got, want = native(row.at, row.logits[None]), reference.sample(row.logits[None], row.at, len(row.logits))
    assert got.status[0] == want.status[0]
    if got.tokens[0] != want.tokens[0]:
        scores = final_scores(row)
        near = abs(scores[got.tokens[0]] - scores[want.tokens[0]]) <= tolerance(row)
        assert near or at_the_edge_of_top_p(row, int(want.tokens[0]))
        return
    np.testing.assert_array_equal(got.rank, want.rank)
    np.testing.assert_allclose(got.logprob, want.logprob, atol=CLOSE, rtol=1e-6)
    np.testing.assert_array_equal(got.top_ids, want.top_ids)
    used = got.top_ids >= 0
    np.testing.assert_allclose(got.top_logprobs[used], want.top_logprobs[used], atol=CLOSE, rtol=1e-6)
    assert (got.top_logprobs[~used] == -np.inf).all()


@pytest.mark.parametrize("isa", ISAS)
@given(row=rows())
@settings(max_examples=60, deadline=None)
def test_every_instruction_set_gives_the_same_bits(isa: str, row: Row) -> None:
    if not available(isa):
        pytest.skip(f"this machine has no {isa}")
    assert_same_bits(native(row.at, row.logits[None], isa=isa), native(row.at, row.logits[None], isa="scalar"))


def test_a_large_vocabulary_agrees_over_many_rows() -> None:
    """Skipping blocks that cannot win never changes the winner; noise is accurate in its far tail too."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (60, 30_001)).astype(np.float32)
    for at in (sampling(60, position=np.arange(60)), sampling(60, temperature=0.3, top_p=0.9, seed=2**63 + 5)):
        np.testing.assert_array_equal(native(at, logits).tokens, reference.sample(logits, at, 30_001).tokens)


def test_a_long_flat_tail_wins_as_often_as_it_should() -> None:
    """Tokens far below the best still win together: no block is skipped that noise could lift."""
    logits = np.zeros((60, 30_001), np.float32)
    logits[:, 5] = 9.5
    at = sampling(60, position=np.arange(60))
    got = native(at, logits).tokens
    np.testing.assert_array_equal(got, reference.sample(logits, at, 30_001).tokens)
    assert 20 < (got != 5).sum() < 59


def test_padding_past_the_vocabulary_never_counts() -> None:
    logits = np.zeros((1, 96), np.float32)
    logits[0, 70:] = np.nan
    got = native(sampling(1, logprobs=0, target=69), logits, vocab=70)
    assert got.status[0] == 0 and got.rank[0] == 70
    assert got.logprob[0] == pytest.approx(-np.log(70), abs=1e-6)


# ---- one row never depends on another -----------------------------------------------------------------------------


@given(st.lists(rows(), min_size=2, max_size=2), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_buffers_carry_nothing_from_row_to_row(pair: list[Row], again: int) -> None:
    """A row after another, in one call and so with one set of buffers, gives the bits that it gives alone."""
    first, second = pair
    vocab = min(len(first.logits), len(second.logits))
    logits = np.stack([first.logits[:vocab], second.logits[:vocab]])
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position", "logprobs")
    joined = {n: np.concatenate([getattr(first.at, n), getattr(second.at, n)]) for n in names}
    bias = {
        "bias_indptr": np.array([0, 1, 1], np.int32),
        "bias_ids": np.array([vocab - 1], np.int32),
        "bias_values": np.array([9.0], np.float32),
    }
    joined["logprobs"][:] = joined["logprobs"].max()
    both = native(sampling(2, **joined, **bias), logits)
    alone = native(sampling(1, **{n: v[1:] for n, v in joined.items()}), logits[1:])
    for name in ("tokens", "logprob", "rank", "top_ids", "top_logprobs", "status"):
        assert getattr(both, name)[1:].tobytes() == getattr(alone, name).tobytes(), name


def test_logits_stay_as_they_were() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (1, 300)).astype(np.float32)
    logits.setflags(write=False)
    before = logits.copy()
    ptr, ids, values = one_list([3, 299], [5.0, -np.inf])
    allowed = np.arange(300) % 2 == 0
    native(sampling(1, bias_indptr=ptr, bias_ids=ids, bias_values=values, mask_rows=0, masks=mask_of(allowed)), logits)
    np.testing.assert_array_equal(logits, before)


def test_seed_position_and_choice_each_change_the_noise() -> None:
    logits = np.zeros((64, 5000), np.float32)
    lane = np.arange(64)
    for key in (
        {"seed": lane},
        {"seed": lane.astype(np.uint64) << np.uint64(32)},
        {"position": lane},
        {"choice": lane},
    ):
        assert len(set(native(sampling(64, **key), logits).tokens)) > 55, key
    assert len(set(native(sampling(64), logits).tokens)) == 1


# ---- distribution -------------------------------------------------------------------------------------------------


def kept_share(logits: NDArray[np.float32], top_k: int, top_p: float) -> F64:
    z = logits.astype(np.float64)
    z = reference._cut_top_p(reference._cut_top_k(z, top_k), top_p)
    return np.asarray(np.exp(reference.log_softmax(z)), np.float64)


@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p"),
    [(5, 0, 1.0), (50, 0, 1.0), (50, 10, 1.0), (50, 0, 0.8), (20, 12, 0.7), (300, 0, 1.0), (300, 90, 0.9)],
)
def test_tokens_are_drawn_as_often_as_they_should(vocab: int, top_k: int, top_p: float) -> None:
    """Chi-square of 20000 draws against the softmax of what is kept; no fair generator comes near the limit."""
    n = 20_000
    logits = np.random.default_rng(vocab).normal(0, 1, vocab).astype(np.float32)
    share = kept_share(logits, top_k, top_p)
    at = sampling(n, position=np.arange(n), seed=11, top_k=top_k, top_p=top_p)
    counts = np.bincount(native(at, np.tile(logits, (n, 1))).tokens, minlength=vocab)
    kept = share > 0
    assert (counts[~kept] == 0).all()
    chi = float(((counts[kept] - n * share[kept]) ** 2 / (n * share[kept])).sum())
    freedom = int(kept.sum()) - 1
    assert chi < freedom + 5 * np.sqrt(2 * freedom) + 15


# ---- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 9e-6])
def test_tiny_temperatures_are_greedy_and_ties_go_to_the_lowest_id(temperature: float) -> None:
    logits = np.zeros((1, 200), np.float32)
    logits[0, [130, 150]] = 2.0
    assert native(sampling(1, temperature=temperature, top_k=3), logits).tokens[0] == 130


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [1, 3, 15, 16, 63, 64, 65, 200])
def test_the_only_possible_token_is_chosen(vocab: int, temperature: float) -> None:
    logits = np.full((1, vocab), -np.inf, np.float32)
    logits[0, vocab - 1] = -1e30
    got = native(sampling(1, temperature=temperature, top_p=0.5, logprobs=2), logits)
    assert (got.tokens[0], got.status[0], got.logprob[0], got.rank[0]) == (vocab - 1, 0, 0.0, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 63, 64, 149])
def test_logits_that_are_not_finite_are_reported(bad: float, where: int) -> None:
    logits = np.zeros((2, 150), np.float32)
    logits[0, where] = bad
    got = native(sampling(2, logprobs=1), logits)
    assert got.status.tolist() == [1, 0]
    assert (got.tokens[0], got.top_ids[0, 0], got.top_logprobs[0, 0]) == (0, -1, -np.inf)
    assert native(sampling(2, target=5), logits).status[0] == 1


def test_nothing_allowed_is_reported() -> None:
    logits = np.zeros((1, 70), np.float32)
    masked = sampling(1, mask_rows=0, masks=mask_of(np.zeros(70, np.bool_)))
    ptr, ids, values = one_list(list(range(70)), [-np.inf] * 70)
    biased = sampling(1, bias_indptr=ptr, bias_ids=ids, bias_values=values)
    for at in (masked, biased):
        assert native(at, logits).status[0] == 2
    assert native(sampling(1), np.full((1, 70), -np.inf, np.float32)).status[0] == 2


def test_a_bias_cannot_lift_what_the_mask_forbids() -> None:
    ptr, ids, values = one_list([5, 100], [100.0, 100.0])
    allowed = np.zeros(200, np.bool_)
    allowed[7] = True
    at = sampling(1, bias_indptr=ptr, bias_ids=ids, bias_values=values, mask_rows=0, masks=mask_of(allowed))
    assert native(at, np.zeros((1, 200), np.float32)).tokens[0] == 7


def test_repetition_divides_what_is_positive_and_multiplies_the_rest() -> None:
    logits = np.array([[4.0, 3.0, -1.0, -1.5]], np.float32)
    ptr, ids, counts = one_list([0, 2], [0, 0], np.int32)
    lists: dict[str, Any] = {"penalty_indptr": ptr, "penalty_ids": ids, "penalty_counts": counts}
    allowed = np.array([False, False, True, True])
    assert native(sampling(1, temperature=0, repetition=2, **lists), logits).tokens[0] == 1
    masked = sampling(1, temperature=0, repetition=2, mask_rows=0, masks=mask_of(allowed), **lists)
    assert native(masked, logits).tokens[0] == 3


# ---- mistakes of a caller -----------------------------------------------------------------------------------------


def biased(token: int, value: float = 1.0) -> dict[str, Any]:
    return dict(zip(("bias_indptr", "bias_ids", "bias_values"), one_list([token], [value]), strict=True))


def penalised(token: int, count: int = 1) -> dict[str, Any]:
    values = one_list([token], [count], np.int32)
    return dict(zip(("penalty_indptr", "penalty_ids", "penalty_counts"), values, strict=True))


WRONG: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"temperature": np.nan},
    {"top_k": -1},
    {"top_p": 1.5},
    {"top_p": np.nan},
    {"min_p": 2.0},
    {"repetition": 0.0},
    {"presence": np.inf},
    {"target": 8},
    {"target": -2},
    {"logprobs": -2},
    {"position": -1},
    biased(8),
    biased(0, np.inf),
    biased(0, np.nan),
    {"bias_ids": np.array([1], np.int32)},
    penalised(-1),
    penalised(0, -1),
    {"penalty_indptr": np.array([0, -1], np.int32)},
    {"mask_rows": 0},
    {"mask_rows": 0, "masks": np.zeros((1, 2), np.int32)},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        native(sampling(1, **wrong), np.zeros((1, 8), np.float32))


def test_arrays_of_another_length_type_or_layout_are_refused() -> None:
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="one element for each row"):
        native(sampling(3), logits)
    with pytest.raises(ValueError, match="vocab"):
        native(sampling(2), logits, vocab=9)
    for other in (logits.astype(np.float64), np.zeros((8, 2), np.float32).T, logits[0]):
        with pytest.raises(TypeError):
            _native.sample("", other, 2, **{f.name: getattr(sampling(2), f.name) for f in fields(Sampling)})
    with pytest.raises(ValueError, match="instruction set"):
        native(sampling(2), logits, isa="mmx")
