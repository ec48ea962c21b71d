"""Where model, weights and back end meet: what is missing, left over, misshapen or not finite is named; tied heads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import tiny
from headrace.backends import Limits
from headrace.backends.reference import ReferenceBackend
from headrace.base.errors import BadModelFile
from headrace.runtime.load import load_model, neox_order, prepare
from steps import World

Change = Callable[[tiny.Arrays], Any]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    log = logging.getLogger("headrace")
    log.addHandler(caplog.handler)
    yield caplog
    log.removeHandler(caplog.handler)


def folder(tmp_path: Path, kind: str, change: Change = lambda _: None, **settings: Any) -> Path:
    tensors = tiny.arrays(kind)
    change(tensors)
    return tiny.write_folder(tmp_path / kind, {**tiny.config(kind), **settings}, tensors)


def logits(path: Path, kind: str) -> np.ndarray:
    ids, _ = tiny.expected(kind)
    return np.stack(World(tiny.load(path).executor, ids, tiny.LIMITS.pages).feed([{0: 48, 1: 48}]))


DOWN = "model.layers.1.mlp.down_proj.weight"
BEYOND = "model.layers.7.mlp.down_proj.weight"
Q_NORM = "model.layers.0.self_attn.q_norm.weight"
K_BIAS, O_BIAS = "model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.o_proj.bias"
FIFTH_EXPERT = "model.layers.0.block_sparse_moe.experts.4.w1.weight"


def put(name: str, value: np.ndarray) -> Change:
    return lambda tensors: tensors.__setitem__(name, value.astype(np.float32))


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


WRONG: list[tuple[str, Change, str, str]] = [
    ("llama", drop(DOWN), DOWN, r"missing; expected shape \(64, 128\)"),
    ("llama", put(DOWN, np.ones((64, 96))), DOWN, r"expected shape \(64, 128\), found \(64, 96\)"),
    ("llama", put(DOWN, np.ones((128, 64))), DOWN, r"found \(128, 64\)"),
    ("llama", put("model.norm.weight", np.ones(63)), "model.norm.weight", r"expected shape \(64,\)"),
    ("llama", put(BEYOND, np.ones((64, 128))), BEYOND, "no use"),
    ("llama", put(Q_NORM, np.ones(32)), Q_NORM, "no use"),
    ("llama", put("lm_head.bias", np.ones(320)), "lm_head.bias", "no use"),
    ("llama", drop("lm_head.weight"), "lm_head.weight", "missing"),
    ("qwen2", drop(K_BIAS), K_BIAS, "missing"),
    ("qwen2", put(O_BIAS, np.ones(64)), O_BIAS, "no use"),
    ("mixtral", put(FIFTH_EXPERT, np.ones((128, 64))), FIFTH_EXPERT, "no use"),
]


@pytest.mark.parametrize(("kind", "change", "tensor", "says"), WRONG, ids=[f"{w[0]}-{w[2]}-{w[3][:7]}" for w in WRONG])
def test_tensors_that_do_not_fit_are_named(kind: str, change: Change, tensor: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=says) as caught:
        prepare(folder(tmp_path, kind, change))
    assert caught.value.tensor == tensor
    assert str(tmp_path) in caught.value.file


@pytest.mark.parametrize("name", ["model.norm.weight", DOWN])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(name: str, value: float, tmp_path: Path) -> None:
    def spoil(tensors: tiny.Arrays) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name].flat[-1] = value

    path = folder(tmp_path, "llama", spoil)
    with pytest.raises(BadModelFile, match="NaN or Inf") as caught:
        tiny.load(path)
    assert caught.value.tensor == name


def test_strays_only_warn(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    def add(tensors: tiny.Arrays) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
        tensors["value_head.weight"] = np.ones(16, np.float32)

    assert np.abs(logits(folder(tmp_path, "llama", add), "llama") - tiny.expected("llama")[1]).max() < 1e-3
    assert "1 tensors" in warned.text and "value_head.weight" in warned.text


def test_a_head_of_its_own_wins_over_the_flag(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    path = folder(tmp_path, "llama", tie_word_embeddings=True)
    assert np.abs(logits(path, "llama") - tiny.expected("llama")[1]).max() < 1e-3
    assert "tie_word_embeddings" in warned.text


@pytest.mark.parametrize("flag", [True, None])
def test_an_absent_head_is_the_embedding(flag: bool | None, tmp_path: Path) -> None:
    kind = "llama-tied-llama3-rope"
    path = folder(tmp_path, kind, tie_word_embeddings=flag)
    assert prepare(path).weights.load("head").same_as == "embed"
    model = tiny.load(path)
    assert model.executor.weight_bytes == sum(a.nbytes for a in tiny.arrays(kind).values())


def test_biases_are_found_whatever_the_flag_says(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    """A llama with biases computes the same whether their flag is true, absent or false, and not as without them."""
    sizes = {"self_attn.q_proj": 128, "self_attn.k_proj": 64, "self_attn.v_proj": 64, "self_attn.o_proj": 64}
    sizes |= {"mlp.gate_proj": 128, "mlp.up_proj": 128, "mlp.down_proj": 64}

    def add(tensors: tiny.Arrays) -> None:
        for i in range(2):
            for name, n in sizes.items():
                tensors[f"model.layers.{i}.{name}.bias"] = (
                    np.random.default_rng(n + i).normal(size=n).astype(np.float32)
                )

    flags: list[bool | None] = [True, None, False]
    out = [
        logits(folder(tmp_path / str(flag), "llama", add, attention_bias=flag, mlp_bias=flag), "llama")
        for flag in flags
    ]
    assert (out[0] == out[1]).all() and (out[0] == out[2]).all()
    assert np.abs(out[0] - tiny.expected("llama")[1]).max() > 0.1
    assert "attention_bias is false" in warned.text


def test_a_gguf_without_its_head_is_tied_and_rope_factors_are_used(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama-tied-llama3-rope")
    prepared = prepare(path)
    rope = prepared.config.ropes[0]
    assert rope is not None and len(rope.freq_factors) == 16 and rope.freq_factors[-1] == 8.0
    assert prepared.weights.load("head").same_as == "embed"


@pytest.mark.parametrize(("factors", "says"), [(np.ones(7), "expected shape"), (np.zeros(16), "above zero")])
def test_rope_factors_that_cannot_be(factors: np.ndarray, says: str, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "m.gguf", "llama", put("rope_freqs.weight", factors))
    with pytest.raises(BadModelFile, match=says) as caught:
        prepare(path)
    assert caught.value.tensor == "rope_freqs.weight"


def test_rows_of_quantised_weights_are_reordered_whole(tmp_path: Path) -> None:
    """Interleaved q rows come back in halves when their rows are Q8_0 blocks, exactly."""
    a = np.arange(4 * 32 * 64, dtype=np.float32).reshape(128, 64) % 127
    quantised = gguf.quants.quantize(tiny.interleave(a, 4), gguf.GGMLQuantizationType.Q8_0)
    assert (quantised[neox_order(128, 32, 32)] == gguf.quants.quantize(a, gguf.GGMLQuantizationType.Q8_0)).all()


def test_partial_rotation_leaves_the_rest_in_place() -> None:
    assert neox_order(12, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def test_sizes_are_known_before_anything_is_loaded() -> None:
    prepared = prepare(tiny.TINY / "qwen2")
    assert prepared.kv_bytes_per_token() == 2 * 2 * 64 * 2
    backend = ReferenceBackend()
    model = load_model(prepared, backend, Limits(8, 1, 2, prepared.config.context, prepared.config.vocab))
    assert model.executor.page_bytes == backend.page_bytes(model.program) == 32 * 2 * 2 * 64 * 4


def test_real_sizes(smollm2: Path) -> None:
    prepared = prepare(smollm2)
    assert prepared.kv_bytes_per_token() == 23040
    assert sum(n for name, n in prepared.sizes().items() if name != "head") == pytest.approx(96.6e6, rel=0.001)
