"""A smoothed model is the same model, whatever is made alike; what it reads is more even than before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from headrace.base.errors import SettingError
from headrace.quant.encode import CODINGS
from headrace.quant.recipes import Rule
from headrace.runtime import quantize
from headrace.runtime.load import prepare
from headrace.runtime.quantize import QuantizeSettings, quantize_model
from headrace.runtime.smooth import Smoothing, makers
from steps import World
from tiny_model import FLOATS, write_tiny

IN_FLOATS = (Rule("*", dict.fromkeys(CODINGS, "f32")),)
# What a checkpoint has of linears behind norms and behind gated linears, in two layers; experts' are left as they are.
SMOOTHED = {"llama": ("qkv", "gate_up", "down", "head"), "llama-tied-llama3-rope": ("qkv", "gate_up", "down")}
SMOOTHED |= {
    "gemma3": ("qkv", "gate_up", "down"),
    "mixtral": ("qkv", "head"),
    "phi3": ("qkv", "gate_up", "down", "head"),
}


WHOLE = [{0: 48, 1: 48}]


def written(folder: Path, path: Path, smoothing: Smoothing) -> Path:
    prepared = prepare(folder)
    made = quantize.plan(prepared, "q8_0", IN_FLOATS)
    quantize.write(
        made, prepared, path, lambda format, weight: pytest.fail("nothing is quantised"), smoothing=smoothing
    )
    return path


def logits_of(path: Path) -> np.ndarray:
    ids = np.random.default_rng(2).integers(3, 258, (2, 48)).tolist()
    return np.stack(World(tiny.load(path).executor, ids, 8).feed(WHOLE))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_architecture_says_the_same_bit_for_bit(kind: str, tmp_path: Path) -> None:
    folder = tiny.with_tokenizer(tmp_path / kind, kind)
    prepared, rng = prepare(folder), np.random.default_rng(0)
    found = makers(prepared.program, prepared.model)
    assert {name.rpartition(".")[2] for name in found} == set(SMOOTHED.get(kind, {n.rpartition(".")[2] for n in found}))
    assert any(name.endswith("qkv") for name in found)
    widths = {op.weights[0]: op.inputs[0].width for op in prepared.program.ops if op.weights}
    moments = {name: (10 ** rng.uniform(-6, 6, widths[name])).astype(np.float32) for name in found}
    same = written(folder, tmp_path / "same.gguf", Smoothing(found, moments.get, 0))
    other = written(folder, tmp_path / "other.gguf", Smoothing(found, moments.get, 1))
    np.testing.assert_array_equal(logits_of(other), logits_of(same))
    changed = [
        name
        for name, tensor in prepare(other).checkpoint.tensors.items()
        if tensor.data.tobytes() != prepare(same).checkpoint.tensors[name].data.tobytes()
    ]
    assert len(changed) > len(set(found.values()))


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=64),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.booleans(),
)
def test_factors_are_powers_of_two_that_make_alike(squares: list[float], strength: float, full: bool) -> None:
    moments = np.array(squares, np.float32)
    smoothing = Smoothing({"down": "up"}, {"down": np.diag(moments) if full else moments}.get, strength)
    columns, rows = smoothing.columns("down"), smoothing.rows("up", len(moments) + 3)
    if not moments.any():
        assert columns is rows is None
        return
    assert columns is not None and rows is not None
    mantissas, exponents = np.frexp(columns)
    assert (mantissas == 0.5).all() and (np.abs(exponents - 1) <= 6).all()
    assert (rows[:3] == 1).all() and (rows[3:] * columns == 1).all()
    order = np.argsort(moments, kind="stable")
    assert (np.diff(columns[order]) >= 0).all()
    assert smoothing.columns("up") is None and smoothing.rows("down", 5) is None


def test_large_channels_cost_eight_bits_less(tmp_path: Path) -> None:
    """Three channels of each norm fifty times as large, as in real models, and their weights that much smaller."""

    def outliers(name: str, values: np.ndarray) -> None:
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight", "ffn_up.weight")):
            values[:, [3, 77, 200]] /= 50

    source = write_tiny(
        tmp_path / "source.gguf",
        FLOATS,
        edit=outliers,
        norm=lambda w: np.where(np.isin(np.arange(len(w)), [3, 77, 200]), 50 * w, w),
    )
    whole, errors = logits_of(source), {}
    for smoothing in (0.0, 0.5, None):
        path = tmp_path / f"{smoothing}.gguf"
        quantize_model(prepare(source), path, QuantizeSettings(smoothing=smoothing, calibration_tokens=512))
        errors[smoothing] = np.abs(logits_of(path) - whole).mean()
    assert errors[None] == errors[0.5] < 0.6 * errors[0.0]


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, float("nan")])
def test_strengths_that_cannot_be(smoothing: float) -> None:
    with pytest.raises(SettingError, match="smoothing must be"):
        QuantizeSettings(smoothing=smoothing)
