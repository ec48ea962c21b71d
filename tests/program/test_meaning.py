"""What the conformance suite can't see from outside: rounding of the cache, taps, zeroed pages, one bad sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import tiny
from headrace.backends.reference import ReferenceBackend
from headrace.program.meaning import MEANING, int8_scales, round_to_bf16, round_to_f16, round_to_int8
from headrace.program.recorder import Recorder
from steps import World


def test_there_is_a_meaning_for_each_op_of_the_vocabulary() -> None:
    not_ops = {"inputs", "program"}
    assert set(MEANING) == {name for name in vars(Recorder) if not name.startswith("_")} - not_ops


@given(arrays(np.float32, (3, 8), elements=st.floats(-8e6, 8e6, width=32)))
def test_int8_keeps_each_vector_within_half_a_step_of_its_own_scale(x: np.ndarray) -> None:
    scales, kept = int8_scales(x), round_to_int8(x)
    assert (np.abs(x) <= 127 * scales * (1 + 1e-6) + 1e-40).all(), "a scale too small"
    assert (np.abs(kept - x) <= scales * 0.5001 + 1e-40).all()
    assert (scales == scales.astype(np.float16)).all()
    assert not kept[(x == 0).all(axis=-1)].any()
    for i in range(3):
        assert np.array_equal(round_to_int8(x[i : i + 1]), kept[i : i + 1]), "a vector depends on others"


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e7])
def test_what_int8_cannot_keep_is_no_number_any_more(odd: float) -> None:
    with np.errstate(all="ignore"):
        kept = round_to_int8(np.array([[odd, 1], [2, 1]], np.float32))
    assert np.isnan(kept[0]).all() and np.isfinite(kept[1]).all()


@pytest.mark.parametrize(
    ("kv", "least", "most"), [("float16", 1e-5, 0.02), ("bfloat16", 1e-3, 0.2), ("int8", 1e-3, 0.3)]
)
def test_a_rounded_cache_is_close_and_not_equal(kv: str, least: float, most: float) -> None:
    ids, want = tiny.expected("llama")
    world = World(tiny.load(tiny.TINY / "llama", ReferenceBackend(kv)).executor, ids, 8)
    assert least < np.abs(np.stack(world.feed([{0: 48, 1: 48}])) - want).max() < most


def test_float16_overflows_to_infinity() -> None:
    assert np.array_equal(round_to_f16(np.array([65504, 1e6], np.float32)), [65504, np.inf])


def test_bfloat16_rounds_to_the_nearest() -> None:
    exact = np.array([1, -1.5, 65504, 1e30, 0, np.inf], np.float32)
    kept = round_to_bf16(exact)
    assert (np.abs(kept[:4] - exact[:4]) <= np.abs(exact[:4]) / 256).all()
    assert np.array_equal(kept[[0, 1, 4, 5]], exact[[0, 1, 4, 5]])
    assert np.array_equal(round_to_bf16(np.float32([1 + 2**-8, 1 + 3 * 2**-8])), [1, 1 + 2**-6]), "ties go to even"
    assert np.isnan(round_to_bf16(np.float32([np.nan]))).all()


def test_keys_less_a_common_vector_give_the_same_answers() -> None:
    """Qwen2's keys have a bias: float32 ones, less it, attend as before; int8 ones come closer than with it."""
    ids, want = tiny.expected("qwen2")
    found = {}
    for less in (True, False):
        executor = tiny.load(tiny.TINY / "qwen2", ReferenceBackend("int8")).executor
        layers = executor._cache  # type: ignore[attr-defined]
        assert all(np.any(layer.offset) for layer in layers.values())
        for n, layer in layers.items():
            layers[n] = replace(layer, format="float32", offset=30 * layer.offset if less else 0.0)
        found[less] = np.stack(World(executor, ids, 8).feed([{0: 48, 1: 48}]))
    np.testing.assert_allclose(found[True], found[False], atol=1e-3)
    np.testing.assert_allclose(found[True], want, atol=0.01)


def test_values_can_be_tapped_by_name() -> None:
    ids, _ = tiny.expected("llama")
    model = tiny.load(tiny.TINY / "llama")
    names = [v.name for op in model.program.ops for v in op.outputs]
    assert len(set(names)) == len(names)
    out = World(model.executor, ids, 8).step({0: 5}, taps=tuple(names))
    assert set(out.taps) == set(names)
    assert out.taps[names[0]].shape == (5, 64)
    assert out.logits is not None and (out.taps[model.program.logits.name] == out.logits).all()


def test_one_sequence_that_is_not_finite_leaves_the_other_alone() -> None:
    ids, _ = tiny.expected("llama")
    model = tiny.load(tiny.TINY / "llama")
    model.executor._weights["embed"][ids[0][3]] = np.nan  # type: ignore[attr-defined]
    world = World(model.executor, [ids[0][:6], [t for t in ids[1] if t != ids[0][3]]], 8)
    out = world.step({0: 6, 1: 20})
    assert out.status.tolist() == [0, 0, 0, 1, 1, 1] + [0] * 20
