"""Qwen 3, mixture of experts (Qwen Team 2025): Qwen 3's attention, and the trunk of Mixtral with many small experts."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.config import Config, decoder, optional_sliding
from headrace.models.keys import Keys
from headrace.models.mixtral import forward, with_experts
from headrace.models.table import ATTENTION, ENDS, K_NORM, MLP_NORM, Q_NORM, Piece, matrix

__all__ = ["WEIGHTS", "config", "forward"]

WEIGHTS = (
    *ENDS,
    *ATTENTION,
    Q_NORM,
    K_NORM,
    MLP_NORM,
    matrix("{i}.mlp.router", "dim", Piece("experts", "mlp.gate", "ffn_gate_inp")),
    matrix(
        "{i}.mlp.gate_up",
        "dim",
        Piece("hidden", "mlp.experts.{e}.gate_proj", "ffn_gate_exps"),
        Piece("hidden", "mlp.experts.{e}.up_proj", "ffn_up_exps"),
        split="out",
        stacked=True,
    ),
    matrix(
        "{i}.mlp.down", "hidden", Piece("dim", "mlp.experts.{e}.down_proj", "ffn_down_exps"), split="in", stacked=True
    ),
)


def config(keys: Keys) -> Config:
    keys.refuse("decoder_sparse_step", (1,), "a mixture in some layers only")
    keys.refuse("mlp_only_layers", ([],), "a mixture in some layers only")
    c = with_experts(keys, decoder(keys))
    return replace(
        c,
        hidden=keys.whole("expert_hidden", high=1 << 20),
        renormalise=True if keys.gguf else keys.flag("norm_topk_prob", False) is True,
        windows=optional_sliding(keys, c.layers),
    )
