"""Mixtral (Jiang et al. 2024): a Mistral whose MLP is a mixture of experts; the weights of those taken sum to one."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.blocks import Weights, attention, head, mixture
from headrace.models.config import Config, decoder, sliding
from headrace.models.keys import Keys
from headrace.models.table import ATTENTION, ENDS, MLP_NORM, Piece, interleaved, matrix
from headrace.program import Recorder, StepInputs, Value

WEIGHTS = (
    *ENDS,
    *map(interleaved, ATTENTION),
    MLP_NORM,
    matrix("{i}.mlp.router", "dim", Piece("experts", "block_sparse_moe.gate", "ffn_gate_inp")),
    matrix(
        "{i}.mlp.gate_up",
        "dim",
        Piece("hidden", "block_sparse_moe.experts.{e}.w1", "ffn_gate_exps"),
        Piece("hidden", "block_sparse_moe.experts.{e}.w3", "ffn_up_exps"),
        split="out",
        stacked=True,
    ),
    matrix(
        "{i}.mlp.down",
        "hidden",
        Piece("dim", "block_sparse_moe.experts.{e}.w2", "ffn_down_exps"),
        split="in",
        stacked=True,
    ),
)

MOST_EXPERTS = 1 << 16
"""In all layers together; a damaged file is refused before its table is laid out."""


def config(keys: Keys) -> Config:
    c = decoder(keys)
    return replace(with_experts(keys, c), windows=sliding(keys, c.layers, [True] * c.layers))


def with_experts(keys: Keys, c: Config) -> Config:
    experts = keys.whole("experts", high=512)
    if c.layers * experts > MOST_EXPERTS:
        raise keys.bad(f"{c.layers} layers of {experts} experts are more than any model has")
    used = keys.whole("experts_used", high=experts)
    return replace(c, experts=experts, experts_used=used)


def forward(ops: Recorder, c: Config, w: Weights, step: StepInputs) -> Value:
    x = ops.embed(step.tokens, w["embed"])
    for i in range(c.layers):
        h = ops.norm(x, w[f"{i}.attn.norm"], c.eps)
        x = ops.linear(attention(ops, c, w, step, i, h), w[f"{i}.attn.o"], w.get(f"{i}.attn.o.bias"), add=x)
        h = ops.norm(x, w[f"{i}.mlp.norm"], c.eps)
        x = ops.add(x, mixture(ops, c, w, i, h))
    return head(ops, c, w, step, x)
