"""From a program to a native plan: which buffers hold which values, what is prepared for whom, which ops share a phase.

One rule an op kind, in the table at the end. Merges (all off with ``merge=False``, same bits either way): row ops that
follow each other share a phase (rope + KV write, adds, scales); norm and attention prepare what they give; a gated
MLP's first linear, its glu and the preparation of what comes out are one phase; a linear adds bias and residual to its
outputs while they are in the cache; rope turns in place; buffers of values that have died are reused.
Does not know devices beyond the plan's calls, nor requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from headrace._native import Extent, Plan
from headrace.backends.cpu.weights import PANEL, Floats, Loaded, Piece
from headrace.program import Op, Program, Rope, Value

Slice = tuple[int, int, int]
"""A buffer, its first column, a number of columns."""
Kinds = frozenset[str]
"""Ways in which a linear's input is prepared: see native/formats.h, `Input`."""

INPUT_KIND = {
    **dict.fromkeys(("f32", "f16", "bf16"), "f32"),
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_z"), "q32"),
}
LINEARS = ("linear", "qkv", "route")
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
EXTENTS = {"T": Extent.TOKENS, "R": Extent.LOGITS}


def body_first(program: Program) -> Program:
    """The same program with the ops on logits rows last: those run after all others, a chunk of rows at a time."""
    return replace(program, ops=tuple(sorted(program.ops, key=lambda op: op.outputs[0].rows == "R")))


@dataclass
class Lowering:
    """The state of one lowering: where values live, which buffers are free."""

    plan: Plan
    program: Program
    weights: Loaded
    merge: bool
    context: int
    offsets: Mapping[int, Floats] = field(default_factory=dict)  # see `program.keys`
    bf16: bool = False  # bf16 weights take inputs rounded to bf16, as one instruction does, instead of float32
    places: dict[int, Slice] = field(default_factory=dict)
    _owners: Counter[int] = field(default_factory=Counter)  # live values of each buffer
    _free: dict[tuple[int, Extent], list[int]] = field(default_factory=dict)
    _shape: dict[int, tuple[int, Extent]] = field(default_factory=dict)
    _inputs: dict[tuple[int, Extent], tuple[int, Kinds]] = field(default_factory=dict)
    _free_inputs: dict[tuple[int, Extent, Kinds], list[int]] = field(default_factory=dict)
    _rotations: dict[Rope, int] = field(default_factory=dict)
    _at: int = 0

    def __post_init__(self) -> None:
        self.program = body_first(self.program)
        self._last = self.program.last_uses()
        self._layers = {op.attrs["layer"]: i for i, op in enumerate(self.program.layers())}

    def lower(self) -> None:
        """Calls the plan once for each op, and finishes it."""
        routes = [op.attrs["k"] for op in self.program.ops if op.kind == "route"]
        if routes:
            self.plan.route_to(max(routes))
        for at, op in enumerate(self.program.ops):
            self._at = at
            RULES[op.kind](self, op)
            for value in {v.id: v for v in op.inputs + op.outputs}.values():
                if self._last[value.id] == self._at:
                    self._let_go(value)
        self.plan.finish(self.place(self.program.logits))

    # --- where values live ---

    def place(self, value: Value) -> Slice:
        return self.places[value.id]

    def new(self, value: Value) -> Slice:
        """Room for a value of its own."""
        return self.put(value, self.room(value.width, EXTENTS[value.rows]))

    def put(self, value: Value, place: Slice) -> Slice:
        self.places[value.id] = place
        self._owners[place[0]] += 1
        return place

    def room(self, width: int, extent: Extent) -> Slice:
        """A free buffer, or a new one. Whoever takes it without putting a value there gives it back."""
        free = self._free.get((width, extent))
        buffer = free.pop() if free else self.plan.buffer(width, extent)
        self._shape[buffer] = (width, extent)
        return buffer, 0, width

    def give_back(self, place: Slice) -> None:
        if self.merge:
            self._free.setdefault(self._shape[place[0]], []).append(place[0])

    def dies(self, value: Value) -> bool:
        return self._last[value.id] == self._at

    def _let_go(self, value: Value) -> None:
        place = self.places.get(value.id)  # the step's own arrays have none, nor have values that are only prepared
        if place:
            self._owners[place[0]] -= 1
            if not self._owners[place[0]]:
                self.give_back(place)
        for extent in EXTENTS["T"], EXTENTS["R"]:
            if held := self._inputs.pop((value.id, extent), None):
                self.give_input_back(held, value.width, extent)

    def readers(self, value: Value) -> list[Op]:
        return _readers(self.program, value)

    # --- inputs of linears ---

    def prepare(self, value: Value) -> int:
        """The value as all linears that read it want it: prepared once."""
        extent = EXTENTS[value.rows]
        held = self._inputs.get((value.id, extent))
        if held is None:
            held = self._inputs[value.id, extent] = self.input_room(value.width, extent, self._wanted(value))
            self.plan.prepare(self.place(value), held[0])
        return held[0]

    def input_room(self, columns: int, extent: Extent, kinds: Kinds) -> tuple[int, Kinds]:
        free = self._free_inputs.get((columns, extent, kinds))
        if free:
            return free.pop(), kinds
        wants = {kind: kind in kinds for kind in ("f32", "bf16", "q32")}
        return self.plan.prepared(columns, extent, **wants), kinds

    def give_input_back(self, held: tuple[int, Kinds], columns: int, extent: Extent) -> None:
        if self.merge:
            self._free_inputs.setdefault((columns, extent, held[1]), []).append(held[0])

    def kinds(self, weight: str) -> Kinds:
        return frozenset(
            name if self.bf16 and name == "bf16" else INPUT_KIND[name] for name in self.weights.matrices[weight].formats
        )

    def prepared_by_its_op(self, value: Value) -> int:
        """The input that linears read the value as, to be filled by the op that makes it; -1 if others read it too.

        Its buffer, if it has one, holds it too.
        """
        readers = self.readers(value)
        plain = all(op.kind in LINEARS and [v.id for v in op.inputs].index(value.id) == 0 for op in readers)
        if not (self.merge and readers and plain and all(op.inputs.count(value) == 1 for op in readers)):
            return -1
        extent = EXTENTS[value.rows]
        held = self._inputs[value.id, extent] = self.input_room(value.width, extent, self._wanted(value))
        return held[0]

    def _wanted(self, value: Value) -> Kinds:
        readers = [op for op in self.readers(value) if op.kind in LINEARS and op.inputs[0].id == value.id]
        return frozenset().union(*(self.kinds(op.weights[0]) for op in readers))

    # --- pieces of rules ---

    def pieces(self, op: Op) -> list[Piece]:
        return self.weights.matrices[op.weights[0]].pieces

    def linear(self, op: Op, out: Slice) -> None:
        """A linear with what is added to it: bias first, then the residual."""
        bias: Floats | None = self.weights.vectors[op.weights[1]] if op.attrs.get("bias") else None
        add = self.place(op.inputs[1]) if op.attrs.get("add") else None
        name, into = f"{op.kind} {op.weights[0]}", self.prepare(op.inputs[0])
        if self.merge or (bias is None and add is None):
            self.plan.linear(name, into, self.pieces(op), out, bias, add)
            return
        extent = EXTENTS[op.outputs[0].rows]
        bare = self.room(out[2], extent)
        self.plan.linear(name, into, self.pieces(op), bare)
        if bias is not None:
            biased = self.room(out[2], extent) if add is not None else out
            self.plan.bias(bare, bias, biased)
            bare = biased
        if add is not None:
            self.plan.add(bare, add, out)

    def rotation(self, rope: Rope) -> int:
        if rope not in self._rotations:
            self._rotations[rope] = self.plan.table(*rope.table(self.context))
        return self._rotations[rope]

    def layer(self, op: Op) -> int:
        return self._layers[op.attrs["layer"]]


