"""The cpu back end: right next to the reference, and the same bits whoever else is in the step, on any
number of threads and instruction sets, with merges or without, over any page table."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tiny
from headrace.backends import Executor, Limits
from headrace.backends.reference import ReferenceBackend
from headrace.base.errors import CapacityError, EngineError, SettingError
from headrace.base.formats import FORMATS
from headrace.program import Part, Program, Recorder, Rope, Step, Weight, WeightData
from headrace.quant.blocks import pack_random, quantize
from headrace.runtime.load import load_model, prepare
from steps import PAGE, World, sampling

native = pytest.importorskip("headrace._native", reason="the native module isn't built")
cpu = pytest.importorskip("headrace.backends.cpu")
threads_of = pytest.importorskip("headrace.backends.cpu.threads")

VOCAB, DIM, FFN = 80, 256, 256
ISAS = native.isa_names()
LIMITS = Limits(tokens=600, sequences=8, pages=96, context=1100, vocab=VOCAB, threads=2)


@dataclass(frozen=True)
class Shape:
    """A small model of one or two layers. formats: of embed, qkv (in two parts), o, gate_up, down and head; kv: of the
    cache."""

    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    window: int = 0
    cap: float = 0.0
    bias: bool = True
    layers: int = 1
    experts: int = 0
    formats: tuple[str, ...] = ("q8_0", "q4_1", "q6_k", "bf16", "q5_0", "q4_k", "q8_0")
    kv: str = "float16"
    mixed: bool = False  # the last layer sees everything


class Random:
    """A `WeightSource` of random rows in a shape's formats; the same for the same shape. edit: after they are made."""

    def __init__(self, shape: Shape, nan_token: int | None = None) -> None:
        self.shape, self.nan_token = shape, nan_token
        s = shape
        qkv = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.weights = {"embed": Weight("embed", (VOCAB, DIM)), "head": Weight("head", (VOCAB, DIM))}
        stack = (s.experts,) if s.experts else ()
        for i in range(s.layers):
            self._add(f"{i}.norm", (DIM,))
            self._add(f"{i}.qkv", (qkv, DIM))
            self._add(f"{i}.bias", (qkv,))
            self._add(f"{i}.o", (DIM, s.heads * s.head_dim))
            self._add(f"{i}.gate_up", (*stack, 2 * FFN, DIM))
            self._add(f"{i}.down", (*stack, DIM, FFN))
            self._add(f"{i}.router", (max(1, s.experts), DIM))

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        self.weights[name] = Weight(name, shape)

    def _formats(self, name: str) -> list[str]:
        places = {"embed": [0], "qkv": [1, 2], "o": [3], "gate_up": [4], "down": [5], "head": [6]}
        return [self.shape.formats[i] for i in places.get(name.split(".")[-1], [])] or ["f32"]

    def load(self, name: str) -> WeightData:
        weight = self.weights[name]
        rng = np.random.default_rng(sum(map(ord, name)))
        rows, columns = (1 if len(weight.shape) == 1 else prod(weight.shape[:-1])), weight.shape[-1]
        formats = self._formats(name)
        cuts = [rows * i // len(formats) // 16 * 16 for i in range(len(formats))] + [rows]
        parts = []
        for fmt, first, last in zip(formats, cuts, cuts[1:], strict=False):
            if last > first:
                parts.append(Part(FORMATS[fmt], self._rows(name, fmt, last - first, columns, rng)))
        return WeightData(weight, tuple(parts))

    def _rows(self, name: str, fmt: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
        values = rng.normal(size=(rows, columns)).astype(np.float32)
        if rows == 1:
            values = 1 + 0.1 * values
        elif name != "embed":
            values *= 1.5 / columns**0.5
        if name == "embed" and self.nan_token is not None:
            values[self.nan_token] = np.nan
        if fmt.startswith(("q4_k", "q5_k", "q6_k")):
            return pack_random(FORMATS[fmt], rows, columns, rng)
        return quantize(FORMATS[fmt], values)

    def release(self, name: str) -> None:
        pass


def record(shape: Shape, weights: Mapping[str, Weight]) -> Program:
    ops, w = Recorder(weights), weights
    rope = Rope(rotary=max(2, shape.head_dim // 4 * 2))
    x = ops.embed(ops.inputs.tokens, w["embed"], 0.7)
    for i in range(shape.layers):
        window = 0 if shape.mixed and i == shape.layers - 1 else shape.window
        h = ops.norm(x, w[f"{i}.norm"], 1e-5)
        bias = w[f"{i}.bias"] if shape.bias else None
        q, k, v = ops.qkv(h, w[f"{i}.qkv"], shape.heads, shape.kv_heads, shape.head_dim, bias)
        q, k = ops.rope(q, k, ops.inputs.positions, rope, shape.head_dim)
        a = ops.attend(q, k, v, i, shape.head_dim, shape.head_dim**-0.5, window, shape.cap)
        x = ops.linear(a, w[f"{i}.o"], add=x)
        h = ops.norm(x, w[f"{i}.norm"], 1e-5)
        if shape.experts:
            routing = ops.route(h, w[f"{i}.router"], 2, True)
            x = ops.add(x, ops.experts(h, routing, w[f"{i}.gate_up"], w[f"{i}.down"], "silu"))
        else:
            x = ops.linear(ops.glu(ops.linear(h, w[f"{i}.gate_up"]), "gelu_tanh"), w[f"{i}.down"], add=x)
        x = ops.scale(x, 0.9)
    x = ops.norm(ops.rows(x, ops.inputs.logit_rows), w["0.norm"], 1e-5)
    return ops.program(ops.softcap(ops.linear(x, w["head"]), 30.0))


FLOATS = ("f32",) * 7
MOE = Shape(experts=4, layers=2, formats=("q8_0", "q4_1", "q8_0", "q4_0", "q5_1", "q4_k", "q8_0"))
SHAPES = {
    "gqa": Shape(layers=2),
    "window": Shape(heads=4, kv_heads=2, head_dim=32, window=40),
    "cap": Shape(heads=2, kv_heads=2, head_dim=80, cap=20.0, bias=False),
    "wide": Shape(heads=2, kv_heads=1, head_dim=256),
    "odd": Shape(
        heads=9, kv_heads=1, head_dim=10, window=300, formats=("f16", "bf16", "f32", "f16", "q5_1", "q5_k", "q4_0")
    ),
    "moe": MOE,
}
SHAPES |= {f"{name}, int8": replace(SHAPES[name], kv="int8") for name in ("gqa", "window", "cap", "wide", "odd")}
SHAPES |= {f"{name}, bfloat16": replace(SHAPES[name], kv="bfloat16") for name in ("gqa", "window", "odd")}


def executor(shape: Shape, limits: Limits = LIMITS, nan_token: int | None = None, **options: object) -> Executor:
    source = Random(shape, nan_token)
    return cpu.CpuBackend(kv=shape.kv, **options).executor(record(shape, source.weights), source, limits)


def ids(n: int, seed: int = 0) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(1, VOCAB, n)))


def alone(shape: Shape, sequence: Sequence[int], limits: Limits = LIMITS, **options: object) -> np.ndarray:
    """A sequence's logits, computed in one step after the other of up to 600 rows."""
    made = executor(shape, limits, **options)
    steps = [{0: min(limits.tokens, len(sequence) - at)} for at in range(0, len(sequence), limits.tokens)]
    got = World(made, [sequence], limits.pages).feed(steps)[0]
    made.close()
    return got


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [2, 10, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (37, 0.0), (1, 0.0), (0, 15.0)])
def test_attention_is_that_of_the_reference(head_dim: int, window: int, cap: float) -> None:
    shape = Shape(heads=3, kv_heads=1, head_dim=head_dim, window=window, cap=cap, formats=FLOATS)
    source = Random(shape)
    want = World(
        ReferenceBackend().executor(record(shape, source.weights), source, LIMITS), [ids(300)], LIMITS.pages
    ).feed([{0: 300}])[0]
    assert np.abs(alone(shape, ids(300)) - want).max() < 0.02  # the rounding of keys and values


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head_dim", [2, 10, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (37, 0.0), (1, 0.0), (0, 15.0)])
def test_attention_over_rounded_pages_is_that_of_the_reference(
    head_dim: int, window: int, cap: float, bias: bool, kv: str
) -> None:
    """Far closer than to float32: the same numbers, but where a sum's last bits decide, and over int8 pages 14 bits or
    more of queries and weights."""
    shape = Shape(3, 1, head_dim, window, cap, bias, formats=FLOATS, kv=kv)
    source, program = Random(shape), record(shape, Random(shape).weights)
    want, exact = (
        World(ReferenceBackend(cache).executor(program, source, LIMITS), [ids(300)], LIMITS.pages).feed([{0: 300}])[0]
        for cache in (kv, "float32")
    )
    got = alone(shape, ids(300))
    assert np.abs(got - exact).max() < 0.3
    assert np.abs(got - want).mean() < 0.1 * np.abs(got - exact).mean()


class Loud(Random):
    """Some of its values lie beyond float16."""

    def _rows(self, name: str, fmt: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
        rows_ = super()._rows(name, fmt, rows, columns, rng)
        if name.endswith("bias"):
            rows_.view(np.float32)[..., -8:] *= 1e5
        return rows_


@pytest.mark.parametrize("kv", ["float16", "bfloat16", "int8"])
def test_values_that_are_too_large_are_told_and_bfloat16_holds_them(kv: str) -> None:
    shape = Shape(formats=FLOATS, kv=kv)
    source = Loud(shape)
    program = record(shape, source.weights)
    want, got = (
        World(backend.executor(program, source, LIMITS), [ids(40)], LIMITS.pages).feed([{0: 40}])[0]
        for backend in (ReferenceBackend("float32"), cpu.CpuBackend(kv=kv))
    )
    assert np.isfinite(want).all()
    if kv == "float16":
        assert not np.isfinite(got).any()
    else:
        assert np.abs(got - want).max() < 0.3


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_tiny_checkpoints(kind: str) -> None:
    """bfloat16 files with float32 inputs: what is left is the cache's f16."""
    tokens, logits = tiny.expected(kind)
    loaded = load_model(prepare(tiny.TINY / kind), cpu.CpuBackend(), tiny.LIMITS)
    got = World(loaded.executor, tokens, tiny.LIMITS.pages).feed([{0: 7, 1: 20}, {0: 1, 1: 1}, {0: 40, 1: 27}])
    error = float(np.abs(np.stack(got) - logits).max())
    assert error <= 0.02, error
    loaded.executor.close()


@pytest.mark.parametrize("isa", native.isa_names())
def test_bf16_inputs_are_close_and_the_same_on_every_instruction_set(isa: str) -> None:
    """Not for expert models: a rounded input can choose another expert."""
    tokens, logits = tiny.expected("llama")
    runs = []
    for back in (cpu.CpuBackend(isa, bf16=True), cpu.CpuBackend(native.isa_names()[0], bf16=True)):
        loaded = load_model(prepare(tiny.TINY / "llama"), back, tiny.LIMITS)
        runs.append(np.stack(World(loaded.executor, tokens, tiny.LIMITS.pages).feed([{0: 48, 1: 48}])))
        loaded.executor.close()
    np.testing.assert_array_equal(runs[0], runs[1])
    assert 1e-3 < np.abs(runs[0] - logits).max() < 0.5


def test_greedy_takes_the_largest_logit_and_reports_its_probability() -> None:
    made = executor(SHAPES["gqa"])
    out = World(made, [ids(70)], LIMITS.pages).step({0: 70})
    assert out.logits is not None and out.logits.shape == (70, VOCAB)
    assert np.array_equal(out.tokens, out.logits.argmax(-1))
    z = out.logits.astype(np.float64)
    logprob = z.max(-1) - np.log(np.exp(z).sum(-1))
    assert np.allclose(out.logprob, logprob, atol=1e-5) and set(out.rank) == {1} and not out.status.any()


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_merges_change_no_bit(name: str) -> None:
    assert same(alone(SHAPES[name], ids(330)), alone(SHAPES[name], ids(330), merge=False))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(name: str, threads: int) -> None:
    limits = replace(LIMITS, threads=threads)
    assert same(alone(SHAPES[name], ids(70)), alone(SHAPES[name], ids(70), limits))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("isa", ISAS[1:])
def test_instruction_sets_change_no_bit(name: str, isa: str) -> None:
    assert same(alone(SHAPES[name], ids(70), isa=ISAS[0]), alone(SHAPES[name], ids(70), isa=isa))


@pytest.mark.parametrize("isa", ISAS[1:])
def test_instruction_sets_agree_over_several_splits(isa: str) -> None:
    shape = Shape(head_dim=64, formats=FLOATS, cap=10.0, window=400)
    feed = [{0: 600}, {0: 1}, {0: 7}]
    both = [World(executor(shape, isa=name), [ids(608)], LIMITS.pages).feed(feed)[0] for name in (ISAS[0], isa)]
    assert same(*both)


LENGTHS = (31, 32, 33, 63, 255, 256, 257, 511, 512, 513)


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_at_a_time_gives_the_bits_of_one_step_around_every_edge(name: str) -> None:
    sequence = ids(520)
    whole = alone(SHAPES[name], sequence)
    made = executor(SHAPES[name])
    for length in LENGTHS:
        world = World(made, [sequence], LIMITS.pages, seed=length)
        got = world.feed([{0: length - 2}, {0: 1}, {0: 1}, {0: 2}])[0]
        assert same(got, whole[: length + 2]), length


MANY = ("gqa", "window", "moe", "gqa, int8", "window, int8")


@pytest.fixture(scope="module")
def references() -> dict[str, list[np.ndarray]]:
    return {name: [alone(SHAPES[name], ids(n, n)) for n in SEQUENCES] for name in MANY}


SEQUENCES = (40, 300, 7, 560)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", MANY)
def test_a_row_is_the_same_in_any_company(
    name: str, references: dict[str, list[np.ndarray]], data: st.DataObject
) -> None:
    """Random chunks, random sets of sequences, random page tables: every row's logits equal those of the row alone."""
    made = EXECUTORS.setdefault(name, executor(SHAPES[name]))
    world = World(made, [ids(n, n) for n in SEQUENCES], LIMITS.pages, seed=data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(1, 8))):
        counts = {}
        for b in data.draw(st.permutations(range(len(SEQUENCES)))):
            left = min(SEQUENCES[b] - world.computed[b], LIMITS.tokens - sum(counts.values()))
            if left > 0 and data.draw(st.booleans()):
                counts[b] = data.draw(st.integers(1, left) | st.just(1))
        if counts:
            world.step(counts)
    for rows, want in zip(world.logits, references[name], strict=True):
        if rows:
            assert same(np.stack(rows), want[: len(rows)])


EXECUTORS: dict[str, Executor] = {}


def test_long_contexts_are_cut_for_threads_without_a_trace() -> None:
    """One row over four splits, on two threads: cut. Among long company: not cut. The same bits."""
    limits = replace(LIMITS, pages=150, tokens=1100)
    shape = Shape(head_dim=64, kv_heads=1, heads=3)
    sequence = ids(1000)
    whole = alone(shape, sequence, limits)
    world = World(executor(shape, limits), [sequence, ids(1000, 5)], limits.pages)
    world.feed([{0: 998, 1: 20}, {0: 1}, {0: 1, 1: 900}])
    assert same(np.stack(world.logits[0]), whole)


GROUPS = {  # by query heads for each kv head
    "3": Shape(heads=6, kv_heads=2, head_dim=64, formats=FLOATS),
    "7": Shape(heads=7, kv_heads=1, head_dim=32, window=600, formats=FLOATS),
    "8": Shape(heads=8, kv_heads=1, head_dim=80, formats=FLOATS),
    "26": Shape(heads=26, kv_heads=1, head_dim=10, cap=9.0, formats=FLOATS),
}
GROUPS |= {f"{name}, int8": replace(GROUPS[name], kv="int8") for name in ("3", "7")}
FAMILY = replace(LIMITS, pages=200)


@settings(max_examples=12, deadline=None, phases=(Phase.reuse, Phase.generate))  # an example is too long to be shrunk
@given(data=st.data())
@pytest.mark.parametrize("name", GROUPS)
def test_pages_in_common_are_read_together_without_a_trace(name: str, data: st.DataObject) -> None:
    """Sequences that begin with pages of others: their rows have the same bits together as one sequence at a time."""
    made = EXECUTORS.setdefault(name, executor(GROUPS[name], FAMILY))
    world = World(made, [ids(790)], FAMILY.pages, seed=data.draw(st.integers(0, 1000)))
    world.feed([{0: 600}, {0: 190}])
    rows = {}
    for b in range(1, data.draw(st.integers(3, 8))):
        parent = data.draw(st.integers(0, b - 1))
        pages = data.draw(st.sampled_from([7, 8, 9, 15, 16, 17, 24, 0]) | st.integers(0, 24))
        pages = min(pages, world.computed[parent] // PAGE)
        own, rows[b] = data.draw(st.integers(1, 260)), data.draw(st.sampled_from([1, 1, 1, 2, 5, 40]))
        world.sequences = [*world.sequences, [*world.sequences[parent][: pages * PAGE], *ids(own + rows[b], b)]]
        world.tables.append(list(world.tables[parent][:pages]))
        world.computed.append(pages * PAGE)
        world.logits.append([])
        world.step({b: own})
    together = world.step(rows).logits
    for b, n in rows.items():
        world.computed[b] -= n
        assert same(world.step({b: n}).logits, together[:n])
        together = together[n:]


# --- what must not matter ---------------------------------------------------------------------------------------------


def test_what_lay_in_a_page_before_does_not_matter() -> None:
    """Pages full of NaN are taken over without being zeroed."""
    shape, sequence = SHAPES["gqa"], ids(50)
    made = executor(shape, nan_token=0)
    spoiled = World(made, [[0] * 600], LIMITS.pages)
    assert set(spoiled.step({0: 600}).status) == {1}
    world = World(made, [sequence], LIMITS.pages)
    world._free = list(spoiled.tables[0])
    got = []
    for n in (20, 1, 29):
        tables, at = world.tables[0], world.computed[0]
        while len(tables) * PAGE < at + n:
            tables.append(world._free.pop())  # taken here, so that no step lists it as fresh
        got.append(world.step({0: n}).logits)
    clean = World(executor(shape, nan_token=0), [sequence], LIMITS.pages).feed([{0: 50}])[0]
    assert same(np.concatenate(got), clean) and np.isfinite(clean).all()


NEAR = {
    "40": Shape(heads=4, kv_heads=2, head_dim=32, window=40, layers=2, mixed=True),
    "300": Shape(heads=6, kv_heads=2, head_dim=64, window=300, layers=2, mixed=True),
    "32, all layers": Shape(heads=2, kv_heads=1, head_dim=32, window=32, layers=2),
}
NEAR |= {f"{name}, {kv}": replace(NEAR[name], kv=kv) for name in ("40", "300") for kv in ("int8", "bfloat16")}


@pytest.mark.parametrize("name", NEAR)
def test_what_has_left_the_window_does_not_matter(name: str) -> None:
    """Slots that no row to come sees are filled with NaN after each step, and taken again: no bit differs."""
    shape, sequence = NEAR[name], ids(700)
    limits = replace(LIMITS, slots=60)
    whole = alone(shape, sequence)
    made = executor(shape, limits, nan_token=0)
    world = World(made, [sequence, ids(90, 3)], limits.pages, seed=5, slots=30, window=shape.window)
    for counts in ({0: 70}, {0: 1, 1: 50}, *[{0: 1, 1: 1}] * 5, {0: 300}, {0: 33, 1: 7}, {0: 264}, *[{0: 1}] * 27):
        world.step(counts)
        world.spoil(0)
    assert same(np.stack(world.logits[0]), whole) and np.isfinite(whole).all()
    assert same(np.stack(world.logits[1]), alone(shape, ids(90, 3))[:62])
    assert len(world._free_slots) >= 30 - 2 * (1 + -(-shape.window // PAGE)), "slots have not come back"


def test_what_has_left_the_window_does_not_matter_to_the_reference() -> None:
    shape, sequence = replace(NEAR["40"], formats=FLOATS), ids(200)
    source = Random(shape, nan_token=0)
    program, made = record(shape, source.weights), ReferenceBackend()
    whole = World(made.executor(program, source, LIMITS), [sequence], LIMITS.pages).feed([{0: 200}])[0]
    slotted = made.executor(program, source, replace(LIMITS, slots=12))
    world = World(slotted, [sequence], LIMITS.pages, slots=12, window=shape.window)
    for n in (150, 1, 30, *[1] * 19):
        world.step({0: n})
        world.spoil(0)
    assert np.allclose(np.stack(world.logits[0]), whole, rtol=1e-3, atol=1e-3)
    assert slotted.slot_bytes == made.window_bytes(program) == made.page_bytes(program) - slotted.page_bytes > 0


def test_a_later_token_of_the_same_sequence_does_not_matter() -> None:
    """A NaN in a row shows in its own status and in later rows; the row before shares its tile and stays clean."""
    made, sequence = executor(SHAPES["gqa"], nan_token=0), [*ids(9), 0, 5]
    out = World(made, [sequence], LIMITS.pages).step({0: 11})
    clean = World(made, [sequence], LIMITS.pages).step({0: 9})
    assert out.logits is not None and clean.logits is not None
    assert same(out.logits[:9], clean.logits) and list(out.status) == [0] * 9 + [1, 1]


def test_fresh_pages_are_zeroed_and_others_are_kept() -> None:
    made, sequence = executor(SHAPES["gqa"]), ids(64)
    world = World(made, [sequence], LIMITS.pages)
    world.step({0: 63})
    other = World(made, [ids(3, 9)], LIMITS.pages)
    other._free = [p for p in range(LIMITS.pages) if p not in world.tables[0]]
    other.step({0: 3})
    assert same(np.stack(world.feed([{0: 1}])[0]), alone(SHAPES["gqa"], sequence))


@pytest.mark.parametrize("back_end", ["reference", 1, 2, 5])
def test_pages_are_copied_in_order_and_before_others_are_zeroed(back_end: str | int) -> None:
    """The second page goes to a third and on to a fourth, and is then taken and zeroed for another sequence."""
    shape = SHAPES["gqa"]
    source = Random(shape)
    made = (
        ReferenceBackend().executor(record(shape, source.weights), source, LIMITS)
        if back_end == "reference"
        else executor(shape, replace(LIMITS, threads=int(back_end)))
    )
    old, other = ids(60), ids(20, 1)
    new = [*old[:45], *ids(9, 2)]
    world = World(made, [old, new, other], LIMITS.pages)
    world.step({0: 60})
    first, second = world.tables[0]
    third, fourth = world._free.pop(), world._free.pop()
    world.tables[1], world.computed[1] = [first, fourth], 45
    world._free.append(second)
    world.step({1: 9, 2: 20}, copies=[(second, third), (third, fourth)])
    assert world.tables[2] == [second]
    fresh = World(made, [new, other], LIMITS.pages)
    fresh.step({0: 54})
    fresh.step({1: 20})
    got, want = [*world.logits[1], *world.logits[2]], [*fresh.logits[0][45:], *fresh.logits[1]]
    assert np.allclose(got, want, atol=1e-4) if back_end == "reference" else same(np.stack(got), np.stack(want))


# --- what is refused --------------------------------------------------------------------------------------------------


def step_of(rows: int = 4) -> Step:
    a = [np.asarray(x, np.int32) for x in (ids(rows), range(rows), [0, rows], [rows], [0, 1], [3], [3], [rows - 1])]
    return Step(*a, sampling(1, VOCAB), keep_logits=True)


I32 = np.int32
WRONG = {
    "token beyond the table": {"tokens": np.array([1, 2, 3, VOCAB], I32)},
    "negative token": {"tokens": np.array([1, -2, 3, 4], I32)},
    "no tokens": {"tokens": np.zeros(0, I32)},
    "wrong type": {"tokens": np.array([1, 2, 3, 4], np.int64)},
    "float tokens": {"tokens": np.array([1, 2, 3, 4], np.float32)},
    "wrong dimensions": {"tokens": np.ones((2, 2), I32)},
    "no array": {"tokens": None},
    "strided": {"tokens": np.ones(8, I32)[::2]},
    "positions too short": {"positions": np.arange(3, dtype=I32)},
    "positions that jump": {"positions": np.array([0, 1, 3, 4], I32)},
    "positions beyond the context": {"positions": np.arange(1, 5, dtype=I32)},
    "negative positions": {"positions": np.arange(-1, 3, dtype=I32), "context": np.array([3], I32)},
    "context too long": {"context": np.array([LIMITS.context + 1], I32)},
    "rows that don't add up": {"query_start": np.array([0, 3], I32)},
    "rows that go back": {"query_start": np.array([0, 5, 4], I32), "context": np.array([5, 1], I32)},
    "a sequence without rows": {
        "query_start": np.array([0, 4, 4], I32),
        "context": np.array([4, 1], I32),
        "page_indptr": np.array([0, 1, 1], I32),
    },
    "pages missing": {"pages": np.zeros(0, I32), "page_indptr": np.array([0, 0], I32)},
    "page beyond the cache": {"pages": np.array([LIMITS.pages], I32)},
    "fresh page beyond the cache": {"fresh": np.array([LIMITS.pages], I32)},
    "copy from beyond the cache": {"copies": np.array([[LIMITS.pages, 0]], I32)},
    "copy to before the cache": {"copies": np.array([[0, -1]], I32)},
    "copies of three": {"copies": np.zeros((2, 3), I32)},
    "copies in a row": {"copies": np.zeros(2, I32)},
    "page table beyond pages": {"page_indptr": np.array([0, 2], I32)},
    "logits row beyond the rows": {"logit_rows": np.array([4], I32)},
    "logits rows twice": {"logit_rows": np.array([1, 1], I32), "sampling": sampling(2, VOCAB)},
    "sampling of too many rows": {"sampling": sampling(2, VOCAB)},
    "target beyond the vocabulary": {"sampling": sampling(1, VOCAB, target=np.array([VOCAB], I32))},
    "bias beyond the vocabulary": {
        "sampling": sampling(
            1,
            VOCAB,
            bias_indptr=np.array([0, 1], I32),
            bias_ids=np.array([VOCAB], I32),
            bias_values=np.zeros(1, np.float32),
        )
    },
    "bias without values": {
        "sampling": sampling(1, VOCAB, bias_indptr=np.array([0, 1], I32), bias_ids=np.array([1], I32))
    },
    "mask that isn't there": {"sampling": sampling(1, VOCAB, mask_rows=np.array([0], I32))},
    "mask too narrow": {"sampling": sampling(1, VOCAB, mask_rows=np.array([0], I32), masks=np.zeros((1, 2), I32))},
    "seed of the wrong type": {"sampling": sampling(1, VOCAB, seed=np.zeros(1, np.int64))},
}


@pytest.fixture(scope="module")
def small() -> Executor:
    return executor(Shape())


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_step_is_refused_and_changes_nothing(what: str, small: Executor) -> None:
    before = small.run(step_of())
    with pytest.raises(EngineError):
        small.run(replace(step_of(), **WRONG[what]))
    rest = step_of()
    after = small.run(replace(rest, tokens=rest.tokens[-1:], positions=rest.positions[-1:], fresh=np.zeros(0, I32),
                              query_start=np.array([0, 1], I32), logit_rows=np.zeros(1, I32)))  # fmt: skip
    assert before.logits is not None and after.logits is not None and same(before.logits, after.logits)


EDGES = (-(2**31), -1, 0, 1, 4, 31, 32, VOCAB - 1, VOCAB, LIMITS.pages, LIMITS.context, LIMITS.context + 1, 2**31 - 1)
FULL = {  # every list of the sampling in use
    "bias_indptr": np.array([0, 1], I32),
    "bias_ids": np.array([3], I32),
    "bias_values": np.ones(1, np.float32),
    "penalty_indptr": np.array([0, 2], I32),
    "penalty_ids": np.array([3, 4], I32),
    "penalty_counts": np.array([0, 4], I32),
    "repetition": np.full(1, 1.2, np.float32),
    "temperature": np.ones(1, np.float32),
    "logprobs": np.full(1, 3, I32),
    "mask_rows": np.zeros(1, I32),
    "masks": np.full((1, -(-VOCAB // 32)), -1, I32),
}
ARRAYS = [f.name for f in fields(Step) if f.name not in ("sampling", "keep_logits", "taps")]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_numbers_come_a_step_runs_or_is_refused(data: st.DataObject, small: Executor) -> None:
    step = replace(step_of(), sampling=sampling(1, VOCAB, **FULL))
    for _ in range(data.draw(st.integers(1, 3))):
        in_step = data.draw(st.booleans())
        owner = step if in_step else step.sampling
        name = data.draw(st.sampled_from(ARRAYS if in_step else [f.name for f in fields(step.sampling)]))
        values = getattr(owner, name).copy()
        if data.draw(st.booleans()):
            values = np.resize(values, (data.draw(st.integers(0, 6)), *values.shape[1:]))
        if values.size:
            edge = data.draw(st.sampled_from(EDGES)) if values.dtype == I32 else data.draw(st.sampled_from((0, 1, 2)))
            values.reshape(-1)[data.draw(st.integers(0, values.size - 1))] = edge
        owner = replace(owner, **{name: values})
        step = owner if isinstance(owner, Step) else replace(step, sampling=owner)
    try:
        out = small.run(step)
    except EngineError:
        return
    assert ((out.tokens >= 0) & (out.tokens < VOCAB)).all()


def test_steps_larger_than_the_limits_are_refused(small: Executor) -> None:
    with pytest.raises(EngineError, match="tokens"):
        small.run(step_of(LIMITS.tokens + 1))


def test_settings_that_cannot_work_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="choose one of"):
        executor(Shape(), isa="sse9")
    monkeypatch.setenv("HEADRACE_ISA", "sse8")
    with pytest.raises(SettingError, match="'sse8' of HEADRACE_ISA"):
        executor(Shape())
    monkeypatch.setenv("HEADRACE_ISA", "scalar")
    assert executor(Shape()).isa == "scalar"
    monkeypatch.delenv("HEADRACE_ISA")
    with pytest.raises(SettingError, match="head"):
        executor(Shape(head_dim=258))
    with pytest.raises(CapacityError, match="pages"):
        executor(Shape(), replace(LIMITS, pages=2**31 - 1))


def test_closing_waits_for_nobody_and_a_running_step_ends_as_it_would() -> None:
    shape = replace(SHAPES["gqa"], layers=4)
    whole = alone(shape, ids(500))
    for pause in range(6):
        made = executor(shape)
        world = World(made, [ids(500)], LIMITS.pages)
        with ThreadPoolExecutor(1) as other:
            running = other.submit(world.step, {0: 500})
            time.sleep(0.001 * pause)
            made.close()
        try:
            running.result()
        except EngineError as e:
            assert "closed" in str(e)  # it had not begun
        else:
            assert same(np.stack(world.logits[0]), whole)


def test_without_threads_or_memory_nothing_is_left_behind() -> None:
    """In a process of its own, with little address space."""
    code = (
        "import resource, threading, time; from test_cpu import *;"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "import gc\n"
        "for limits in replace(LIMITS, threads=256), replace(LIMITS, tokens=1 << 22):\n"
        "    try: executor(Shape(), limits)\n"
        "    except CapacityError as e: print(e)\n"
        "    gc.collect()\n"
        "made = executor(Shape(), replace(LIMITS, threads=2)); made.run(step_of()); made.close()\n"
        "print(len(list(Path('/proc/self/task').iterdir())))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    env = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    threads, memory, left = done.stdout.splitlines()
    assert "fewer threads" in threads and "memory" in memory and left == "1"


def test_no_rounding_mode_of_others_reaches_a_step() -> None:
    libm, made = ctypes.CDLL("libm.so.6"), executor(SHAPES["gqa"])
    want = World(made, [ids(40)], LIMITS.pages).feed([{0: 40}])[0]
    upward = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine())
    assert upward is None or libm.fesetround(upward) == 0
    try:
        got = World(made, [ids(40)], LIMITS.pages).feed([{0: 40}])[0]
    finally:
        libm.fesetround(0)
    assert same(got, want)


def test_a_closed_executor_is_closed() -> None:
    made = executor(Shape())
    made.close()
    made.close()
    with pytest.raises(EngineError, match="closed"):
        made.run(step_of())


# --- taps -------------------------------------------------------------------------------------------------------------


def test_values_can_be_tapped_without_merges() -> None:
    shape = Shape(layers=2, formats=FLOATS)
    source = Random(shape)
    program = record(shape, source.weights)
    names = [v.name for op in program.ops for v in op.outputs]
    taps = tuple(n for n in names if not n.startswith("embed"))
    want = World(ReferenceBackend().executor(program, source, LIMITS), [ids(40)], LIMITS.pages)
    got = World(executor(shape, merge=False), [ids(40)], LIMITS.pages)
    expected, tapped = want.step({0: 40}, taps).taps, got.step({0: 40}, taps).taps
    assert set(tapped) == set(expected) == set(taps)
    for name in taps:
        assert np.abs(tapped[name] - expected[name]).max() < 0.005 * np.abs(expected[name]).max(), name


def test_taps_need_merges_off_and_names_that_exist() -> None:
    with pytest.raises(SettingError, match="merge"):
        executor(Shape()).run(replace(step_of(), taps=("norm1",)))
    with pytest.raises(SettingError, match="norm999"):
        executor(Shape(), merge=False).run(replace(step_of(), taps=("norm999",)))


# --- threads ----------------------------------------------------------------------------------------------------------


def test_an_idle_executor_uses_no_processor(small: Executor) -> None:
    small.run(step_of())
    time.sleep(0.3)  # numpy's own threads spin for a while
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_a_forked_child_ends_and_cannot_run() -> None:
    made = executor(Shape())
    made.run(step_of())
    child = os.fork()
    if child == 0:
        try:
            made.run(step_of())
        except EngineError:
            made.close()
            os._exit(7)
        os._exit(1)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 7 and done[0] == child
    assert made.run(step_of()).status[0] == 0


def prompt_logits(made: Executor) -> bytes:
    """Of a fresh sequence in nine steps."""
    world = World(made, [ids(40)], LIMITS.pages)
    return world.feed([{0: n} for n in (1, 2, 3, 4, 5, 6, 7, 8, 4)])[0].tobytes()


def test_signals_during_steps_reach_their_handler_and_change_no_bit(small: Executor) -> None:
    want, rung = prompt_logits(small), []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        deadline = time.monotonic() + 20
        while len(rung) < 20 and time.monotonic() < deadline:
            assert prompt_logits(small) == want
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(rung) >= 20


def test_executors_of_one_process_run_side_by_side() -> None:
    """Four at once, each with more threads than its share of the processors: the bits of one alone."""
    made = [executor(Shape(), replace(LIMITS, threads=3)) for _ in range(4)]
    want = prompt_logits(made[0])
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda e: [prompt_logits(e) for _ in range(3)], made):
            assert got == [want] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_processors_may_be_taken_away_while_it_lives(small: Executor) -> None:
    want, allowed = prompt_logits(small), os.sched_getaffinity(0)
    threads = [int(t) for t in os.listdir("/proc/self/task")]

    def allow(processors: set[int]) -> None:
        for t in threads:
            with suppress(ProcessLookupError):  # one of another test has ended
                os.sched_setaffinity(t, processors)

    try:
        allow({min(allowed)})
        start = time.monotonic()
        assert [prompt_logits(small) for _ in range(5)] == [want] * 5
        assert time.monotonic() - start < 20
    finally:
        allow(allowed)


@dataclass(frozen=True)
class Group:
    files: dict[str, str]
    listing: str = "0::/\n"
    expect: float | None = None
    name: str = field(default="", compare=False)


@pytest.mark.parametrize(
    "group",
    [
        Group({}, expect=None),
        Group({"cpu.max": "max 100000\n"}, expect=None),
        Group({"cpu.max": "150000 100000\n"}, expect=1.5),
        Group({"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 0.5),
        Group({"a/b/cpu.max": "300000 100000"}, "12:cpu:/x\n0::/a/b\n", 3.0),
        Group({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", 2.0),
        Group({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", None),
        Group({"cpu.max": "nonsense"}, expect=None),
        Group(
            {"cpu/a/b/cpu.cfs_quota_us": "50000", "cpu/a/b/cpu.cfs_period_us": "100000", "cpu.max": "max 100000"},
            "4:cpu,cpuacct:/a/b\n1:name=systemd:/x\n",
            0.5,
        ),
        Group(
            {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000", "cpu.max": "20000 100000"},
            "4:cpu:/docker/not/seen/here\n0::/nor/this\n",
            0.2,
        ),
        Group({"cpu.max": "70000 100000"}, "0::relative\nshort\n\n", 0.7),
    ],
)
def test_a_control_groups_quota_is_kept(group: Group, tmp_path: Path) -> None:
    for name, text in group.files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    listing = tmp_path / "listing"
    listing.write_text(group.listing)
    assert threads_of.quota(tmp_path, listing) == group.expect


def test_two_processors_of_one_core_count_once(tmp_path: Path) -> None:
    for processor, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert threads_of.cores({0, 1, 2, 3}, tmp_path) == 2
    assert threads_of.cores({0, 2}, tmp_path) == 1
    assert threads_of.cores({0, 2, 8, 9}, tmp_path) == 3  # of 8 and 9 nothing is known


def test_threads_are_at_least_one_and_no_more_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= threads_of.default_threads() <= native.allowed_processors()
    monkeypatch.setattr(threads_of, "quota", lambda: 0.2)
    assert threads_of.default_threads() == 1
