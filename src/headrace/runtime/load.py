"""From a checkpoint to an executor: the only file where model, weights and back end meet.

Owes: that every weight the model needs is in the file, with the right shape and finite numbers, and that nothing is
left over which the model would have needed. Does not know requests, text or how a back end runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.backends import Backend, Executor, Limits
from headrace.base.errors import BadModelFile
from headrace.base.formats import COMPUTED, F32, Format
from headrace.base.log import log
from headrace.base.settings import PAGE
from headrace.models import Config, Entry, Model, Source, describe, leftovers
from headrace.models.registry import KNOWN
from headrace.program import Layout, Part, Program, WeightData, WeightSource
from headrace.program.cost import kv_bytes_per_token
from headrace.quant.blocks import check_finite, dequantize
from headrace.runtime.draft import Drafter
from headrace.runtime.encoded import Encoded, Formats, draft_formats, in_formats, served_formats
from headrace.runtime.packed import understood
from headrace.weights import Checkpoint, Tensor, open_checkpoint

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

DRAFT_ROWS = 512  # of a step of a model that drafts for another one
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A checkpoint that has been understood and checked, but not loaded.

    weights: as they are stored. quantization: what floats become; formats: what matrices then have.
    """

    checkpoint: Checkpoint
    model: Model
    program: Program
    weights: WeightSource
    quantization: str | None = None
    formats: Formats = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.model.config

    @property
    def fingerprint(self) -> str:
        """Of the weights as they are given to a back end."""
        stored = self.checkpoint.fingerprint
        return f"{stored}-{self.quantization}" if self.quantization else stored

    def kv_bytes_per_token(self, element: float = 2.0) -> float:
        """Bytes of KV cache a token takes, with elements of so many bytes."""
        return kv_bytes_per_token(self.program, element)

    def layouts(self) -> dict[str, Layout]:
        """How each weight of the program is given to a back end."""
        tensors = self.checkpoint.tensors
        stored = layouts(self.model, self.program, lambda source: tensors[source.tensor].format)
        return in_formats(stored, self.formats)

    def sizes(self) -> dict[str, int]:
        """Bytes of each weight of the program (a shared one counts under both names)."""
        return {name: layout.nbytes for name, layout in self.layouts().items()}


@dataclass(frozen=True, slots=True, eq=False)
class Smaller:
    """A model that drafts for another one. vocab_size: ids that mean the same to both."""

    prepared: Prepared
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that can run; nothing of its file is kept.

    fingerprint: of its weights. For `program.cost`: sizes, bytes of each weight, and kv_bytes, of an element of the KV
    cache with its share of scales and padding. drafter: who guesses for it, if that was asked for.
    """

    config: Config
    program: Program
    executor: Executor
    fingerprint: str
    sizes: Mapping[str, int]
    kv_bytes: float = 2.0
    drafter: Drafter | None = None

    def close(self) -> None:
        """Free the memory and threads of it, and of who guesses for it."""
        self.executor.close()
        if self.drafter is not None:
            self.drafter.executor.close()


def layouts(model: Model, program: Program, format_of: Callable[[Source], Format]) -> dict[str, Layout]:
    """How the program's weights would lie in a file whose tensors have such formats."""
    return {name: _layout(model.table.entries[name], format_of) for name in program.weights}


def _layout(entry: Entry, format_of: Callable[[Source], Format]) -> Layout:
    if len(entry.weight.shape) == 1:
        return Layout(entry.weight, ((F32, 1),))
    return Layout(entry.weight, tuple((format_of(s), s.shape[-2]) for s in entry.sources), entry.same_as)


def prepare(source: Path | Checkpoint, quantization: str | None = None) -> Prepared:
    """Opens and checks a checkpoint; cheap: reads metadata, and no weights but the factors of its rope.

    quantization: what float weights become as they are loaded, as `headrace quantize` with its `plain` method has it.
    Raises `BadModelFile` with the tensor and what was expected of it, `SettingError` for a model quantised otherwise.
    """
    checkpoint = understood(open_checkpoint(source) if isinstance(source, Path) else source)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    model = describe(checkpoint.config, checkpoint.kind, shapes, str(checkpoint.path))
    model = _with_rope_factors(checkpoint, model)
    _check(checkpoint, model)
    program = model.record()
    prepared = Prepared(checkpoint, model, program, CheckpointWeights(checkpoint, model))
    if quantization is None:
        return prepared
    formats = served_formats(model, prepared.layouts(), quantization, checkpoint.path, bool(checkpoint.scheme))
    return replace(prepared, quantization=quantization, formats=formats)