def _readers(program: Program, value: Value) -> list[Op]:
    return [op for op in program.ops if any(v.id == value.id for v in op.inputs)]


def _embed(to: Lowering, op: Op) -> None:
    table = [packed for packed, _, _ in to.pieces(op)]
    to.plan.embed(table, op.attrs["scale"], to.new(op.outputs[0]))


def _norm(to: Lowering, op: Op) -> None:
    x, weight, eps = to.place(op.inputs[0]), to.weights.vectors[op.weights[0]], op.attrs["eps"]
    into = to.prepared_by_its_op(op.outputs[0]) if op.attrs["heads"] == 1 else -1
    if into >= 0:
        to.plan.norm_into(x, weight, eps, into)
    else:
        to.plan.norm(x, weight, op.attrs["heads"], eps, to.new(op.outputs[0]))


def _linear(to: Lowering, op: Op) -> None:
    if not _gated(to, op):
        to.linear(op, to.new(op.outputs[0]))


def _glu_of(program: Program, op: Op) -> Op | None:
    """The glu that alone reads what a linear without bias or residual gives."""
    readers = _readers(program, op.outputs[0])
    plain = op.kind == "linear" and len(op.inputs) + len(op.weights) == 2
    return readers[0] if plain and [r.kind for r in readers] == ["glu"] else None


def gated_weights(program: Program) -> frozenset[str]:
    """Weights whose halves are a gate and what it lets through."""
    return frozenset(op.weights[0] for op in program.ops if _glu_of(program, op))


def _gated(to: Lowering, op: Op) -> bool:
    """The linear, the glu that alone reads it and the preparation of what that gives, as one phase, if it can be."""
    glu = _glu_of(to.program, op)
    if glu is None:
        return False
    halves = halves_of(to.pieces(op))
    gated = glu.outputs[0]
    if halves is None or gated.width % 32:
        return False
    into = to.prepared_by_its_op(gated)
    if into < 0:
        return False
    activation = ACTIVATIONS[glu.attrs["activation"]]
    to.plan.gated(f"gated {op.weights[0]}", to.prepare(op.inputs[0]), *halves, activation, into)
    return True


