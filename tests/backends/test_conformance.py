"""What every back end must do: tiny programs, one for each op, against formulas written out here in float64.

A back end joins by a line in BACKENDS: its tolerance, as a share of the largest expected number. It is skipped where it
isn't built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest

from headrace.backends import Backend, Limits
from headrace.backends.registry import backend_named
from headrace.base.formats import COMPUTED, FORMATS, Format
from headrace.program import Part, Program, Recorder, Rope, Value, Weight, WeightData
from headrace.quant.blocks import dequantize, pack_random, quantize
from steps import World

BACKENDS = {"reference": 1e-5, "cpu": 0.03}
VOCAB, DIM, TOKENS = 96, 64, 40
LIMITS = Limits(tokens=64, sequences=2, pages=8, context=128, vocab=VOCAB)
F32 = FORMATS["f32"]

Arrays = dict[str, np.ndarray]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return backend_named(request.param)
    except (ImportError, AttributeError) as missing:
        pytest.skip(f"the {request.param} back end isn't built: {missing}")


class Given:
    """A `WeightSource` of arrays: float32 ones, or rows of blocks with their format."""

    def __init__(self, weights: dict[str, tuple[Weight, Format, np.ndarray]]) -> None:
        self._weights = weights

    def load(self, name: str) -> WeightData:
        weight, fmt, rows = self._weights[name]
        return WeightData(weight, (Part(fmt, rows),))

    def release(self, name: str) -> None:
        pass


def rows_of(a: np.ndarray) -> np.ndarray:
    flat = a.reshape(1 if a.ndim == 1 else prod(a.shape[:-1]), -1)
    return quantize(F32, flat)


Build = Callable[[Recorder, dict[str, Weight], Value], Value]
Expect = Callable[[np.ndarray, Arrays], np.ndarray]


@dataclass(frozen=True)
class Case:
    """build: from x [T, 64] to a value. expect: the same from x float64 [T, 64] of one sequence and the weights."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    build: Build
    expect: Expect
    scale: float = 1.0


