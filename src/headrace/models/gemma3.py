"""Gemma 3, text (Google 2025): Gemma 2 without caps; norms of q and k, five local layers to a global one, two ropes."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.config import Config, decoder, sliding
from headrace.models.gemma2 import WEIGHTS as GEMMA2
from headrace.models.gemma2 import attention_scale, forward, softcap
from headrace.models.keys import Keys
from headrace.models.ropes import by_layer_type, read_rope
from headrace.models.table import vector
from headrace.program import Rope

__all__ = ["WEIGHTS", "config", "forward"]

WEIGHTS = (
    *GEMMA2,
    vector("{i}.attn.q_norm", "head", "self_attn.q_norm", "attn_q_norm", "plus_one"),
    vector("{i}.attn.k_norm", "head", "self_attn.k_norm", "attn_k_norm", "plus_one"),
)

BY_WIDTH = 62
LOCAL_THETA = 10000.0

# What transformers fills in: the text halves of larger checkpoints leave these out.
DEFAULTS = {
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 256,
    "vocab": 262208,
    "eps": 1e-6,
    "context": 131072,
    "rope_theta": 1e6,
}


def config(keys: Keys) -> Config:
    defaults = {"rope_theta": 1e6} if keys.gguf else DEFAULTS
    keys = keys.with_defaults(window=4096, **defaults)
    c = decoder(keys, activation="gelu_tanh")
    every = _pattern(keys)
    windows = sliding(keys, c.layers, [(i + 1) % every != 0 for i in range(c.layers)])
    local = _local_rope(keys, c)
    return replace(
        c,
        embed_scale=c.dim**0.5,
        attention_scale=attention_scale(keys, c, BY_WIDTH),
        windows=windows,
        ropes=tuple(local if window else rope for window, rope in zip(windows, c.ropes, strict=True)),
        attention_softcap=softcap(keys, "attention_softcap"),
        logit_softcap=softcap(keys, "logit_softcap"),
    )


def _pattern(keys: Keys) -> int:
    """Of how many layers the last is global."""
    spellings = ("sliding_window_pattern", "_sliding_window_pattern")
    given = None if keys.gguf else next((keys.raw[s] for s in spellings if keys.raw.get(s) is not None), None)
    return keys.check_whole("sliding_window_pattern", 6 if given is None else given)


def _local_rope(keys: Keys, c: Config) -> Rope:
    """Local layers turn at their own base, and no scaling of the global ones' touches them."""
    if not keys.gguf and by_layer_type(keys, "sliding_attention"):
        return read_rope(keys, c.head_dim, "sliding_attention")
    spelled = "gemma3.rope.freq_base_swa" if keys.gguf else "rope_local_base_freq"
    theta = keys.raw.get(spelled)
    return Rope(c.rotary, keys.check_real(spelled, LOCAL_THETA if theta is None else theta, low=1.0, high=1e12))
