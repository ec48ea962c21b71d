"""Qwen 3, dense (Qwen Team 2025): a Llama that normalises each head of q and k before it turns them."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.config import Config, decoder, optional_sliding
from headrace.models.keys import Keys
from headrace.models.llama import forward
from headrace.models.table import ATTENTION, ENDS, K_NORM, MLP, Q_NORM

__all__ = ["WEIGHTS", "config", "forward"]

WEIGHTS = (*ENDS, *ATTENTION, Q_NORM, K_NORM, *MLP)


def config(keys: Keys) -> Config:
    c = decoder(keys)
    return replace(c, windows=optional_sliding(keys, c.layers))