def load_model(
    prepared: Prepared, backend: Backend, limits: Limits, copied: bool = False, smaller: Smaller | None = None
) -> LoadedModel:
    """The model, lowered by `backend`. Closes the checkpoints: their weights are in executors now.

    Who drafts for it: copied: a copy of it with weights of 4 bits, on the same KV cache; or the `smaller` model.
    """
    fingerprint, sizes = prepared.fingerprint, prepared.sizes()
    executor = backend.executor(prepared.program, _encoded(prepared, backend, limits), limits)
    drafter = None
    if smaller is not None:
        drafter = _smaller(smaller, backend, limits, executor)
        smaller.prepared.checkpoint.close()
    elif copied:
        drafter = _copy(prepared, backend, limits, executor)
    prepared.checkpoint.close()
    kv_bytes = (executor.page_bytes + executor.slot_bytes) / (PAGE * kv_bytes_per_token(prepared.program, 1))
    return LoadedModel(prepared.config, prepared.program, executor, fingerprint, sizes, kv_bytes, drafter)


def copy_formats(program: Program, stored: Mapping[str, Layout]) -> Formats:
    """Of a model's copy that drafts for it."""
    return draft_formats(stored, frozenset(op.weights[0] for op in program.ops if op.kind == "route"))


def _copy(prepared: Prepared, backend: Backend, limits: Limits, executor: Executor) -> Drafter:
    formats = copy_formats(prepared.program, prepared.layouts())
    weights = Encoded(prepared.weights, formats, backend.encode, _threads(limits))
    own = replace(limits, tokens=limits.sequences)
    copy = backend.executor(prepared.program, weights, own, beside=executor)
    return Drafter(copy, own, copy.weight_bytes / executor.weight_bytes, apart=False)


def _smaller(smaller: Smaller, backend: Backend, limits: Limits, executor: Executor) -> Drafter:
    prepared = smaller.prepared
    own = replace(
        limits,
        tokens=max(DRAFT_ROWS, limits.sequences),
        context=min(limits.context, prepared.config.context),
        vocab=min(limits.vocab, prepared.config.vocab, smaller.vocab_size),
        slots=0,
    )
    weights = _encoded(prepared, backend, limits)
    made = backend.executor(prepared.program, weights, own, beside=executor, apart=True)
    return Drafter(made, own, made.weight_bytes / executor.weight_bytes, apart=True)


def _encoded(prepared: Prepared, backend: Backend, limits: Limits) -> Encoded:
    return Encoded(prepared.weights, prepared.formats, backend.encode, _threads(limits))


def _threads(limits: Limits) -> int:
    return limits.threads or len(os.sched_getaffinity(0))


def _with_rope_factors(checkpoint: Checkpoint, model: Model) -> Model:
    tensor = checkpoint.tensors.get(ROPE_FACTORS)
    if tensor is None or checkpoint.kind != "gguf":
        return model
    pairs = model.config.rotary // 2
    if prod(tensor.shape) != pairs:
        raise BadModelFile(tensor.file, f"expected shape ({pairs},), found {tensor.shape}", tensor=tensor.name)
    factors = _floats(tensor)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise BadModelFile(tensor.file, "rope factors must be finite and above zero", tensor=tensor.name)
    return model.with_rope_factors(tuple(map(float, factors)))


def _floats(tensor: Tensor) -> Floats:
    return dequantize(tensor.format, tensor.rows()).reshape(-1)


def _check(checkpoint: Checkpoint, model: Model) -> None:
    """Every tensor there with its shape; nothing left over that matters."""
    for entry in model.table.entries.values():
        for source in entry.sources:
            _check_source(checkpoint, source)
    fatal, stray = leftovers(checkpoint.tensors, model.table, KNOWN)
    fatal = [name for name in fatal if not _adds_nothing(checkpoint.tensors[name])]
    if fatal:
        architecture = model.config.architecture
        raise BadModelFile(
            checkpoint.path,
            f"a model of kind {architecture!r} with {model.config.layers} layers has no use for it"
            + (f" and {len(fatal) - 1} more like it" if len(fatal) > 1 else "")
            + "; the configuration does not describe these weights",
            tensor=fatal[0],
        )
    for note in model.table.notes:
        log.warning("%s: %s", checkpoint.path, note)
    if stray:
        shown = ", ".join(stray[:5]) + (", ..." if len(stray) > 5 else "")
        log.warning("%s: %d tensors that the model doesn't use are ignored: %s", checkpoint.path, len(stray), shown)


