"""Gemma 2 (Google 2024): norms on both sides of each block, every other layer local, scores and logits capped."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.blocks import Weights, attention, gated, head
from headrace.models.config import Config, decoder, sliding
from headrace.models.keys import Keys
from headrace.models.table import DOWN, EMBED, GATE_UP, HEAD, QKV, O, vector
from headrace.program import Recorder, StepInputs, Value

# Checkpoints hold the norms' weights less one; GGUF files have the one folded in.
NORMS = tuple(
    vector(name, "dim", hf, gguf, "plus_one")
    for name, hf, gguf in (
        ("norm", "norm", "output_norm"),
        ("{i}.attn.norm", "input_layernorm", "attn_norm"),
        ("{i}.attn.post", "post_attention_layernorm", "post_attention_norm"),
        ("{i}.mlp.norm", "pre_feedforward_layernorm", "ffn_norm"),
        ("{i}.mlp.post", "post_feedforward_layernorm", "post_ffw_norm"),
    )
)
WEIGHTS = (EMBED, HEAD, *NORMS, QKV, O, GATE_UP, DOWN)

# The layers of the one size (27B) whose attention is scaled by dim / heads and not by the head; GGUF files don't say.
BY_WIDTH = 46


def config(keys: Keys) -> Config:
    head_dim = None if keys.gguf else 256
    keys = keys.with_defaults(attention_softcap=50.0, logit_softcap=30.0, window=4096, head_dim=head_dim)
    c = decoder(keys, activation="gelu_tanh")
    return replace(
        c,
        embed_scale=c.dim**0.5,
        attention_scale=attention_scale(keys, c, BY_WIDTH),
        windows=sliding(keys, c.layers, [i % 2 == 0 for i in range(c.layers)]),
        attention_softcap=softcap(keys, "attention_softcap"),
        logit_softcap=softcap(keys, "logit_softcap"),
    )


def softcap(keys: Keys, name: str) -> float:
    """A cap; null in config.json turns it off."""
    spelled = keys.spelled(name)
    off = spelled in keys.raw and keys.raw[spelled] is None
    return 0.0 if off or not keys.has(name) else keys.real(name)


def attention_scale(keys: Keys, c: Config, by_width: int) -> float:
    if keys.gguf:
        return float((c.dim / c.heads if c.layers == by_width else c.head_dim) ** -0.5)
    scalar = keys.raw.get("query_pre_attn_scalar")
    return float(keys.check_real("query_pre_attn_scalar", 256 if scalar is None else scalar, low=1e-6) ** -0.5)


def forward(ops: Recorder, c: Config, w: Weights, step: StepInputs) -> Value:
    x = ops.embed(step.tokens, w["embed"], c.embed_scale)
    for i in range(c.layers):
        h = ops.norm(x, w[f"{i}.attn.norm"], c.eps)
        h = ops.linear(attention(ops, c, w, step, i, h), w[f"{i}.attn.o"])
        x = ops.add(x, ops.norm(h, w[f"{i}.attn.post"], c.eps))
        h = ops.norm(x, w[f"{i}.mlp.norm"], c.eps)
        h = ops.linear(gated(ops, c, w, i, h), w[f"{i}.mlp.down"])
        x = ops.add(x, ops.norm(h, w[f"{i}.mlp.post"], c.eps))
    logits = head(ops, c, w, step, x)
    return ops.softcap(logits, c.logit_softcap) if c.logit_softcap else logits
