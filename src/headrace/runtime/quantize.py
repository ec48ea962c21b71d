"""From a checkpoint to a quantised GGUF file, tensor by tensor.

Owes: a file that means the same model, each matrix in the format that the recipe gives it and as good as the method can
make it; what was written, for people to read. Memory at any moment: 16 MiB of a tensor as float32, and
what calibration takes: the model in the back end's form, and moments within a bound.
Does not know the command line, or how blocks are chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backends.registry import backend_named
from headrace.base.errors import BadModelFile, SettingError
from headrace.base.formats import F32, FLOATS, Format
from headrace.models.config import Config
from headrace.models.export import Target, metadata, rope_factors, targets
from headrace.models.registry import describe
from headrace.quant import second_order
from headrace.quant.blocks import Bytes, Floats, check_finite, dequantize, quantize
from headrace.quant.encode import CODINGS, encode
from headrace.quant.recipes import Rule, fitting, recipe_named
from headrace.runtime.calibrate import LENGTH, Calibration
from headrace.runtime.encoded import format_wanted
from headrace.runtime.load import ROPE_FACTORS, Prepared, neox_order
from headrace.runtime.smooth import Smoothing, makers
from headrace.runtime.texts import manual, of_file
from headrace.text import Tokenizer
from headrace.text.export import tokenizer_metadata
from headrace.weights.gguf_writer import TensorHead, write_gguf

Rows = Callable[[Floats], Bytes]
"""Floats [rows, columns] as blocks, uint8 [rows, row bytes]; called for one stretch of rows after another."""
Encoder = Callable[[Format, str], Rows]
"""How the rows of a weight (by our name) become blocks of a format."""

MOST_TOKENS, MOST_CHARACTERS = 1 << 22, 16  # of a calibration text; characters of a token
SMOOTHED = {"q8_0": 0.5}  # by format; see docs/log.md for others
STRETCH = 1 << 22  # values of a tensor that are in memory as float32
# llama.cpp's numbers for what most of a file's tensors are (include/llama.h, enum llama_ftype).
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q4_k": 14, "q6_k": 18}
NOT_SMOOTHED = Smoothing({}, lambda _: None, 0)
_DROPPED = ("split.", "quantize.", "general.alignment", "general.file_type")


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to write, and the format that it should have had if its rows did not fit."""

    target: Target
    head: TensorHead
    wanted: Format


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a file will hold, known before a weight is read."""

    metadata: dict[str, Any]
    tensors: tuple[Planned, ...]
    factors: tuple[float, ...]

    @property
    def nbytes(self) -> int:
        return sum(planned.head.nbytes for planned in self.tensors)

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / sum(prod(planned.head.shape) for planned in self.tensors)

    @property
    def replaced(self) -> list[Planned]:
        """Tensors whose rows are no whole number of blocks."""
        return [p for p in self.tensors if p.head.format != p.wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """How a model is made smaller.

    to: the format of most matrices. recipe: of `headrace.quant.recipes`, or a JSON file: which tensors get another.
    method: of METHODS. calibration: a text file; None takes Python's own documentation, its last chapters first.
    calibration_tokens: how much of it is run. calibration_bytes: what is learnt from it may take at a time.
    smoothing: how much channels are made alike, see `Smoothing`; without calibration they are not. None takes what is
        known to be good for the format: SMOOTHED.
    threads: 0 takes what the machine allows. allow_requantize: also take weights that are quantised already.
    """

    to: str = "q8_0"
    recipe: str = "mixed"
    method: str = "scale"
    calibration: Path | None = None
    calibration_tokens: int = 8192
    calibration_bytes: int = 1 << 30
    smoothing: float | None = None
    threads: int = 0
    allow_requantize: bool = False

    def __post_init__(self) -> None:
        for name, ok, wanted in (
            ("to", self.to in CODINGS, f"one of {', '.join(CODINGS)}"),
            ("method", self.method in METHODS, f"one of {', '.join(METHODS)}"),
            ("calibration_tokens", 1 <= self.calibration_tokens <= MOST_TOKENS, f"from 1 to {MOST_TOKENS}"),
            ("calibration_bytes", self.calibration_bytes >= 1, "a number of bytes"),
            ("smoothing", self.smoothing is None or 0 <= self.smoothing <= 1, "from 0 (none) to 1"),
            ("threads", 0 <= self.threads <= 256, "from 0 (automatic) to 256"),
        ):
            if not ok:
                raise SettingError(f"{name} must be {wanted}, got {getattr(self, name)!r}", param=name)


class Watch(Protocol):
    """Who is told how far it is."""

    def calibrated(self, tokens: int) -> None: ...

    def written(self, nbytes: int, total: int) -> None: ...


def quantize_model(prepared: Prepared, path: Path, settings: QuantizeSettings, watch: Watch | None = None) -> Plan:
    """Writes a quantised copy of a model to `path`, and says what it holds. Closes the checkpoint.

    SettingError for settings that cannot be, BadModelFile for a model that GGUF cannot describe, CapacityError for a
    full disk; then nothing is left behind.
    """
    if prepared.checkpoint.reads(path):
        raise SettingError(f"{path} is what is read; write the smaller copy to another file", param="dst")
    made = plan(prepared, settings.to, recipe_named(settings.recipe), settings.allow_requantize)
    threads = settings.threads or len(os.sched_getaffinity(0))
    written = partial(watch.written, total=made.nbytes) if watch else _nobody
    method = METHODS[settings.method]
    if method is None:
        write(made, prepared, path, _plain, written)
    else:
        calibration = _calibration(prepared, settings, method.full, watch.calibrated if watch else _nobody)
        found = makers(prepared.program, prepared.model)
        strength = SMOOTHED.get(settings.to, 0.0) if settings.smoothing is None else settings.smoothing
        smoothing = Smoothing(found, calibration.moments, strength)
        learnt = Learnt(calibration, smoothing, threads)
        try:
            write(made, prepared, path, method.encoder(learnt), written, smoothing)
        finally:
            calibration.close()
    prepared.checkpoint.close()
    return made


def _nobody(_: int) -> None:
    """Is told, and does nothing."""


def _plain(format: Format, _: str) -> Rows:
    backend = backend_named("cpu")
    return lambda values: backend.encode(F32, format, values.view(np.uint8))


@dataclass(frozen=True, slots=True)
class Learnt:
    """What encoders go by: what was seen of a text, and how channels are made alike."""

    calibration: Calibration
    smoothing: Smoothing
    threads: int

    def moments(self, weight: str) -> Floats | None:
        """Second moments of what the weight will read."""
        moments, factors = self.calibration.moments(weight), self.smoothing.columns(weight)
        if moments is None or factors is None:
            return moments
        return moments / (factors**2 if moments.ndim == 1 else np.outer(factors, factors))


def _scaled(learnt: Learnt) -> Encoder:
    def encoder(format: Format, weight: str) -> Rows:
        importance = learnt.moments(weight)
        return lambda values: encode(format, values, importance, learnt.threads)

    return encoder


def _fed_back(learnt: Learnt) -> Encoder:
    def encoder(format: Format, weight: str) -> Rows:
        moments = learnt.moments(weight)
        if moments is None or weight == "embed":  # a tied one is also read row by row, where errors cannot make up
            diagonal = None if moments is None else np.ascontiguousarray(moments.diagonal())
            return lambda values: encode(format, values, diagonal, learnt.threads)
        return second_order.encoder(format, moments, learnt.threads)

    return encoder


@dataclass(frozen=True, slots=True)
class Method:
    """How blocks are chosen, knowing what linears read. full: all second moments; else their diagonal."""

    full: bool
    encoder: Callable[[Learnt], Encoder]


METHODS: dict[str, Method | None] = {"plain": None, "scale": Method(False, _scaled), "gptq": Method(True, _fed_back)}


def _calibration(
    prepared: Prepared, settings: QuantizeSettings, full: bool, done: Callable[[int], None]
) -> Calibration:
    checkpoint = prepared.checkpoint
    gguf = checkpoint.kind == "gguf"
    tokenizer = Tokenizer.from_gguf(checkpoint.config) if gguf else Tokenizer.from_folder(checkpoint.path)
    most, path = settings.calibration_tokens * MOST_CHARACTERS, settings.calibration
    text = of_file(path, most, "calibration") if path else manual(last_first=True)[:most]
    ids = tokenizer.encode(text, parse_special=False)[: settings.calibration_tokens]
    if not ids:
        raise SettingError("calibration: the text is empty", param="calibration")
    sequences = [ids[at : at + LENGTH] for at in range(0, len(ids), LENGTH)]
    backend = backend_named("cpu", taps=True)
    return Calibration(prepared, backend, sequences, full=full, bound=settings.calibration_bytes, done=done)


def plan(prepared: Prepared, base: str, rules: tuple[Rule, ...], requantize: bool = False) -> Plan:
    """What a quantised copy of a model will be. BadModelFile for one that GGUF cannot describe.

    requantize: also take weights that are quantised already; otherwise they are a SettingError.
    """
    c = prepared.config
    quantised = [t.name for t in prepared.checkpoint.tensors.values() if t.format not in FLOATS]
    if quantised and not requantize:
        raise SettingError(
            f"{quantised[0]} is {prepared.checkpoint.tensors[quantised[0]].format.name} already: quantising twice costs"
            " quality; take the model's float weights, or --allow-requantize",
            param="src",
        )
    made = targets(prepared.model)
    tied = prepared.model.table.entries["head"].same_as is not None
    tensors = tuple(_planned(target, rules, base, c, tied) for target in made)
    described = _metadata(prepared) | {
        "general.file_type": FILE_TYPES[base],
        "general.quantization_version": 2,
    }
    _check(described, tensors, prepared)
    factors = rope_factors(c)
    return Plan(described, tensors, factors)


def _planned(target: Target, rules: tuple[Rule, ...], base: str, c: Config, tied: bool) -> Planned:
    format = format_wanted(target, rules, base, c, tied)
    return Planned(target, TensorHead(target.name, target.shape, fitting(format, target.shape[-1])), format)


def _metadata(prepared: Prepared) -> dict[str, Any]:
    checkpoint = prepared.checkpoint
    if checkpoint.kind == "gguf":
        return {key: value for key, value in checkpoint.config.items() if not key.startswith(_DROPPED)}
    described = metadata(prepared.model, checkpoint.path.resolve().name)
    return described | tokenizer_metadata(checkpoint.path, prepared.config.vocab)


def _check(described: dict[str, Any], tensors: tuple[Planned, ...], prepared: Prepared) -> None:
    """The metadata must be read as the model that it came from: GGUF has no words for some."""
    shapes = {planned.head.name: planned.head.shape for planned in tensors}
    ours, read = prepared.config, describe(described, "gguf", shapes).config
    factors = rope_factors(ours)
    read = read.with_rope_factors(factors) if factors else read
    for name in ("windows", "attention_scale", "attention_softcap", "logit_softcap", "embed_scale", "residual_scale",
                 "logit_scale", "experts_used", "renormalise", "activation", "eps", "head_dim", "hidden"):  # fmt: skip
        if not _same(getattr(ours, name), getattr(read, name)):
            raise BadModelFile(prepared.checkpoint.path, f"GGUF cannot say that its {name} is {getattr(ours, name)}")
    for i, (one, other) in enumerate(zip(ours.ropes, read.ropes, strict=True)):
        if (one is None) != (other is None) or (one and other and not _same(one.table(3), other.table(3))):
            raise BadModelFile(prepared.checkpoint.path, f"GGUF cannot say how layer {i} turns q and k: {one}")


def _same(ours: Any, read: Any) -> bool:
    if isinstance(ours, str):
        return bool(ours == read)
    return np.allclose(np.asarray(ours, np.float64), np.asarray(read, np.float64), rtol=1e-6, atol=1e-6)


def write(
    made: Plan,
    prepared: Prepared,
    path: Path,
    encoder: Encoder,
    done: Callable[[int], None] = _nobody,
    smoothing: Smoothing = NOT_SMOOTHED,
) -> None:
    """Writes the file. done: is told the bytes of each piece when it has been made."""
    heads = [planned.head for planned in made.tensors]
    tensors: Iterable[Iterator[Bytes]] = (
        _counted(_tensor(planned, prepared, encoder, smoothing), done) for planned in made.tensors
    )
    if made.factors:
        heads.append(TensorHead(ROPE_FACTORS, (len(made.factors),), F32))
        tensors = chain(tensors, [iter([np.asarray(made.factors, "<f4").view(np.uint8)])])
    write_gguf(path, made.metadata, heads, tensors)


def _counted(pieces: Iterator[Bytes], done: Callable[[int], None]) -> Iterator[Bytes]:
    for piece in pieces:
        yield piece
        done(piece.nbytes)


def _tensor(planned: Planned, prepared: Prepared, encoder: Encoder, smoothing: Smoothing) -> Iterator[Bytes]:
    """The bytes of a tensor, a stretch of rows at a time."""
    target, format = planned.target, planned.head.format
    data, c = prepared.weights.load(target.weight), prepared.config
    if len(target.shape) == 1:
        values = dequantize(F32, data.parts[0].data).reshape(-1, 1)
        values = _times(values, smoothing.rows(target.weight, len(values)))
        values = values[target.first : target.first + target.shape[0]]
        yield _in_file_order(target, values, c).astype("<f4").view(np.uint8)
        return
    ends = np.cumsum([len(part.data) for part in data.parts])
    columns, rows = smoothing.columns(target.weight), smoothing.rows(target.weight, int(ends[-1]))
    encode_rows = _floats(format) if format in FLOATS else encoder(format, target.weight)
    step = max(1, STRETCH // target.shape[-1])
    for number in target.parts:
        part = data.parts[number]
        packed = _in_file_order(target, part.data, c)
        first = ends[number] - len(packed)
        for at in range(0, len(packed), step):
            values = dequantize(part.format, packed[at : at + step])
            values = values if columns is None else values * columns
            factors = None if rows is None else rows[first + at : first + at + len(values)]
            yield _finite(format, target, encode_rows(_times(values, factors)))
    prepared.weights.release(target.weight)


def _times(values: Floats, factors: Floats | None) -> Floats:
    """Rows times their factors."""
    return values if factors is None else values * factors[:, None]


def _in_file_order(target: Target, rows: NDArray[Any], c: Config) -> NDArray[Any]:
    if not target.turned:
        return rows
    turned = np.empty_like(rows)
    turned[neox_order(len(rows), c.head_dim, c.rotary)] = rows
    return turned


def _floats(format: Format) -> Rows:
    return lambda values: quantize(format, values)


def _finite(format: Format, target: Target, packed: Bytes) -> Bytes:
    if not check_finite(format, packed):
        raise BadModelFile("the model", f"holds values that {format.name} cannot hold", tensor=target.name)
    return packed
