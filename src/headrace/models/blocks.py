"""The stretches of a decoder that most architectures share, over the op vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.models.config import Config
from headrace.program import Recorder, StepInputs, Value, Weight

Weights = Mapping[str, Weight]


def attention(ops: Recorder, c: Config, w: Weights, step: StepInputs, i: int, h: Value) -> Value:
    """Layer i's attention up to its output matrix, [T, dim] -> [T, heads * head_dim]. Norms of q and k if in w."""
    q, k, v = ops.qkv(h, w[f"{i}.attn.qkv"], c.heads, c.kv_heads, c.head_dim, w.get(f"{i}.attn.qkv.bias"))
    if f"{i}.attn.q_norm" in w:
        q = ops.norm(q, w[f"{i}.attn.q_norm"], c.eps, heads=c.heads)
        k = ops.norm(k, w[f"{i}.attn.k_norm"], c.eps, heads=c.kv_heads)
    if rope := c.ropes[i]:
        q, k = ops.rope(q, k, step.positions, rope, c.head_dim)
    return ops.attend(q, k, v, i, c.head_dim, c.attention_scale, c.windows[i], c.attention_softcap)


def gated(ops: Recorder, c: Config, w: Weights, i: int, h: Value) -> Value:
    """Layer i's MLP before its down matrix: [T, dim] -> [T, hidden]."""
    return ops.glu(ops.linear(h, w[f"{i}.mlp.gate_up"], w.get(f"{i}.mlp.gate_up.bias")), c.activation)


def mixture(ops: Recorder, c: Config, w: Weights, i: int, h: Value) -> Value:
    """Layer i's MLP as a mixture of experts: [T, dim] -> [T, dim]."""
    routing = ops.route(h, w[f"{i}.mlp.router"], c.experts_used, c.renormalise)
    return ops.experts(h, routing, w[f"{i}.mlp.gate_up"], w[f"{i}.mlp.down"], c.activation)


def head(ops: Recorder, c: Config, w: Weights, step: StepInputs, x: Value) -> Value:
    """The last norm and the logits, of the rows that want them: [T, dim] -> [R, vocab]."""
    x = ops.norm(ops.rows(x, step.logit_rows), w["norm"], c.eps)
    return ops.linear(x, w["head"])
