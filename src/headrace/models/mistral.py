"""Mistral 7B and its relatives (Jiang et al. 2023): a Llama whose layers may all see a sliding window."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.config import Config, decoder, sliding
from headrace.models.keys import Keys
from headrace.models.llama import WEIGHTS, forward

__all__ = ["WEIGHTS", "config", "forward"]


def config(keys: Keys) -> Config:
    if "sliding_window" not in keys.raw:
        keys = keys.with_defaults(window=4096)  # as transformers does; null means none
    c = decoder(keys)
    return replace(c, windows=sliding(keys, c.layers, [True] * c.layers))
