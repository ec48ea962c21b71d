"""What the conformance suite can't see from outside: rounding of the cache, taps, zeroed pages, one bad sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import tiny
from headrace.backends.reference import ReferenceBackend
from headrace.program.meaning import MEANING, round_to_bf16
from headrace.program.recorder import Recorder
from steps import World


def test_there_is_a_meaning_for_each_op_of_the_vocabulary() -> None:
    not_ops = {"inputs", "program"}
    assert set(MEANING) == {name for name in vars(Recorder) if not name.startswith("_")} - not_ops


@given(st.floats(width=32))
def test_round_to_bf16(x: float) -> None:
    got = float(round_to_bf16(np.array([x], np.float32))[0])
    if np.isnan(x):
        assert np.isnan(got)
        return
    bits = int(np.float32(x).view(np.uint32))
    down, up = (np.uint32(b & 0xFFFFFFFF).view(np.float32) for b in (bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000))
    if np.isinf(x) or bits & 0xFFFF == 0:
        assert got == x
        return
    nearer = {0x8000: (down, up)}.get(bits & 0xFFFF, (down,) if bits & 0xFFFF < 0x8000 else (up,))
    assert got in nearer
    assert (int(np.float32(got).view(np.uint32)) >> 16) % 2 == 0 or len(nearer) == 1


def test_a_bf16_cache_is_close_and_not_equal() -> None:
    ids, want = tiny.expected("llama")
    world = World(tiny.load(tiny.TINY / "llama", ReferenceBackend("bf16")).executor, ids, 8)
    error = np.abs(np.stack(world.feed([{0: 48, 1: 48}])) - want).max()
    assert 1e-3 < error < 0.1


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
