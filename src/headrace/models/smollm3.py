"""SmolLM 3 (Hugging Face 2025): a Llama in which every fourth layer doesn't turn q and k ("NoPE", Yang et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.config import Config, decoder, optional_sliding
from headrace.models.keys import Keys
from headrace.models.llama import WEIGHTS, forward

__all__ = ["WEIGHTS", "config", "forward"]


def config(keys: Keys) -> Config:
    c = decoder(keys)
    ropes = tuple(c.ropes[i] if turns else None for i, turns in enumerate(_turning(keys, c.layers)))
    return replace(c, ropes=ropes, windows=optional_sliding(keys, c.layers))


def _turning(keys: Keys, layers: int) -> list[bool]:
    """Which layers turn: those that the config lists as 1, or all but every n-th. GGUF files don't say: n is 4."""
    listed = None if keys.gguf else keys.raw.get("no_rope_layers")
    if listed is None:
        given = None if keys.gguf else keys.raw.get("no_rope_layer_interval")
        every = keys.check_whole("no_rope_layer_interval", 4 if given is None else given)
        return [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(v not in (0, 1) for v in listed):
        raise keys.bad(f"no_rope_layers must list {layers} zeros and ones")
    return [bool(v) for v in listed]
