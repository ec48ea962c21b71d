"""Fitted blocks: never more weighted error than plain rounding, whatever the values; and what feedback adds to that."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import SettingError
from headrace.base.formats import FORMATS
from headrace.quant import second_order
from headrace.quant.blocks import dequantize, quantize
from headrace.quant.encode import CODINGS, encode, plain, weighted_error
from headrace.quant.recipes import RECIPES, Rule, chosen, fitting, recipe_named

ALL = [FORMATS[name] for name in CODINGS]
named = pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)

# rows of a kind: from a generator, float32 [4, 512]
ROWS = {
    "normal": lambda rng: rng.normal(0, 0.05, (4, 512)),
    "zeros": lambda rng: np.zeros((4, 512)),
    "one outlier": lambda rng: np.where(
        rng.permutation(2048).reshape(4, 512) == 7, 30.0, rng.normal(0, 0.02, (4, 512))
    ),
    "constant": lambda rng: np.full((4, 512), -0.37),
    "above zero": lambda rng: rng.uniform(1, 2, (4, 512)),
    "denormal": lambda rng: rng.normal(0, 1e-39, (4, 512)),
    "tiny": lambda rng: rng.normal(0, 1e-7, (4, 512)),
    "large": lambda rng: rng.normal(0, 5000, (4, 512)),
    "few values": lambda rng: rng.integers(-2, 3, (4, 512)) / 8,
}


def values_of(kind: str, seed: int = 0) -> np.ndarray:
    return ROWS[kind](np.random.default_rng(seed)).astype(np.float32)


@named
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_block_has_more_error_than_plain_rounding(format, kind: str, weighted: bool) -> None:
    values = values_of(kind)
    weights = np.exp(np.random.default_rng(1).normal(0, 2, 512)).astype(np.float32) if weighted else None
    fitted, rounded = encode(format, values, weights), plain(format, values)
    assert fitted.shape == rounded.shape and np.isfinite(dequantize(format, fitted)).all()
    scale = np.ones(512, np.float32) if weights is None else weights / weights.mean()
    mine, theirs = (weighted_error(format, packed, values, scale) for packed in (fitted, rounded))
    assert (mine <= theirs * (1 + 1e-5)).all()
    if kind == "normal":
        assert mine.sum() < 0.97 * theirs.sum()


@named
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(1e-4, 3), skew=st.floats(0, 3))
@settings(max_examples=25, deadline=None)
def test_any_values_under_any_weights(format, seed: int, spread: float, skew: float) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_t(3, (2, 256)) * spread).astype(np.float32)
    weights = np.exp(rng.normal(0, skew, 256)).astype(np.float32)
    mine, theirs = (
        weighted_error(format, packed, values, weights).sum()
        for packed in (encode(format, values, weights), plain(format, values))
    )
    assert mine <= theirs * (1 + 1e-5)


@named
def test_what_the_format_can_say_is_said_exactly(format) -> None:
    """Values that lie on a grid come back as they are, and the bytes are those that the gguf package reads so."""
    values = dequantize(format, encode(format, values_of("normal", 3)))
    packed = encode(format, values)
    error = np.abs(dequantize(format, packed) - values).max() / np.abs(values).max()
    assert error < (2e-3 if format.block == 32 else 2e-2)
    theirs = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(format.ggml_type))
    np.testing.assert_array_equal(theirs, dequantize(format, packed))


@named
def test_threads_and_neighbours_change_nothing(format) -> None:
    values = np.random.default_rng(5).normal(0, 1, (700, 256)).astype(np.float32)
    whole = encode(format, values, threads=4)
    np.testing.assert_array_equal(whole, encode(format, values))
    np.testing.assert_array_equal(whole[300:310], encode(format, values[300:310]))


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q4_1", "q4_0"])
def test_plain_is_the_reference_of_the_format(name: str) -> None:
    values = values_of("normal")
    np.testing.assert_array_equal(plain(FORMATS[name], values), quantize(FORMATS[name], values))


def correlated(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    mixing = rng.normal(0, 1, (columns, columns // 4)).astype(np.float32)
    x = rng.normal(0, 1, (2000, columns // 4)).astype(np.float32) @ mixing.T + rng.normal(0, 0.3, (2000, columns))
    moments = (x.T @ x / 2000).astype(np.float32)
    return rng.normal(0, 0.05, (rows, columns)).astype(np.float32), moments


@named
def test_feedback_makes_outputs_better(format) -> None:
    values, moments = correlated(32, 512)
    importance = np.ascontiguousarray(moments.diagonal())
    fed, fitted, rounded = (
        second_order.output_error(format, packed, values, moments)
        for packed in (
            second_order.encoder(format, moments)(values),
            encode(format, values, importance),
            plain(format, values),
        )
    )
    assert (fed <= fitted).all()
    assert fed.sum() < 0.8 * fitted.sum() and fed.sum() < 0.8 * rounded.sum()


@pytest.mark.parametrize("moments", [np.zeros((256, 256)), np.full((256, 256), np.nan), np.ones((256, 256))])
def test_moments_that_say_little_do_no_harm(moments: np.ndarray) -> None:
    values = values_of("normal")[:, :256]
    packed = second_order.encoder(FORMATS["q4_0"], moments.astype(np.float32))(values)
    error = np.abs(dequantize(FORMATS["q4_0"], packed) - values).max()
    assert error < 0.2


def test_recipes_name_tensors() -> None:
    medium = RECIPES["medium"]
    assert chosen("output.weight", medium, "q4_0", 16, tied=False).name == "q6_k"
    assert chosen("token_embd.weight", medium, "q4_0", 16, tied=True).name == "q6_k"
    assert chosen("token_embd.weight", medium, "q4_0", 16, tied=False).name == "q4_0"
    raised = [i for i in range(16) if chosen(f"blk.{i}.attn_v.weight", medium, "q4_k", 16, tied=False).name == "q6_k"]
    assert raised == [0, 1, 4, 7, 10, 13, 14, 15]
    assert chosen("output.weight", medium, "q8_0", 16, tied=False).name == "q8_0"


def test_a_row_that_is_no_whole_number_of_blocks_falls_back() -> None:
    assert [fitting(FORMATS["q4_k"], n).name for n in (256, 896, 100)] == ["q4_k", "q5_0", "f16"]
    assert fitting(FORMATS["q6_k"], 576).name == "q8_0"


def test_a_recipe_of_ones_own(tmp_path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"blk.0.*": "f16", "*.attn_v.weight": "q8_0"}')
    rules = recipe_named(str(path))
    assert all(isinstance(rule, Rule) for rule in rules)
    assert chosen("blk.0.attn_v.weight", rules, "q4_0", 2, False).name == "f16"
    assert chosen("blk.1.attn_v.weight", rules, "q4_0", 2, False).name == "q8_0"
    assert chosen("blk.1.attn_q.weight", rules, "q4_0", 2, False).name == "q4_0"


@pytest.mark.parametrize("text", ["[]", "{", '{"a": "q9"}', '{"a": 3}', '{"a": ["q4_0"]}'])
def test_a_recipe_that_is_none_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(SettingError) as raised:
        recipe_named(str(path))
    assert raised.value.param == "recipe"
    with pytest.raises(SettingError, match="even, mixed"):
        recipe_named("best")