def _adds_nothing(tensor: Tensor) -> bool:
    """A bias of zeros, as libraries that quantise leave them where a model has none."""
    return tensor.name.endswith(".bias") and tensor.format.block == 1 and not tensor.data.any()


def _check_source(checkpoint: Checkpoint, source: Source) -> None:
    tensor = checkpoint.tensors.get(source.tensor)
    if tensor is None:
        raise BadModelFile(checkpoint.path, f"is missing; expected shape {source.shape}", tensor=source.tensor)
    if tensor.shape != source.shape:
        raise BadModelFile(tensor.file, f"expected shape {source.shape}, found {tensor.shape}", tensor=tensor.name)
    if tensor.format.name not in COMPUTED:
        raise BadModelFile(tensor.file, f"{tensor.format.name} alone is no weight's format", tensor=tensor.name)


class CheckpointWeights:
    """A `WeightSource` over a checkpoint: gathers each weight's rows, reorders what a format stores differently."""

    def __init__(self, checkpoint: Checkpoint, model: Model) -> None:
        self._checkpoint = checkpoint
        self._entries = model.table.entries
        self._config = model.config

    def load(self, name: str) -> WeightData:
        """A weight's rows, found to be finite. Matrices stay in the file's formats, vectors become one float32 row."""
        entry = self._entries[name]
        weight = entry.weight
        if len(weight.shape) == 1:
            parts: tuple[Part, ...] = (self._vector(entry),)
        else:
            parts = tuple(self._rows(source) for source in entry.sources)
        return WeightData(weight, parts, entry.same_as)

    def release(self, name: str) -> None:
        for source in self._entries[name].sources:
            self._checkpoint.release(self._checkpoint.tensors[source.tensor])

    def _tensor(self, source: Source) -> tuple[Tensor, Bytes]:
        """The tensor and its rows, of one expert where they are stacked."""
        tensor = self._checkpoint.tensors[source.tensor]
        rows = tensor.rows()
        if source.expert is not None:
            each = tensor.shape[1]
            rows = rows[source.expert * each : (source.expert + 1) * each]
        if not check_finite(tensor.format, rows):
            raise BadModelFile(tensor.file, "holds NaN or Inf", tensor=tensor.name)
        return tensor, rows

    def _rows(self, source: Source) -> Part:
        tensor, rows = self._tensor(source)
        return Part(tensor.format, _ROWS[source.transform](rows, self._config))

    def _vector(self, entry: Entry) -> Part:
        pieces = []
        for source in entry.sources:
            tensor, rows = self._tensor(source)
            values = dequantize(tensor.format, rows).reshape(-1)
            pieces.append(_VALUES[source.transform](values, self._config))
        return Part(F32, np.concatenate(pieces).astype("<f4").view(np.uint8).reshape(1, -1))


def neox_order(rows: int, head_dim: int, rotary: int) -> NDArray[np.int64]:
    """Where each row comes from when pairs (2i, 2i+1) of a head's first `rotary` rows go to (i, i + rotary/2)."""
    pairs = np.arange(rotary).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate([pairs, np.arange(rotary, head_dim)])
    return np.asarray((np.arange(0, rows, head_dim)[:, None] + head).reshape(-1), np.int64)


def _neox_rows(rows: Bytes, c: Config) -> Bytes:
    return rows[neox_order(len(rows), c.head_dim, c.rotary)]


def _neox_values(values: Floats, c: Config) -> Floats:
    return values[neox_order(len(values), c.head_dim, c.rotary)]


_ROWS: Mapping[str, Callable[[Bytes, Config], Bytes]] = {"": lambda rows, _: rows, "neox": _neox_rows}
_VALUES: Mapping[str, Callable[[Floats, Config], Floats]] = {
    "": lambda values, _: values,
    "neox": _neox_values,
    "plus_one": lambda values, _: values + np.float32(1),
}
