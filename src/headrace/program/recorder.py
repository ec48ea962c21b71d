"""The vocabulary: each method records one op and returns the symbolic values it produces.

What an op computes is said here in words and defined by `headrace.program.meaning` in numpy. All values are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.program.program import Op, Program, Rows, Value, Weight
from headrace.program.rope import Rope

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The symbolic inputs of a program: token ids [T], their positions [T], and the rows whose logits are wanted
    [R]."""

    tokens: Value
    positions: Value
    logit_rows: Value


class Recorder:
    """Records ops in call order. A model's `forward` gets one as `ops` and runs once."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights
        self._ops: list[Op] = []
        self._values = 0
        self.inputs = StepInputs(
            self._value("tokens", "T", 1), self._value("positions", "T", 1), self._value("logit_rows", "R", 1)
        )

    def _value(self, name: str, rows: Rows, width: int) -> Value:
        self._values += 1
        return Value(self._values - 1, name, rows, width)

    def _record(
        self,
        kind: str,
        inputs: tuple[Value, ...],
        widths: tuple[int, ...],
        weights: tuple[Weight | None, ...] = (),
        **attrs: Any,
    ) -> tuple[Value, ...]:
        rows: Rows = "R" if kind == "rows" or inputs[0].rows == "R" else "T"
        at = len(self._ops)
        outs = tuple(
            self._value(f"{kind}{at}" if len(widths) == 1 else f"{kind}{at}.{i}", rows, w) for i, w in enumerate(widths)
        )
        self._ops.append(Op(kind, inputs, outs, tuple(w.name for w in weights if w is not None), attrs))
        return outs

    def embed(self, tokens: Value, table: Weight, scale: float = 1.0) -> Value:
        """Row `token` of the table [vocab, width], times `scale`."""
        return self._record("embed", (tokens,), (table.columns,), (table,), scale=scale)[0]

    def norm(self, x: Value, weight: Weight, eps: float, heads: int = 1) -> Value:
        """RMSNorm: x / sqrt(mean(x^2) + eps) * weight, over the row, or over each of `heads` equal slices of it."""
        assert weight.shape[0] * heads == x.width
        return self._record("norm", (x,), (x.width,), (weight,), eps=eps, heads=heads)[0]

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None, add: Value | None = None) -> Value:
        """x @ weight.T (+ bias) (+ add). Weights and activations may be quantised by the back end as the weight's
        format says."""
        assert weight.columns == x.width, f"{weight} takes {weight.columns}, not {x.width}"
        inputs = (x,) if add is None else (x, add)
        return self._record(
            "linear", inputs, (weight.rows,), (weight, bias), bias=bias is not None, add=add is not None
        )[0]

    def qkv(
        self, x: Value, weight: Weight, heads: int, kv_heads: int, head_dim: int, bias: Weight | None = None
    ) -> tuple[Value, Value, Value]:
        """A linear whose outputs are q [heads * head_dim], k and v [kv_heads * head_dim], in this order of rows."""
        q, kv = heads * head_dim, kv_heads * head_dim
        assert weight.rows == q + 2 * kv and weight.columns == x.width
        out = self._record("qkv", (x,), (q, kv, kv), (weight, bias), bias=bias is not None)
        return out[0], out[1], out[2]

    def rope(self, q: Value, k: Value, positions: Value, rope: Rope, head_dim: int) -> tuple[Value, Value]:
        """Turns the pairs (i, i + rotary/2) of every head of q and k by the angle of their row's position."""
        out = self._record("rope", (q, k, positions), (q.width, k.width), rope=rope, head_dim=head_dim)
        return out[0], out[1]

    def attend(
        self,
        q: Value,
        k: Value,
        v: Value,
        layer: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Value:
        """Writes k and v of this step into the layer's cache, then softmax(scale * q.K, causal) . V over the row's
        own sequence.

        window: a row sees its last `window` positions, itself included; 0 means all. softcap: c * tanh(score / c); 0
            means none.
        """
        attrs: dict[str, Any] = {
            "layer": layer,
            "heads": q.width // head_dim,
            "kv_heads": k.width // head_dim,
            "head_dim": head_dim,
        }
        return self._record("attend", (q, k, v), (q.width,), **attrs, scale=scale, window=window, softcap=softcap)[0]

    def glu(self, x: Value, activation: Activation) -> Value:
        """activation(first half of the row) * second half."""
        return self._record("glu", (x,), (x.width // 2,), activation=activation)[0]

    def add(self, x: Value, y: Value) -> Value:
        return self._record("add", (x, y), (x.width,))[0]

    def scale(self, x: Value, factor: float) -> Value:
        return self._record("scale", (x,), (x.width,), factor=factor)[0]

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        return self._record("softcap", (x,), (x.width,), cap=cap)[0]

    def route(self, x: Value, weight: Weight, k: int, renormalise: bool) -> Value:
        """Softmax over the experts' logits x @ weight.T; the k largest, ties to the lowest expert, in descending order.

        Produces [T, 2k]: k expert numbers (as floats), then their k weights (divided by their sum if `renormalise`).
        """
        return self._record("route", (x,), (2 * k,), (weight,), k=k, renormalise=renormalise)[0]

    def experts(self, x: Value, routing: Value, gate_up: Weight, down: Weight, activation: Activation) -> Value:
        """Sum over the row's experts, in the order of its routing: weight * down_e(glu(gate_up_e(x)))."""
        return self._record("experts", (x, routing), (down.rows,), (gate_up, down), activation=activation)[0]

    def rows(self, x: Value, logit_rows: Value) -> Value:
        """The rows of x whose logits are wanted: [R, width]."""
        return self._record("rows", (x, logit_rows), (x.width,))[0]

    def program(self, logits: Value) -> Program:
        """Ends the recording."""
        used = {name for op in self._ops for name in op.weights}
        return Program(tuple(self._ops), {n: w for n, w in self._weights.items() if n in used}, logits)
