"""What a program costs: bytes read and multiply-adds of each op in a step. Knows no machine: rates are somebody else's.

Counts what grows with the model: weights and the KV cache. Activations stay in a core's cache and are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from headrace.program.program import Op, Program


@dataclass(frozen=True, slots=True)
class Load:
    """A step's extents.

    rows, contexts: each sequence's new rows, and its tokens once they are in. logit_rows: R. kv_bytes: an element's.
    """

    rows: Sequence[int]
    contexts: Sequence[int]
    logit_rows: int
    kv_bytes: float = 2.0

    @property
    def total(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True, slots=True)
class Cost:
    """bytes: of weights and KV read. macs: multiply-adds."""

    bytes: float = 0.0
    macs: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.macs + other.macs)


Sizes = Mapping[str, int]
_Rule = Callable[[Op, Program, Sizes, Load], Cost]


def _extent(op: Op, load: Load) -> int:
    return load.logit_rows if op.outputs[0].rows == "R" else load.total


def _embed(op: Op, program: Program, sizes: Sizes, load: Load) -> Cost:
    table = op.weights[0]
    return Cost(load.total * sizes[table] / program.weights[table].shape[0])


def _matrices(op: Op, program: Program, sizes: Sizes, load: Load) -> Cost:
    rows = _extent(op, load)
    weights = [program.weights[w] for w in op.weights]
    stored = sum(sizes[w.name] for w in weights)
    return Cost(stored if rows else 0, rows * sum(prod(w.shape) for w in weights if len(w.shape) > 1))


def _experts(op: Op, program: Program, sizes: Sizes, load: Load) -> Cost:
    """Bytes: of as many experts as the rows can reach, the worst case."""
    stacks = [program.weights[w] for w in op.weights]
    used = op.inputs[1].width // 2
    share = min(1.0, load.total * used / stacks[0].shape[0])
    macs = load.total * used * sum(prod(w.shape[1:]) for w in stacks)
    return Cost(share * sum(sizes[w.name] for w in stacks), macs)


def _attend(op: Op, _: Program, __: Sizes, load: Load) -> Cost:
    """Each sequence's keys and values are read once a step, as far back as the window of its first row reaches."""
    width = op.attrs["kv_heads"] * op.attrs["head_dim"]
    window = op.attrs["window"]
    read = macs = 0
    for rows, context in zip(load.rows, load.contexts, strict=True):
        seen = [min(n, window) if window else n for n in range(context - rows + 1, context + 1)]
        read += min(context, window + rows - 1) if window else context
        macs += sum(seen) * 2 * op.attrs["heads"] * op.attrs["head_dim"]
    return Cost(2 * width * read * load.kv_bytes, macs)


def _free(_: Op, __: Program, ___: Sizes, ____: Load) -> Cost:
    return Cost()


_RULES: dict[str, _Rule] = {
    "embed": _embed,
    "norm": _matrices,
    "linear": _matrices,
    "qkv": _matrices,
    "route": _matrices,
    "experts": _experts,
    "attend": _attend,
}


def costs(program: Program, sizes: Sizes, load: Load) -> list[Cost]:
    """The cost of each op, in order. sizes: bytes of each weight as stored."""
    return [_RULES.get(op.kind, _free)(op, program, sizes, load) for op in program.ops]


def total(program: Program, sizes: Sizes, load: Load) -> Cost:
    """The cost of the whole step."""
    return sum(costs(program, sizes, load), Cost())


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers with the same window (None: all see everything). macs: for each key that a row sees; bytes: of a token."""

    window: int | None
    macs: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """How a step's cost grows with its extents: what `costs` adds up, without a walk over the ops for each step.

    weight_bytes: read by any step. row, logit_row: multiply-adds of each row, and of each row of logits besides.
    """

    weight_bytes: float
    row: float
    logit_row: float
    attention: tuple[Attention, ...]


def work(program: Program, sizes: Sizes, kv_bytes: float = 2.0) -> Work:
    """The growth of `costs`. sizes, kv_bytes: as there. Experts count with all their bytes."""
    windows: Counter[int | None] = Counter()
    read: dict[int | None, float] = defaultdict(float)
    for op in program.layers():
        window = op.attrs["window"] or None
        windows[window] += 2 * op.attrs["heads"] * op.attrs["head_dim"]
        read[window] += 2 * op.attrs["kv_heads"] * op.attrs["head_dim"] * kv_bytes
    return Work(
        weight_bytes=sum(sizes.values()),
        row=total(program, sizes, Load([1], [0], 0)).macs,
        logit_row=total(program, sizes, Load([], [], 1)).macs,
        attention=tuple(Attention(window, windows[window], read[window]) for window in windows),
    )


def kv_bytes(layers: int, kv_heads: int, head_dim: int, element: float = 2.0) -> float:
    """Bytes of keys and values that a token takes in layers of one kind; element: bytes an element takes."""
    return 2.0 * layers * kv_heads * head_dim * element


def kv_bytes_per_token(program: Program, element: float = 2.0) -> float:
    """Bytes of KV cache a token takes over all layers; element: bytes an element takes (2 for float16)."""
    return sum((kv_bytes(1, op.attrs["kv_heads"], op.attrs["head_dim"], element) for op in program.layers()), 0.0)
