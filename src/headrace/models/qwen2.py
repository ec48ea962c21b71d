"""Qwen 2 and 2.5 (Qwen Team 2024): a Llama with a bias on q, k and v, always, whatever the config says."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.config import Config, decoder, optional_sliding
from headrace.models.keys import Keys
from headrace.models.llama import forward
from headrace.models.table import ATTN_NORM, ENDS, MLP, QKV, O, bias

__all__ = ["WEIGHTS", "config", "forward"]

WEIGHTS = (*ENDS, ATTN_NORM, QKV, bias(QKV, "attention_bias"), O, *MLP)


def config(keys: Keys) -> Config:
    c = decoder(keys)
    return replace(c, attention_bias=True, windows=optional_sliding(keys, c.layers))
