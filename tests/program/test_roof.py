"""The roof against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from headrace.program.cost import Load, total
from headrace.program.roof import Rates, least_seconds, multiplier
from headrace.runtime.load import prepare

FAST = 1e30


def test_memory_or_arithmetic_bounds_a_step(smollm2: Path) -> None:
    prepared = prepare(smollm2)
    program, sizes, load = prepared.program, prepared.sizes(), Load([1], [100], 1)
    cost = total(program, sizes, load)
    memory = Rates(40e9, {"int8": FAST, "f32": FAST})
    assert least_seconds(program, sizes, load, memory) == pytest.approx(cost.bytes / 40e9)
    attention = 30 * 100 * 2 * 9 * 64
    sums = Rates(FAST, {"int8": 4e9, "f32": 2e9})
    assert least_seconds(program, sizes, load, sums) == pytest.approx((cost.macs - attention) / 4e9 + attention / 2e9)


def test_each_op_is_bound_by_itself() -> None:
    """Time that memory spares in one op is no help to another."""
    prepared = prepare(tiny.TINY / "llama")
    program, sizes, load = prepared.program, prepared.sizes(), Load([9], [9], 1)
    rates = Rates(1e9, {"int8": 1e9, "bf16": 2e9, "f32": 1e9})
    cost = total(program, sizes, load)
    least = least_seconds(program, sizes, load, rates)
    assert max(cost.bytes, cost.macs) / 1e9 < least < (cost.bytes + cost.macs) / 1e9


@pytest.mark.parametrize(
    ("bytes_each", "bf16", "kind"), [(4, True, "f32"), (2, True, "bf16"), (2, False, "f32"), (1.06, True, "int8")]
)
def test_weights_choose_the_multiplier(bytes_each: float, bf16: bool, kind: str) -> None:
    program = prepare(tiny.TINY / "llama").program
    op = next(op for op in program.ops if op.kind == "linear")
    rows, columns = program.weights[op.weights[0]].shape
    assert multiplier(op, program, {op.weights[0]: int(rows * columns * bytes_each)}, bf16) == kind
