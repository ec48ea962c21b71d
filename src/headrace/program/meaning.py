"""What each op means, in plain numpy: the specification that every back end is tested against.

One function an op kind, in the table `MEANING`. Values are float32, sums run in numpy's own order; a back end may sum
in another order, and is held to a tolerance. Knows no devices, no formats (weights come as float32) and no requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.base.settings import PAGE
from headrace.program.program import Op
from headrace.program.rope import Rope
from headrace.program.step import F32, Step

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each float32 [pages, 32, kv_heads, head_dim]. format: of KV_FORMATS, when written.

    offset: what keys are less of, [kv_heads, head_dim] or 0; see `program.keys`. windowed: the pages are slots.
    """

    keys: F32
    values: F32
    format: str = "float32"
    offset: F32 | float = 0.0
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an op sees beside its inputs: the step, the cache by layer, and cos and sin tables [positions, rotary/2]."""

    step: Step
    cache: Mapping[int, LayerCache]
    ropes: Mapping[Rope, tuple[F32, F32]]


Meaning = Callable[[Op, Sequence[Array], Sequence[F32], Surroundings], tuple[F32, ...]]


def int8_scales(x: F32) -> F32:
    """Of vectors [..., n] that are kept as int8: the least float16 from max|x| / 127 on, NaN where there is none."""
    with np.errstate(over="ignore"):
        wanted = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        near = wanted.astype(np.float16)
    scales = np.where(near < wanted, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32)
    return np.where(np.isfinite(scales), scales, np.float32(np.nan))


def round_to_int8(x: F32) -> F32:
    """Each vector [..., n] as its scale times integers from -127 to 127, the nearest ones."""
    scales = int8_scales(x)
    return np.rint(x / np.where(scales == 0, np.float32(1), scales)) * scales


def round_to_f16(x: F32) -> F32:
    """The nearest float16 values, ties to even; infinite beyond 65504."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def round_to_bf16(x: F32) -> F32:
    """The nearest bfloat16 values, ties to even; NaN stays one."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    near = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, near.view(np.float32))


KV_FORMATS: dict[str, Callable[[F32], F32]] = {
    "float32": lambda x: x,
    "float16": round_to_f16,
    "bfloat16": round_to_bf16,
    "int8": round_to_int8,
}


def _embed(op: Op, x: Sequence[Array], w: Sequence[F32], _: Surroundings) -> tuple[F32, ...]:
    return (w[0][x[0]] * np.float32(op.attrs["scale"]),)


def _norm(op: Op, x: Sequence[Array], w: Sequence[F32], _: Surroundings) -> tuple[F32, ...]:
    heads = op.attrs["heads"]
    slices = x[0].reshape(len(x[0]), heads, x[0].shape[1] // heads)
    mean = np.mean(np.square(slices, dtype=np.float64), axis=-1, keepdims=True)
    scaled = slices * (1.0 / np.sqrt(mean + op.attrs["eps"])).astype(np.float32) * w[0]
    return (scaled.reshape(x[0].shape),)


def _linear(op: Op, x: Sequence[Array], w: Sequence[F32], _: Surroundings) -> tuple[F32, ...]:
    y = x[0] @ w[0].T
    if op.attrs["bias"]:
        y = y + w[1]
    return (y + x[1] if op.attrs["add"] else y,)


def _qkv(op: Op, x: Sequence[Array], w: Sequence[F32], _: Surroundings) -> tuple[F32, ...]:
    y = x[0] @ w[0].T
    if op.attrs["bias"]:
        y = y + w[1]
    q, k, _v = (v.width for v in op.outputs)
    return y[:, :q], y[:, q : q + k], y[:, q + k :]


def _turn(x: F32, cos: F32, sin: F32, head_dim: int) -> F32:
    """Turns the pairs (i, i + rotary/2) of each head; cos and sin [T, rotary/2]. What lies beyond rotary stays."""
    heads = x.reshape(len(x), x.shape[1] // head_dim, head_dim)
    half = cos.shape[1]
    c, s = cos[:, None, :], sin[:, None, :]
    a, b = heads[..., :half], heads[..., half : 2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, heads[..., 2 * half :]], axis=-1).reshape(x.shape)


def _rope(op: Op, x: Sequence[Array], _: Sequence[F32], around: Surroundings) -> tuple[F32, ...]:
    q, k, positions = x
    cos, sin = (table[positions] for table in around.ropes[op.attrs["rope"]])
    return tuple(_turn(v, cos, sin, op.attrs["head_dim"]) for v in (q, k))


def _softmax(scores: F32) -> F32:
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True), np.float32)


def _attend_row(op: Op, q: F32, keys: F32, values: F32) -> F32:
    """One row over what it sees: q [heads * head_dim], keys and values [seen, kv_heads, head_dim]."""
    grouped = q.reshape(op.attrs["kv_heads"], -1, op.attrs["head_dim"])
    scores = np.einsum("kgd,ckd->kgc", grouped, keys) * np.float32(op.attrs["scale"])
    if cap := np.float32(op.attrs["softcap"]):
        scores = cap * np.tanh(scores / cap)
    out: F32 = np.einsum("kgc,ckd->kgd", _softmax(scores), values).reshape(-1)
    return out


def _attend(op: Op, x: Sequence[Array], _: Sequence[F32], around: Surroundings) -> tuple[F32, ...]:
    q, k, v = x
    step, cache, window = around.step, around.cache[op.attrs["layer"]], op.attrs["window"]
    shape = (len(q), op.attrs["kv_heads"], op.attrs["head_dim"])
    k, v = map(KV_FORMATS[cache.format], (k.reshape(shape) - cache.offset, v.reshape(shape)))
    out = np.empty_like(q)
    for b, context in enumerate(step.context):
        rows = slice(step.query_start[b], step.query_start[b + 1])
        tables = step.window_pages if cache.windowed else step.pages
        pages = tables[step.page_indptr[b] : step.page_indptr[b + 1]]
        positions = step.positions[rows]
        at = pages[positions // PAGE], positions % PAGE
        cache.keys[at], cache.values[at] = k[rows], v[rows]
        held = pages[: -(-int(context) // PAGE)]
        keys, values = (a[held].reshape(-1, *shape[1:])[:context] for a in (cache.keys, cache.values))
        for row, position in enumerate(positions, step.query_start[b]):
            seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
            out[row] = _attend_row(op, q[row], keys[seen], values[seen])
    return (out,)


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu_tanh(x: F32) -> F32:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), np.float32)


ACTIVATIONS: dict[str, Callable[[F32], F32]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": _gelu_tanh,
    "gelu": lambda x: np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))), np.float32),
}


def _gated(x: F32, activation: str) -> F32:
    half = x.shape[-1] // 2
    return ACTIVATIONS[activation](x[..., :half]) * x[..., half:]


def _glu(op: Op, x: Sequence[Array], _: Sequence[F32], __: Surroundings) -> tuple[F32, ...]:
    return (_gated(x[0], op.attrs["activation"]),)


def _add(_: Op, x: Sequence[Array], __: Sequence[F32], ___: Surroundings) -> tuple[F32, ...]:
    return (x[0] + x[1],)


def _scale(op: Op, x: Sequence[Array], _: Sequence[F32], __: Surroundings) -> tuple[F32, ...]:
    return (x[0] * np.float32(op.attrs["factor"]),)


def _softcap(op: Op, x: Sequence[Array], _: Sequence[F32], __: Surroundings) -> tuple[F32, ...]:
    cap = np.float32(op.attrs["cap"])
    return (cap * np.tanh(x[0] / cap),)


def _route(op: Op, x: Sequence[Array], w: Sequence[F32], _: Surroundings) -> tuple[F32, ...]:
    shares = _softmax(x[0] @ w[0].T)
    best = np.argsort(-shares, axis=-1, kind="stable")[:, : op.attrs["k"]]
    weights = np.take_along_axis(shares, best, axis=-1)
    if op.attrs["renormalise"]:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return (np.concatenate([best.astype(np.float32), weights], axis=-1),)


def _experts(op: Op, x: Sequence[Array], w: Sequence[F32], _: Surroundings) -> tuple[F32, ...]:
    h, routing = x
    gate_up, down = w
    k = routing.shape[1] // 2
    out = np.zeros((len(h), down.shape[1]), np.float32)
    for place in range(k):
        expert = routing[:, place].astype(np.int64)
        for e in np.unique(expert):
            rows = np.flatnonzero(expert == e)
            y = _gated(h[rows] @ gate_up[e].T, op.attrs["activation"]) @ down[e].T
            out[rows] += routing[rows, k + place, None] * y
    return (out,)


def _rows(_: Op, x: Sequence[Array], __: Sequence[F32], ___: Surroundings) -> tuple[F32, ...]:
    return (x[0][x[1]],)


MEANING: dict[str, Meaning] = {
    "embed": _embed,
    "norm": _norm,
    "linear": _linear,
    "qkv": _qkv,
    "rope": _rope,
    "attend": _attend,
    "glu": _glu,
    "add": _add,
    "scale": _scale,
    "softcap": _softcap,
    "route": _route,
    "experts": _experts,
    "rows": _rows,
}
