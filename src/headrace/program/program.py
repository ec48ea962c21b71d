"""A program: the flat list of ops that one step of a model runs, recorded once, lowered by each back end once.

Straight-line, no control flow. Two dynamic extents: T, the rows (tokens) of the step, and R, those of them whose logits
are wanted. Everything else is fixed when the program is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Rows = Literal["T", "R"]
Split = Literal["out", "in"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as the model sees it; formats, files and ranks are not its business.

    shape: ``(n,)`` a vector, ``(rows, columns)`` a matrix with outputs first, ``(experts, rows, columns)`` a stack of
        them.
    split: how tensor parallelism may cut it: by outputs, by inputs, or not at all.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None = None

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True, slots=True)
class Value:
    """What an op produces: a float32 array [T or R, width] (routing: see `Recorder.route`; tokens: int32 [T])."""

    id: int
    name: str
    rows: Rows
    width: int


@dataclass(frozen=True, slots=True)
class Op:
    """One record: what is done, to which values, with which weights (by name), under which fixed attributes."""

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: tuple[str, ...]
    attrs: Mapping[str, Any]

    def __str__(self) -> str:
        ins = ", ".join([v.name for v in self.inputs] + list(self.weights))
        attrs = "".join(f" {k}={v}" for k, v in self.attrs.items())
        return f"{', '.join(v.name for v in self.outputs)} = {self.kind}({ins}){attrs}"


@dataclass(frozen=True, slots=True)
class Program:
    """The recorded ops in order, the weights they name, and the value that holds the logits [R, vocab]."""

    ops: tuple[Op, ...]
    weights: Mapping[str, Weight]
    logits: Value

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def last_uses(self) -> dict[int, int]:
        """For each value id, the index of the last op that reads it (its own op if none does; logits live to the
        end)."""
        last: dict[int, int] = {}
        for at, op in enumerate(self.ops):
            for v in op.outputs + op.inputs:
                last[v.id] = at
        last[self.logits.id] = len(self.ops)
        return last

    @property
    def window(self) -> int:
        """Tokens that the layers with the longest window see; 0: all layers see everything."""
        return max((op.attrs["window"] for op in self.layers()), default=0)

    def layers(self) -> list[Op]:
        """The `attend` ops in order: each owns one layer of the KV cache (attrs: kv_heads, head_dim, window)."""
        return [op for op in self.ops if op.kind == "attend"]