def run(backend: Backend, case: Case, formats: dict[str, Format] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Logits of two sequences fed in uneven chunks, and what they should be."""
    rng = np.random.default_rng(len(case.name))
    width = _width(case)
    shapes = {"embed": (VOCAB, DIM), "head": (VOCAB, width), **case.shapes}
    given: dict[str, tuple[Weight, Format, np.ndarray]] = {}
    arrays: Arrays = {}
    for name, shape in shapes.items():
        fmt = (formats or {}).get(name, F32)
        if fmt is F32:
            values = rng.normal(size=shape) / (1 if len(shape) == 1 or name == "embed" else shape[-1] ** 0.5)
            stored = rows_of(values.astype(np.float32))
        else:
            stored = pack_random(fmt, prod(shape[:-1]), shape[-1], rng)
        given[name] = (Weight(name, shape), fmt, stored)
        arrays[name] = dequantize(fmt, stored).reshape(shape).astype(np.float64)
    executor = backend.executor(record(case, {n: w for n, (w, _, _) in given.items()}), Given(given), LIMITS)
    ids = [list(map(int, rng.integers(0, VOCAB, TOKENS))) for _ in range(2)]
    got = np.stack(World(executor, ids, LIMITS.pages).feed([{0: 7}, {0: 1, 1: 33}, {0: 32, 1: 1}, {1: 6}]))
    executor.close()
    want = [case.expect(arrays["embed"][row] * case.scale, arrays) @ arrays["head"].T for row in ids]
    return got, np.stack(want)


def record(case: Case, weights: dict[str, Weight]) -> Program:
    ops = Recorder(weights)
    y = case.build(ops, weights, ops.embed(ops.inputs.tokens, weights["embed"], case.scale))
    return ops.program(ops.linear(ops.rows(y, ops.inputs.logit_rows), weights["head"]))


def _width(case: Case) -> int:
    weights = {name: Weight(name, shape) for name, shape in {"embed": (VOCAB, DIM), **case.shapes}.items()}
    ops = Recorder(weights)
    return case.build(ops, weights, ops.embed(ops.inputs.tokens, weights["embed"])).width


def check(backend: Backend, case: Case, formats: dict[str, Format] | None = None) -> None:
    got, want = run(backend, case, formats)
    assert np.abs(got - want).max() <= BACKENDS[backend.name] * np.abs(want).max()


# --- the formulas -----------------------------------------------------------------------------------------------------


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turned(x: np.ndarray, rope: Rope, head_dim: int) -> np.ndarray:
    """Pairs as complex numbers: (i, i + rotary/2) times e^(i angle), row r at position r."""
    out = x.reshape(len(x), -1, head_dim).copy()
    half = rope.rotary // 2
    spun = (out[..., :half] + 1j * out[..., half : 2 * half]) * np.exp(
        1j * np.arange(len(x))[:, None, None] * rope.frequencies()
    )
    out[..., :half], out[..., half : 2 * half] = spun.real * rope.magnitude, spun.imag * rope.magnitude
    return out.reshape(x.shape)


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, head_dim: int, scale: float, window: int = 0, cap: float = 0.0
) -> np.ndarray:
    """Row by row, head by head, as the definition has it."""
    q, k, v = (a.reshape(len(a), -1, head_dim) for a in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros_like(q)
    for t in range(len(q)):
        first = max(0, t + 1 - window) if window else 0
        for h in range(q.shape[1]):
            scores = k[first : t + 1, h // group] @ q[t, h] * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            p = np.exp(scores - scores.max())
            out[t, h] = p / p.sum() @ v[first : t + 1, h // group]
    return out.reshape(len(q), -1)


def mixed(x: np.ndarray, w: Arrays, k: int, renormalise: bool) -> np.ndarray:
    out = np.zeros((len(x), w["down"].shape[1]))
    for t, row in enumerate(x):
        logits = w["router"] @ row
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        best = sorted(range(len(shares)), key=lambda e: (-shares[e], e))[:k]
        total = sum(shares[e] for e in best) if renormalise else 1.0
        for e in best:
            gate, up = np.split(w["gate_up"][e] @ row, 2)
            out[t] += shares[e] / total * (w["down"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def gelu(x: np.ndarray) -> np.ndarray:
    """x times the normal distribution up to x, by the trapezoid rule."""
    grid = np.linspace(-9, 9, 20001)
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    below = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2) * (grid[1] - grid[0])])
    return x * np.interp(x, grid, below)


ACTIVATED: dict[Any, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu": gelu,
}


def split(x: np.ndarray, w: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = np.split(x @ w["qkv"].T + w.get("b", 0), [64, 96], axis=1)
    return q, k, v


QKV = {"qkv": (128, DIM)}
HALF = Rope(rotary=16)


def attend_case(name: str, scale: float = 0.2, window: int = 0, softcap: float = 0.0) -> Case:
    return Case(
        name,
        QKV,
        lambda ops, w, x: ops.attend(
            *ops.qkv(x, w["qkv"], 4, 2, 16), layer=0, head_dim=16, scale=scale, window=window, softcap=softcap
        ),
        lambda x, w: attended(*split(x, w), 16, scale, window, softcap),
    )


def rope_case(name: str, rope: Rope) -> Case:
    def build(ops: Recorder, w: dict[str, Weight], x: Value) -> Value:
        q, k, v = ops.qkv(x, w["qkv"], 4, 2, 16)
        q, k = ops.rope(q, k, ops.inputs.positions, rope, 16)
        return ops.attend(q, k, v, layer=0, head_dim=16, scale=0.25)

    def expect(x: np.ndarray, w: Arrays) -> np.ndarray:
        q, k, v = split(x, w)
        return attended(turned(q, rope, 16), turned(k, rope, 16), v, 16, 0.25)

    return Case(name, QKV, build, expect)


def glu_case(activation: Any) -> Case:
    return Case(
        f"glu-{activation}",
        {"up": (2 * DIM, DIM)},
        lambda ops, w, x: ops.glu(ops.linear(x, w["up"]), activation),
        lambda x, w: ACTIVATED[activation]((x @ w["up"].T)[:, :DIM]) * (x @ w["up"].T)[:, DIM:],
    )


def experts_case(name: str, renormalise: bool) -> Case:
    return Case(
        name,
        {"router": (5, DIM), "gate_up": (5, 64, DIM), "down": (5, DIM, 32)},
        lambda ops, w, x: ops.experts(x, ops.route(x, w["router"], 2, renormalise), w["gate_up"], w["down"], "silu"),
        lambda x, w: mixed(x, w, 2, renormalise),
    )


CASES = [
    Case("embed", {}, lambda ops, w, x: x, lambda x, w: x),
    Case("embed-scale", {}, lambda ops, w, x: x, lambda x, w: x, scale=8.0),
    Case("norm", {"n": (DIM,)}, lambda ops, w, x: ops.norm(x, w["n"], 1e-5), lambda x, w: rms(x, w["n"])),
    Case(
        "norm-heads",
        {"n": (16,)},
        lambda ops, w, x: ops.norm(x, w["n"], 1e-5, heads=4),
        lambda x, w: rms(x.reshape(-1, 4, 16), w["n"]).reshape(x.shape),
    ),
    Case("linear", {"a": (96, DIM)}, lambda ops, w, x: ops.linear(x, w["a"]), lambda x, w: x @ w["a"].T),
    Case(
        "linear-bias-add",
        {"a": (DIM, DIM), "b": (DIM,)},
        lambda ops, w, x: ops.linear(x, w["a"], w["b"], add=x),
        lambda x, w: x @ w["a"].T + w["b"] + x,
    ),
    Case(
        "qkv-bias",
        {**QKV, "b": (128,)},
        lambda ops, w, x: ops.attend(*ops.qkv(x, w["qkv"], 4, 2, 16, w["b"]), layer=0, head_dim=16, scale=0.3),
        lambda x, w: attended(*split(x, w), 16, 0.3),
    ),
    attend_case("attend"),
    attend_case("attend-window", window=9),
    attend_case("attend-window-past-a-page", window=33),
    attend_case("attend-softcap", scale=3.0, softcap=2.0),
    rope_case("rope", Rope(rotary=16)),
    rope_case("rope-partial", Rope(rotary=8, theta=500.0)),
    rope_case("rope-linear", replace(HALF, kind="linear", factor=4.0)),
    rope_case("rope-llama3", replace(HALF, kind="llama3", factor=8.0, original=32)),
    rope_case("rope-yarn", replace(HALF, kind="yarn", factor=4.0, original=32)),
    rope_case("rope-factors", replace(HALF, freq_factors=tuple(1.0 + i for i in range(8)))),
    *map(glu_case, ACTIVATED),
    Case("add", {}, lambda ops, w, x: ops.add(x, ops.scale(x, 0.5)), lambda x, w: 1.5 * x),
    Case("scale", {}, lambda ops, w, x: ops.scale(x, -0.25), lambda x, w: -0.25 * x),
    Case("softcap", {}, lambda ops, w, x: ops.softcap(x, 0.7), lambda x, w: 0.7 * np.tanh(x / 0.7)),
    experts_case("experts", True),
    experts_case("experts-as-they-are", False),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ops(backend: Backend, case: Case) -> None:
    check(backend, case)


@pytest.mark.parametrize("fmt", [f for f in COMPUTED.values() if f.block <= 32], ids=lambda f: f.name)
def test_linear_in_every_format(backend: Backend, fmt: Format) -> None:
    case = next(c for c in CASES if c.name == "linear")
    check(backend, case, {"a": fmt})


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f.block == 256], ids=lambda f: f.name)
def test_linear_in_wide_blocks(backend: Backend, fmt: Format) -> None:
    def widened(x: np.ndarray, w: Arrays) -> np.ndarray:
        return (x @ w["up"].T) @ w["a"].T

    case = Case(
        "wide",
        {"up": (256, DIM), "a": (DIM, 256)},
        lambda ops, w, x: ops.linear(ops.linear(x, w["up"]), w["a"]),
        widened,
    )
    check(backend, case, {"a": fmt})


def test_embedding_and_head_in_blocks(backend: Backend) -> None:
    check(backend, CASES[0], {"embed": FORMATS["q8_0"], "head": FORMATS["q8_0"]})
