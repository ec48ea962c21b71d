"""Granite 3, dense (IBM 2024): a Llama with constants on embedding, residual branches, attention and logits."""

from __future__ import annotations

from dataclasses import replace

from headrace.models.blocks import Weights, attention, gated, head
from headrace.models.config import Config, decoder
from headrace.models.keys import Keys
from headrace.models.llama import WEIGHTS
from headrace.program import Recorder, StepInputs, Value

__all__ = ["WEIGHTS", "config", "forward"]


def config(keys: Keys) -> Config:
    c = decoder(keys)
    return replace(
        c,
        embed_scale=keys.real("embed_scale", 1.0),
        residual_scale=keys.real("residual_scale", 1.0),
        attention_scale=keys.real("attention_scale", c.attention_scale if keys.gguf else 1.0),
        logit_scale=1.0 / keys.real("logit_divisor", 1.0, low=1e-6),
    )


def forward(ops: Recorder, c: Config, w: Weights, step: StepInputs) -> Value:
    x = ops.embed(step.tokens, w["embed"], c.embed_scale)
    for i in range(c.layers):
        h = ops.norm(x, w[f"{i}.attn.norm"], c.eps)
        h = ops.linear(attention(ops, c, w, step, i, h), w[f"{i}.attn.o"], w.get(f"{i}.attn.o.bias"))
        x = ops.add(x, ops.scale(h, c.residual_scale))
        h = ops.norm(x, w[f"{i}.mlp.norm"], c.eps)
        h = ops.linear(gated(ops, c, w, i, h), w[f"{i}.mlp.down"], w.get(f"{i}.mlp.down.bias"))
        x = ops.add(x, ops.scale(h, c.residual_scale))
    return ops.scale(head(ops, c, w, step, x), c.logit_scale)
