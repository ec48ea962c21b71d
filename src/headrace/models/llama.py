"""Llama 2 and 3, SmolLM2, TinyLlama, Yi and their many relatives (Touvron et al. 2023; Meta 2024).

Also the trunk that Mistral, Qwen 2 and 3, Phi 3 and SmolLM 3 share: they differ in numbers and tables alone.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.models.blocks import Weights, attention, gated, head
from headrace.models.config import Config, decoder, sliding
from headrace.models.keys import Keys
from headrace.models.table import ATTENTION, ENDS, MLP, interleaved
from headrace.program import Recorder, StepInputs, Value

WEIGHTS = (*ENDS, *map(interleaved, ATTENTION), *MLP)


def config(keys: Keys) -> Config:
    c = decoder(keys)
    # A GGUF file of this architecture may hold a Mistral; config.json of a Llama never means its sliding_window.
    return replace(c, windows=sliding(keys, c.layers, [True] * c.layers)) if keys.gguf else c


def forward(ops: Recorder, c: Config, w: Weights, step: StepInputs) -> Value:
    x = ops.embed(step.tokens, w["embed"])
    for i in range(c.layers):
        h = ops.norm(x, w[f"{i}.attn.norm"], c.eps)
        x = ops.linear(attention(ops, c, w, step, i, h), w[f"{i}.attn.o"], w.get(f"{i}.attn.o.bias"), add=x)
        h = ops.norm(x, w[f"{i}.mlp.norm"], c.eps)
        x = ops.linear(gated(ops, c, w, i, h), w[f"{i}.mlp.down"], w.get(f"{i}.mlp.down.bias"), add=x)
    return head(ops, c, w, step, x)
