"""The executor of the cpu back end: loads weights, lowers the program, and makes one native call a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from headrace._native import Plan, isa_names, multiply_rate, read_rate
from headrace.backends import Executor, Limits
from headrace.backends.cpu.encode import encode
from headrace.backends.cpu.lower import Lowering, gated_weights
from headrace.backends.cpu.threads import default_threads
from headrace.backends.cpu.weights import Loaded, load, loaded_bytes
from headrace.base.errors import CapacityError, EngineError, SettingError
from headrace.base.formats import Format
from headrace.base.settings import PAGE
from headrace.program import Layout, Program, Sampled, Step, WeightSource
from headrace.program.keys import key_offsets
from headrace.program.roof import Rates
from headrace.quant.blocks import Bytes

KvFormat = Literal["float16", "bfloat16", "int8"]

MAX_HEAD = 256
SCALE = 2  # bytes of an int8 key's or value's scale
LOGITS_AT_ONCE = 32  # rows: bounds the memory that logits take


@dataclass(slots=True)
class CpuBackend:
    """isa: a name of `isa_names()`; None takes what the environment's HEADRACE_ISA names, or the best there is.

    bf16: inputs of bf16 weights are rounded to bf16 too: twice the speed where the machine has the instruction, and
        logits of the accuracy that such a model was trained with; a router's are not.
    kv: what keys and values are kept as; see native/attention.h.
    merge: False runs every op by itself, keeps every value, and allows taps; the results are the same, bit for bit.
    """

    isa: str | None = None
    merge: bool = True
    bf16: bool = False
    kv: KvFormat = "float16"
    name: str = field(default="cpu", init=False)

    def page_bytes(self, program: Program) -> int:
        """Bytes of one KV page over all layers."""
        return sum(_layer_bytes(layer, self.kv) for layer in _layers(program))

    def window_bytes(self, program: Program) -> int:
        """What layers with windows have of that."""
        return sum(_layer_bytes(layer, self.kv) for layer in _layers(program) if layer.windowed)

    def weight_bytes(self, program: Program, layouts: Mapping[str, Layout]) -> int:
        """Bytes of the weights once they are packed, shared ones once."""
        return loaded_bytes((layouts[name] for name in program.weights), exact=_routers(program))

    def encode(self, source: Format, format: Format, rows: Bytes) -> Bytes:
        """Rows of blocks in another format."""
        return encode(_isa(self.isa), source, format, rows)

    def executor(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        beside: Executor | None = None,
        apart: bool = False,
    ) -> CpuExecutor:
        """Raises `SettingError` for an instruction set or head size that can't be, `CapacityError` without memory."""
        assert beside is None or isinstance(beside, CpuExecutor)
        isa = _isa(self.isa)
        return CpuExecutor(program, weights, limits, isa, self.merge, self.bf16, self.kv, beside, apart)


def _isa(asked: str | None) -> str:
    isa, there = asked or os.environ.get("HEADRACE_ISA") or "", isa_names()
    if isa and isa not in there:
        of = "" if asked else " of HEADRACE_ISA"
        raise SettingError(
            f"instruction set {isa!r}{of} isn't available here; choose one of: {', '.join(there)}", param="isa"
        )
    return isa or there[0]


class _Layer(NamedTuple):
    """A layer of the cache."""

    kv_heads: int
    head_dim: int
    windowed: bool


def _layers(program: Program) -> list[_Layer]:
    layers = [_Layer(op.attrs["kv_heads"], op.attrs["head_dim"], op.attrs["window"] > 0) for op in program.layers()]
    for _, head_dim, _ in layers:
        if head_dim % 2 or head_dim > MAX_HEAD:
            raise SettingError(
                f"heads of size {head_dim} don't run on the cpu back end: it takes even sizes up to {MAX_HEAD}",
                param="backend",
            )
    return layers


def _routers(program: Program) -> frozenset[str]:
    """Weights that are kept in float32."""
    return frozenset(op.weights[0] for op in program.ops if op.kind == "route")


