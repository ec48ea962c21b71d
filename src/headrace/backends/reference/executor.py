"""Walks a program with `headrace.program.meaning`: weights as float32, a paged cache in numpy, one op after the other.

Owes what every `Executor` owes, with no speed at all. Does not know models, requests or other back ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from headrace.backends import Executor, Limits
from headrace.base.formats import Format
from headrace.base.settings import PAGE
from headrace.program import Layout, Op, Program, Rope, Sampled, Step, Weight, WeightSource
from headrace.program.cost import kv_bytes
from headrace.program.keys import key_offsets
from headrace.program.meaning import MEANING, Array, LayerCache, Surroundings
from headrace.program.sample import sample
from headrace.program.step import F32
from headrace.quant.blocks import Bytes, dequantize
from headrace.quant.encode import recoded


@dataclass(slots=True)
class ReferenceBackend:
    """kv: a name of `meaning.KV_FORMATS`: what keys and values are rounded to as they are written."""

    kv: str = "float32"
    name: str = "reference"

    def page_bytes(self, program: Program) -> int:
        """Bytes of one KV page over all layers: float32 in all formats."""
        return sum(map(_layer_bytes, program.layers()))

    def window_bytes(self, program: Program) -> int:
        """What layers with windows have of that."""
        return sum(_layer_bytes(op) for op in program.layers() if op.attrs["window"])

    def weight_bytes(self, program: Program, layouts: Mapping[str, Layout]) -> int:
        """All in float32; those that share storage once."""
        own = (w for name, w in program.weights.items() if layouts[name].same_as not in program.weights)
        return sum(4 * prod(weight.shape) for weight in own)

    def encode(self, source: Format, format: Format, rows: Bytes) -> Bytes:
        """Rows of blocks in another format."""
        return recoded(source, format, rows)

    def executor(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        beside: Executor | None = None,
        apart: bool = False,
    ) -> ReferenceExecutor:
        made = ReferenceExecutor(program, weights, limits, self.kv)
        if beside is not None and not apart:
            assert isinstance(beside, ReferenceExecutor)
            made._cache = beside._cache
        return made


def _layer_bytes(op: Op) -> int:
    return PAGE * int(kv_bytes(1, op.attrs["kv_heads"], op.attrs["head_dim"], 4))


def _array(weights: WeightSource, weight: Weight, loaded: dict[str, F32]) -> F32:
    data = weights.load(weight.name)
    if data.same_as in loaded:
        return loaded[data.same_as]
    rows = [dequantize(part.format, part.data) for part in data.parts]
    weights.release(weight.name)
    return np.concatenate(rows).reshape(weight.shape)


class ReferenceExecutor:
    """A program, its weights and its cache. Values live until their last use; those that are tapped are copied out."""

    def __init__(self, program: Program, weights: WeightSource, limits: Limits, kv: str = "float32") -> None:
        self._program, self._limits = program, limits
        self._last = program.last_uses()
        self._weights: dict[str, F32] = {}
        for name, weight in program.weights.items():
            self._weights[name] = _array(weights, weight, self._weights)
        offsets = key_offsets(program, self._weights) if kv == "int8" else {}
        self._cache = {
            op.attrs["layer"]: self._layer(op.attrs, kv, offsets.get(op.attrs["layer"], 0.0)) for op in program.layers()
        }
        ropes: set[Rope] = {op.attrs["rope"] for op in program.ops if op.kind == "rope"}
        self._ropes = {rope: rope.table(limits.context) for rope in ropes}
        self.weight_bytes = sum({id(w): w.nbytes for w in self._weights.values()}.values())
        self.slot_bytes = sum(_layer_bytes(op) for op in program.layers() if self._windowed(op.attrs))
        self.page_bytes = sum(map(_layer_bytes, program.layers())) - self.slot_bytes
        self.threads, self.isa = 1, "numpy"

    def _layer(self, attrs: Mapping[str, Any], kv: str, offset: F32 | float) -> LayerCache:
        windowed = self._windowed(attrs)
        shape = (self._limits.slots if windowed else self._limits.pages, PAGE, attrs["kv_heads"], attrs["head_dim"])
        return LayerCache(np.zeros(shape, np.float32), np.zeros(shape, np.float32), kv, offset, windowed)

    def _windowed(self, attrs: Mapping[str, Any]) -> bool:
        """Whether the layer lies in slots."""
        return bool(self._limits.slots and attrs["window"])

    def run(self, step: Step) -> Sampled:
        """One step; see `Step`. Non-finite numbers are no error here: they show in `status`."""
        assert len(step.tokens) <= self._limits.tokens and len(step.context) <= self._limits.sequences
        for layer in self._cache.values():
            for source, target in step.window_copies if layer.windowed else step.copies:
                layer.keys[target], layer.values[target] = layer.keys[source], layer.values[source]
            fresh = step.window_fresh if layer.windowed else step.fresh
            layer.keys[fresh] = layer.values[fresh] = 0
        with np.errstate(all="ignore"):
            logits, taps = self._walk(step)
            out = sample(logits, step.sampling, self._limits.vocab)
        out.logits = logits if step.keep_logits else None
        out.taps = taps
        return out

    def _walk(self, step: Step) -> tuple[F32, dict[str, F32]]:
        around = Surroundings(step, self._cache, self._ropes)
        held: dict[int, Array] = {0: step.tokens, 1: step.positions, 2: step.logit_rows}
        taps: dict[str, F32] = {}
        for at, op in enumerate(self._program.ops):
            weights = [self._weights[name] for name in op.weights]
            results = MEANING[op.kind](op, [held[v.id] for v in op.inputs], weights, around)
            for value, result in zip(op.outputs, results, strict=True):
                held[value.id] = result
                if value.name in step.taps:
                    taps[value.name] = result.copy()
            for value in (*op.inputs, *op.outputs):
                if self._last[value.id] == at:
                    held.pop(value.id, None)
        return held[self._program.logits.id], taps

    def page(self, page: int, slot: int = -1) -> list[memoryview]:
        """See `Executor.page`: of each layer its keys and its values."""
        places = [(layer, slot if layer.windowed else page) for layer in self._cache.values()]
        arrays = [array[at] for layer, at in places for array in (layer.keys, layer.values)]
        return [array.reshape(-1).view(np.uint8).data for array in arrays]

    def rates(self) -> None:
        """Nobody knows."""

    def close(self) -> None:
        """Lets go of weights and cache."""
        self._weights, self._cache = {}, {}
