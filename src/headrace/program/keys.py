"""What int8 keys are less of: a vector that their layer adds to each of them, found in the weights.

The softmax over q . (k - c) is that over q . k, for any c that all keys of a query share. Where keys have a large bias
(Qwen2's), nearly all of a scale would be spent on it: with c = the bias, as far as rope leaves it where it is, int8
costs an eighth (docs/log.md). Knows no device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.program.program import Op, Program
from headrace.program.rope import Rope
from headrace.program.step import F32

_HORIZON = 8192  # positions over which turned biases are averaged: fast pairs leave nothing, slow ones nearly all


def key_offsets(program: Program, vectors: Mapping[str, F32]) -> dict[int, F32]:
    """By layer of the cache: c [kv_heads, head_dim]. vectors: the weights of one dimension, at least.

    Layers whose keys have no bias right before rope are left out, as are those with a soft cap, which is not invariant.
    """
    makers = {value.id: op for op in program.ops for value in op.outputs}
    means: dict[Rope, tuple[F32, F32]] = {}
    found = {}
    for op in program.layers():
        rope = makers.get(op.inputs[1].id)
        if op.attrs["softcap"] or rope is None or rope.kind != "rope":
            continue
        made = makers.get(rope.inputs[1].id)
        if made is None or made.kind != "qkv" or not made.attrs["bias"]:
            continue
        turn: Rope = rope.attrs["rope"]
        if turn not in means:
            cos, sin = turn.table(_HORIZON)
            means[turn] = _mean(cos), _mean(sin)
        found[op.attrs["layer"]] = _turned(_key_bias(made, vectors), op.attrs["head_dim"], *means[turn])
    return found


def _mean(table: F32) -> F32:
    return np.asarray(np.mean(table, axis=0, dtype=np.float64), np.float32)


def _key_bias(qkv: Op, vectors: Mapping[str, F32]) -> F32:
    q, k, _ = (value.width for value in qkv.outputs)
    return vectors[qkv.weights[1]][q : q + k]


def _turned(bias: F32, head_dim: int, cos: F32, sin: F32) -> F32:
    heads, half = bias.reshape(-1, head_dim), len(cos)
    a, b, rest = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=1)
