"""Configurations that cannot be right are refused by name; whatever a config says, only `BadModelFile` comes out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from headrace.base.errors import BadModelFile
from headrace.models import GGUF, HF, Model, describe

SHAPES = {kind: tiny.shapes(kind) for kind in tiny.KINDS}
CONFIGS = {kind: tiny.config(kind) for kind in tiny.KINDS}


def read(kind: str, **changes: Any) -> Model:
    return describe({**CONFIGS[kind], **changes}, "safetensors", SHAPES[kind], "config.json")


REFUSED = [
    ("llama", "model_type", "falcon_mamba", "'falcon_mamba'"),
    ("llama", "model_type", None, "None"),
    ("llama", "model_type", ["llama"], "architecture"),
    ("llama", "hidden_act", "relu2", "relu2"),
    ("llama", "hidden_act", 7, "activation"),
    ("llama", "num_hidden_layers", 0, "num_hidden_layers"),
    ("llama", "num_hidden_layers", "two", "num_hidden_layers"),
    ("llama", "num_hidden_layers", True, "num_hidden_layers"),
    ("llama", "num_hidden_layers", 10**9, "num_hidden_layers"),
    ("llama", "num_hidden_layers", None, "missing"),
    ("llama", "num_key_value_heads", 3, "multiple"),
    ("llama", "head_dim", 31, "odd"),
    ("llama", "hidden_size", -64, "hidden_size"),
    ("llama", "hidden_size", 64.5, "hidden_size"),
    ("llama", "vocab_size", 1 << 40, "vocab_size"),
    ("llama", "rms_norm_eps", float("nan"), "rms_norm_eps"),
    ("llama", "rms_norm_eps", 0, "rms_norm_eps"),
    ("llama", "rms_norm_eps", "1e-5", "rms_norm_eps"),
    ("llama", "tie_word_embeddings", "no", "tie_word_embeddings"),
    ("llama", "quantization_config", {"quant_method": "gptq"}, "quantization_config"),
    ("llama", "kv_lora_rank", 512, "MLA"),
    ("llama", "attention_sinks", True, "sinks"),
    ("llama", "rope_parameters", {"rope_type": "longrope"}, "'longrope'"),
    ("llama", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
    ("llama", "rope_parameters", {"rope_type": "linear"}, "factor"),
    ("llama", "rope_parameters", {"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate"),
    (
        "llama",
        "rope_parameters",
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1},
        "freq",
    ),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": -1}, "rope_theta"),
    ("llama", "rope_parameters", [], "object"),
    ("phi3", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.1}, "even"),
    ("phi3", "sliding_window", "all", "sliding_window"),
    ("gemma3", "layer_types", ["full_attention"], "layer_types"),
    ("gemma3", "layer_types", ["linear_attention"] * 6, "linear_attention"),
    ("gemma3", "use_bidirectional_attention", True, "bidirectional"),
    ("mixtral", "num_local_experts", None, "num_local_experts"),
    ("mixtral", "num_experts_per_tok", 5, "num_experts_per_tok"),
    ("qwen3-moe", "mlp_only_layers", [0], "mlp_only_layers"),
    ("qwen3-moe", "decoder_sparse_step", 2, "decoder_sparse_step"),
    ("smollm3", "no_rope_layers", [1, 1], "no_rope_layers"),
    ("granite", "logits_scaling", 0, "logits_scaling"),
]


@pytest.mark.parametrize(("kind", "key", "value", "named"), REFUSED, ids=[f"{r[0]}-{r[1]}-{r[2]}" for r in REFUSED])
def test_refused_by_name(kind: str, key: str, value: Any, named: str) -> None:
    with pytest.raises(BadModelFile, match=named) as caught:
        read(kind, **{key: value})
    assert caught.value.file == "config.json"


NUMBERS = st.one_of(st.integers(-2, 600), st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=3))
ANYTHING = st.recursive(
    NUMBERS | st.sampled_from(["yarn", "linear", "llama3", "default", "longrope", "silu", "gelu", "full_attention"]),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "full_attention"]), inner)
    ),
    max_leaves=6,
)


@given(data=st.data(), kind=st.sampled_from(tiny.KINDS))
@settings(max_examples=300, deadline=None)
def test_any_config_works_or_is_refused(data: st.DataObject, kind: str) -> None:
    keys = st.sampled_from(sorted({*CONFIGS[kind], "rope_scaling", "rope_theta", "sliding_window"} - {"model_type"}))
    changes = data.draw(st.dictionaries(keys, ANYTHING, min_size=1, max_size=3))
    try:
        model = read(kind, **changes)
    except BadModelFile:
        return
    c = model.config
    assert c.heads % c.kv_heads == 0 and len(c.ropes) == len(c.windows) == c.layers
    if c.layers <= 64:
        assert model.record().layers()


METADATA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "vocab_size": 320,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}


def gguf(architecture: str, tensors: tuple[str, ...] = (), **changes: Any) -> Model:
    whole = {"general.architecture": architecture}
    whole |= {f"{architecture}.{k}": v for k, v in {**METADATA, **changes}.items() if v is not None}
    return describe(whole, "gguf", dict.fromkeys(tensors, (1,)), "model.gguf")


@pytest.mark.parametrize("architecture", GGUF)
def test_gguf_keys(architecture: str) -> None:
    model = gguf(architecture)
    assert (model.config.layers, model.config.dim, model.config.heads, model.config.vocab) == (2, 64, 4, 320)
    assert len(model.record().layers()) == 2


def test_gguf_says_what_it_cannot_do() -> None:
    with pytest.raises(BadModelFile, match="'rwkv6'"):
        gguf("rwkv6")
    with pytest.raises(BadModelFile, match="longrope"):
        gguf("phi3", tensors=("rope_factors_long.weight",))
    with pytest.raises(BadModelFile, match="'longrope'"):
        gguf("phi3", **{"rope.scaling.type": "longrope"})
    with pytest.raises(BadModelFile, match="dimension_sections"):
        gguf("qwen2", **{"rope.dimension_sections": [1, 2, 3]})
    with pytest.raises(BadModelFile, match=r"llama\.attention\.head_count_kv"):
        gguf("llama", **{"attention.head_count_kv": [2, 1]})
    with pytest.raises(BadModelFile, match="value_length"):
        gguf("llama", **{"attention.value_length": 8})


def test_gguf_yarn_and_linear() -> None:
    yarn = gguf("qwen2", **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}).config.ropes[0]
    assert yarn is not None and (yarn.kind, yarn.factor, yarn.original) == ("yarn", 4.0, 256)
    linear = gguf("llama", **{"rope.scaling.factor": 8.0}).config.ropes[0]
    assert linear is not None and (linear.kind, linear.factor) == ("linear", 8.0)


def test_gemma3_gguf_layers() -> None:
    c = gguf("gemma3", **{"block_count": 12, "attention.sliding_window": 512, "rope.scaling.factor": 8.0}).config
    assert [w == 0 for w in c.windows] == [False] * 5 + [True] + [False] * 5 + [True]
    local, whole = c.ropes[0], c.ropes[5]
    assert local is not None and (local.theta, local.kind) == (10000.0, "default")
    assert whole is not None and (whole.theta, whole.factor) == (1e6, 8.0)
    listed = gguf("gemma3", **{"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True]}).config
    assert listed.windows == (0, 8)


def test_mistral_windows_by_default_and_not() -> None:
    c = {k: v for k, v in CONFIGS["mistral-sliding"].items() if k != "sliding_window"}
    assert describe(c, "safetensors", SHAPES["mistral-sliding"]).config.windows == (4096, 4096)
    assert read("mistral-sliding", sliding_window=None).config.windows == (0, 0)
    assert read("llama", sliding_window=16).config.windows == (0, 0)


def test_qwen2_slides_only_when_told() -> None:
    told = {"use_sliding_window": True, "sliding_window": 16, "layer_types": None, "max_window_layers": 1}
    assert read("qwen2", **told).config.windows == (0, 16)
    assert read("qwen2", sliding_window=16).config.windows == (0, 0)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_architecture_is_registered_under_its_name(kind: str) -> None:
    assert CONFIGS[kind]["model_type"] in HF


def test_absurd_numbers_of_experts_are_refused_before_their_table_is_laid_out() -> None:
    with pytest.raises(BadModelFile, match="1000 layers of 500 experts"):
        read("mixtral", num_hidden_layers=1000, num_local_experts=500)
