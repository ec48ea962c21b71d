"""How fast a step could be: its bytes and multiply-adds (`cost`) against the rates of a machine.

Owes: a bound that no order of work beats: every op takes at least as long as memory needs for what it reads, and as
the multipliers need for its products. Does not know: threads, barriers, caches that hold weights from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from headrace.program.cost import Load, Sizes, costs
from headrace.program.program import Op, Program


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does at best. bytes: read a second. macs: multiply-adds a second of "int8", "bf16", "f32"."""

    bytes: float
    macs: Mapping[str, float]


def multiplier(op: Op, program: Program, sizes: Sizes, bf16: bool = False) -> str:
    """Which of `Rates.macs` an op uses: int8 with weights of less than two bytes, else float32.

    bf16: inputs of weights of two bytes are rounded to bf16 too.
    """
    elements = sum(prod(program.weights[w].shape) for w in op.weights)
    stored = sum(sizes[w] for w in op.weights)
    if not elements or stored > 2 * elements:
        return "f32"
    return "int8" if stored < 2 * elements else "bf16" if bf16 else "f32"


def least_seconds(program: Program, sizes: Sizes, load: Load, rates: Rates, bf16: bool = False) -> float:
    """The sum over ops of the longer of two times: to read its bytes, to do its multiply-adds."""
    return sum(
        max(cost.bytes / rates.bytes, cost.macs / rates.macs[multiplier(op, program, sizes, bf16)])
        for op, cost in zip(program.ops, costs(program, sizes, load), strict=True)
    )


class StepBounds:
    """What steps read, multiply and must take, as tables by rows: `costs` and `least_seconds` without a walk for each.

    For what all rows share; attention, which depends on contexts, is added by the caller. tokens: rows of a step at
    most. rates: None leaves the times out.
    bytes, macs, seconds: of [rows][0] ops over all rows, [rows][1] ops over rows of logits; lists of tokens + 1.
    """

    def __init__(self, program: Program, sizes: Sizes, tokens: int, rates: Rates | None, bf16: bool = False) -> None:
        n = np.arange(tokens + 1.0)
        self.bytes, self.macs, self.seconds = ([np.zeros(tokens + 1), np.zeros(tokens + 1)] for _ in range(3))
        one, all_ = (costs(program, sizes, Load([rows], [rows], rows)) for rows in (1, tokens))
        for op, least, most in zip(program.ops, one, all_, strict=True):
            if op.kind == "attend":
                continue
            of = int(op.outputs[0].rows == "R")
            read, macs = np.minimum(n * least.bytes, most.bytes), n * least.macs  # weights once, rows of them as needed
            self.bytes[of] += read
            self.macs[of] += macs
            if rates is not None:
                rate = rates.macs[multiplier(op, program, sizes, bf16)]
                self.seconds[of] += np.maximum(read / rates.bytes, macs / rate)
