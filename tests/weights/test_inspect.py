"""What `headrace inspect` shows of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from modelfiles import STRING, gguf_bytes, plain_pairs, plain_tensors

from headrace.weights import open_checkpoint
from headrace.weights.inspect import describe, group_of


def test_a_description_adds_up(stored: Callable[..., Path]) -> None:
    pairs = [*plain_pairs(), ("general.name", STRING, "Tiny")]
    description = describe(open_checkpoint(stored(gguf_bytes(pairs, plain_tensors()))))
    assert (description.name, description.architecture, description.kind) == ("Tiny", "llama", "gguf")
    assert (description.files, description.tensors) == (1, 4)
    groups = {group.name: group for group in description.groups}
    assert groups["embedding"].formats == {"q8_0": 1} and groups["embedding"].bytes == 6 * 8 * 34
    assert groups["attention"].formats == {"q4_k": 1} and groups["attention"].values == 4 * 256
    assert groups["mlp"].formats == {"q4_1": 1} and groups["norms"].formats == {"f32": 1}
    assert sum(g.bytes for g in description.groups) == description.bytes == sum(len(t.data) for t in plain_tensors())
    assert sum(g.values for g in description.groups) == description.values == 6 * 256 + 4 * 256 + 256 + 480


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("output.weight", "head"),
        ("output_norm.weight", "norms"),
        ("lm_head.weight", "head"),
        ("model.embed_tokens.weight", "embedding"),
        ("blk.3.attn_output.weight", "attention"),
        ("blk.3.attn_q_norm.weight", "norms"),
        ("model.layers.0.self_attn.q_proj.bias", "attention"),
        ("model.layers.0.post_attention_layernorm.weight", "norms"),
        ("blk.0.ffn_down.weight", "mlp"),
        ("blk.0.ffn_down_exps.weight", "experts"),
        ("blk.0.ffn_gate_inp.weight", "router"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "experts"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.block_sparse_moe.gate.weight", "router"),
        ("rope_freqs.weight", "other"),
    ],
)
def test_the_group_of_a_name(name: str, group: str) -> None:
    assert group_of(name) == group


def test_a_real_file(smollm2: Path) -> None:
    description = describe(open_checkpoint(smollm2))
    assert description.architecture == "llama" and description.values == 134_515_008
    assert [g.name for g in description.groups] == ["mlp", "embedding", "attention", "norms"]