def halves_of(pieces: list[Piece]) -> tuple[Piece, Piece] | None:
    """The upper and the lower half of a weight's rows, if each lies in one piece and begins with a panel."""
    if len(pieces) == 2 and pieces[0][2] == pieces[1][2]:
        return pieces[0], pieces[1]
    if len(pieces) == 1 and pieces[0][2] % (2 * PANEL) == 0:
        packed, first, rows = pieces[0]
        return (packed, first, rows // 2), (packed, first + rows // 2, rows // 2)
    return None


def _qkv(to: Lowering, op: Op) -> None:
    buffer, _, width = to.room(sum(v.width for v in op.outputs), EXTENTS[op.outputs[0].rows])
    column = 0
    for value in op.outputs:
        to.put(value, (buffer, column, value.width))
        column += value.width
    to.linear(op, (buffer, 0, width))


def _rope(to: Lowering, op: Op) -> None:
    table = to.rotation(op.attrs["rope"])
    for x, y in zip(op.inputs[:2], op.outputs, strict=True):
        place = to.place(x)
        out = to.put(y, place) if to.merge and to.dies(x) else to.new(y)
        to.plan.rope(place, op.attrs["head_dim"], table, out)


def _attend(to: Lowering, op: Op) -> None:
    q, k, v = map(to.place, op.inputs)
    out, a = to.new(op.outputs[0]), op.attrs
    offset = to.offsets.get(a["layer"])
    to.plan.write(k, v, to.layer(op), None if offset is None else -offset.reshape(-1))
    into = to.prepared_by_its_op(op.outputs[0]) if a["head_dim"] % 32 == 0 else -1
    to.plan.attend(q, to.layer(op), a["scale"], a["window"], a["softcap"], out, into)


def _glu(to: Lowering, op: Op) -> None:
    if op.inputs[0].id not in to.places:
        return  # its linear has done it
    to.plan.glu(to.place(op.inputs[0]), ACTIVATIONS[op.attrs["activation"]], to.new(op.outputs[0]))


def _add(to: Lowering, op: Op) -> None:
    x, y = map(to.place, op.inputs)
    to.plan.add(x, y, to.new(op.outputs[0]))


def _scale(to: Lowering, op: Op) -> None:
    to.plan.scale(to.place(op.inputs[0]), op.attrs["factor"], to.new(op.outputs[0]))


def _softcap(to: Lowering, op: Op) -> None:
    to.plan.softcap(to.place(op.inputs[0]), op.attrs["cap"], to.new(op.outputs[0]))


def _rows(to: Lowering, op: Op) -> None:
    to.plan.rows(to.place(op.inputs[0]), to.new(op.outputs[0]))


def _route(to: Lowering, op: Op) -> None:
    experts = to.program.weights[op.weights[0]].rows
    logits = to.room(experts, EXTENTS[op.outputs[0].rows])
    to.plan.linear(f"route {op.weights[0]}", to.prepare(op.inputs[0]), to.pieces(op), logits)
    to.plan.choose(logits, op.attrs["k"], op.attrs["renormalise"], to.new(op.outputs[0]))
    to.give_back(logits)


def _experts(to: Lowering, op: Op) -> None:
    """Rows go to slots grouped by expert; an expert's rows are one matrix product; slots are added up by row."""
    x, routing = map(to.place, op.inputs)
    up, down = (to.weights.matrices[w].stack for w in op.weights)
    inner = to.program.weights[op.weights[1]].columns
    wide, hidden, partial = (to.room(n, Extent.SLOTS) for n in (2 * inner, inner, op.outputs[0].width))
    first = to.input_room(op.inputs[0].width, Extent.SLOTS, to.kinds(op.weights[0]))
    second = to.input_room(inner, Extent.SLOTS, to.kinds(op.weights[1]))
    to.plan.sort(routing, len(up))
    to.plan.prepare(x, first[0])
    to.plan.experts(f"experts {op.weights[0]}", first[0], list(map(list, up)), wide)
    to.plan.glu(wide, ACTIVATIONS[op.attrs["activation"]], hidden)
    to.plan.prepare(hidden, second[0])
    to.plan.experts(f"experts {op.weights[1]}", second[0], list(map(list, down)), partial)
    to.plan.combine(partial, routing, to.new(op.outputs[0]))
    for place in (wide, hidden, partial):
        to.give_back(place)
    to.give_input_back(first, op.inputs[0].width, Extent.SLOTS)
    to.give_input_back(second, inner, Extent.SLOTS)


RULES: dict[str, Callable[[Lowering, Op], None]] = {
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
