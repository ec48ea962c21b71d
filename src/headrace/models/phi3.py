"""Phi 3 and 4 mini (Microsoft 2024): a Llama that fuses q, k and v, and gate and up; part of a head may turn."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.config import Config, decoder, sliding
from headrace.models.keys import Keys
from headrace.models.llama import forward
from headrace.models.table import ATTN_NORM, DOWN, ENDS, MLP_NORM, O, Piece, matrix

__all__ = ["WEIGHTS", "config", "forward"]

QKV = matrix("{i}.attn.qkv", "dim", Piece("qkv", "self_attn.qkv_proj", "attn_qkv"), split="out")
GATE_UP = matrix("{i}.mlp.gate_up", "dim", Piece("gate_up", "mlp.gate_up_proj", "ffn_up"), split="out")

WEIGHTS = (*ENDS, ATTN_NORM, QKV, O, MLP_NORM, GATE_UP, DOWN)


def config(keys: Keys) -> Config:
    c = decoder(keys)
    return replace(c, windows=sliding(keys, c.layers, [True] * c.layers))