def _token_bytes(head_dim: int, kv: KvFormat) -> int:
    """Bytes of a token's key and value in one head; rows of values are padded to 16, int8 keys to 4."""
    values = -(-head_dim // 16) * 16
    return -(-head_dim // 4) * 4 + values + 2 * SCALE if kv == "int8" else 2 * (head_dim + values)


def _layer_bytes(layer: _Layer, kv: KvFormat) -> int:
    return layer.kv_heads * PAGE * _token_bytes(layer.head_dim, kv)


def _check_memory(layers: list[_Layer], kv: KvFormat, limits: Limits) -> None:
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = sum((limits.slots if x.windowed else limits.pages) * _layer_bytes(x, kv) for x in layers)
    if wanted > there:
        raise CapacityError(
            f"{limits.pages} KV pages take {wanted / 1e9:.1f} GB and this machine has {there / 1e9:.1f} GB;"
            " make kv_cache_memory_bytes or max_num_seqs smaller"
        )


class CpuExecutor:
    """A program as a native plan, with its packed weights and its KV cache. `run` is not re-entrant."""

    def __init__(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        isa: str,
        merge: bool = True,
        bf16: bool = False,
        kv: KvFormat = "float16",
        beside: CpuExecutor | None = None,
        apart: bool = False,
    ) -> None:
        layers = _layers(program)
        if not limits.slots:
            layers = [layer._replace(windowed=False) for layer in layers]
        self.isa, self.threads = isa, limits.threads or default_threads()
        self._limits, self._merge = limits, merge
        _check_memory(layers, kv, limits)
        try:
            self._weights: Loaded | None = load(
                program.weights.values(), weights, self.threads, exact=_routers(program), halved=gated_weights(program)
            )
            self._plan: Plan | None = self._make_plan(limits, layers, kv, beside, apart)
            offsets = key_offsets(program, self._weights.vectors) if kv == "int8" else {}
            self._lowering = Lowering(self._plan, program, self._weights, merge, limits.context, offsets, bf16)
            self._lowering.lower()
        except MemoryError as e:
            raise CapacityError(
                f"no memory for weights and {limits.pages} KV pages;"
                " make kv_cache_memory_bytes smaller, or take a smaller model"
            ) from e
        except RuntimeError as e:  # threads that cannot be started
            raise CapacityError(f"{e}; take fewer threads than {self.threads}") from e
        self._values = {v.name: v for op in program.ops for v in op.outputs}
        self.weight_bytes = self._weights.nbytes
        self.page_bytes, self.slot_bytes = self._plan.page_bytes, self._plan.slot_bytes

    def _make_plan(
        self, limits: Limits, layers: list[_Layer], kv: KvFormat, beside: CpuExecutor | None, apart: bool
    ) -> Plan:
        return Plan(
            isa=self.isa,
            threads=self.threads,
            merge=self._merge,
            tokens=limits.tokens,
            sequences=limits.sequences,
            pages=limits.pages,
            context=limits.context,
            vocab=limits.vocab,
            chunk=LOGITS_AT_ONCE if self._merge else limits.tokens,
            layers=layers,
            slots=limits.slots,
            kv=kv,
            beside=None if beside is None else beside._plan,
            apart=apart,
        )

    def run(self, step: Step) -> Sampled:
        """One step; see `Step`. Raises `EngineError`, with nothing changed, when the step's arrays don't fit."""
        plan = self._plan  # lives until its step ends, even if another thread closes this
        if plan is None:
            raise EngineError("this executor is closed")
        if step.taps:
            self._check_taps(step)
        rows = len(step.logit_rows)
        out = self._outputs(rows, step)
        try:
            plan.run(step, out)
        except (ValueError, RuntimeError, AttributeError) as e:
            raise EngineError(str(e)) from e
        if step.taps:
            out.taps = {name: self._tap(name, len(step.tokens), rows) for name in step.taps}
        return out

    def _outputs(self, rows: int, step: Step) -> Sampled:
        column = step.sampling.logprobs
        asked = max(0, int(column.max())) if column.size else 0
        top = min(asked, self._limits.vocab)  # the plan refuses what exceeds it
        return Sampled(
            np.empty(rows, np.int32),
            np.empty(rows, np.float32),
            np.empty(rows, np.int32),
            np.empty((rows, top), np.int32),
            np.empty((rows, top), np.float32),
            np.empty(rows, np.int32),
            np.empty((rows, self._limits.vocab), np.float32) if step.keep_logits else None,
        )

    def _check_taps(self, step: Step) -> None:
        if self._merge:
            raise SettingError(
                "values can be tapped only without merges: make the back end with merge=False", param="taps"
            )
        if unknown := [name for name in step.taps if name not in self._values]:
            raise SettingError(f"the program has no value {unknown[0]!r}", param="taps")

    def _tap(self, name: str, tokens: int, rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        assert self._plan is not None
        value = self._values[name]
        out = np.empty((tokens if value.rows == "T" else rows, value.width), np.float32)
        self._plan.copy(self._lowering.place(value), out)
        return out

    def profile(self, on: bool = True) -> None:
        """Starts (from zero) or stops measuring phases."""
        assert self._plan is not None
        self._plan.profile(on)

    def timings(self) -> list[tuple[str, int, float]]:
        """(phase, runs, seconds) in order, as measured since `profile`; waiting for other threads included."""
        assert self._plan is not None
        return self._plan.timings()

    def page(self, page: int, slot: int = -1) -> list[memoryview]:
        """See `Executor.page`; a view keeps the cache."""
        if self._plan is None:
            raise EngineError("this executor is closed")
        views = [self._plan.page(page).data] if self.page_bytes else []
        return [*views, self._plan.slot(slot).data] if self.slot_bytes else views

    def rates(self) -> Rates:
        """On as many threads as a step uses; some 0.2 s and 256 MiB for a moment. The machine should be idle."""
        kinds = ("int8", "bf16", "f32")
        return Rates(read_rate(self.threads), {kind: multiply_rate(self.isa, kind, self.threads) for kind in kinds})

    def close(self) -> None:
        """Ends the threads and lets go of weights and cache. Closing twice is no error."""
        self._plan = None
        self._lowering = None  # type: ignore[assignment]
        self._weights = None
