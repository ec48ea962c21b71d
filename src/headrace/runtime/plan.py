"""What a model will take, before anything is loaded: bytes of weights and KV cache, and how many requests fit.

Owes: the figures that the engine would arrive at, to the byte, by the same functions. Reads headers and configurations,
no weights. Does not know what else a process takes (some 0.1 GB), and no time but that of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path

from headrace.backends import Backend
from headrace.base.formats import F32, FORMATS, Format
from headrace.base.settings import BATCHED_TOKENS, PAGE
from headrace.models import Config, Model, Source, describe
from headrace.program import Layout, Program
from headrace.program.cost import Load, kv_bytes, kv_bytes_per_token, total
from headrace.quant.recipes import fitting
from headrace.runtime.cache import Cache, cache_of
from headrace.runtime.encoded import in_formats, recipe_formats
from headrace.runtime.load import copy_formats, layouts, prepare
from headrace.weights.safetensors import CONFIG, QUANTIZATION, read_json


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights in one format, or as they are served (format "").

    bytes: in memory, repacked; drafter: of who drafts for them. step_bytes: (sequences, context) -> what a step reads
    in which they all decode.
    """

    format: str
    bytes: int
    step_bytes: Callable[[int, int], float]
    drafter: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned for. values: in the weights, 0 if not known (then there are no `weights`), shared ones once.

    config: None where only numbers are known.
    """

    cache: Cache
    values: int
    weights: tuple[Weights, ...]
    config: Config | None = None


def of_numbers(layers: int, kv_heads: int, head_size: int, bits: float = 16, values: int = 0) -> Subject:
    """From plain numbers. bits: of a number in the cache, scales included. values: in the weights; 0: unknown."""
    cache = Cache(ceil(PAGE * kv_bytes(layers, kv_heads, head_size, bits / 8)))
    sizes = {name: ceil(values * format.bits / 8) for name, format in FORMATS.items()} if values else {}
    return Subject(cache, values, tuple(_flat(name, size, cache) for name, size in sizes.items()))


def _flat(name: str, size: int, cache: Cache) -> Weights:
    return Weights(name, size, lambda sequences, context: size + sequences * context * cache.token_bytes)


def of_path(path: Path, backend: Backend, quantization: str | None = None, copied: bool = False) -> Subject:
    """From a checkpoint, or from a config.json or a folder that holds one alone.

    quantization: as `serve` has it; the first row is then of the weights as they are served. copied: with the copy that
    drafts for them.

    Raises `BadModelFile` for what cannot be read or run, `ModelNotFound` where nothing is.
    """
    alone = _config_alone(path)
    if alone is None:
        prepared = prepare(path, quantization)
        stored = {"": prepared.layouts()}
        subject = _of_model(prepared.model, prepared.program, stored, backend, copied)
        prepared.checkpoint.close()
        return subject
    config = {key: value for key, value in read_json(alone).items() if key != QUANTIZATION}  # which formats say instead
    model = describe(config, "safetensors", {}, str(alone))
    program = model.record()
    served = {"": _served(model, program, quantization)} if quantization else {}
    return _of_model(model, program, served, backend, copied)


def beside(subject: Subject, draft: Subject) -> Subject:
    """A model with another that drafts for it, as the first of its rows has it, in pages and memory."""
    cache = replace(subject.cache, page_bytes=subject.cache.page_bytes + draft.cache.page_bytes)
    drafter = draft.weights[0].bytes
    return replace(subject, cache=cache, weights=tuple(replace(w, drafter=drafter) for w in subject.weights))


def _config_alone(path: Path) -> Path | None:
    """The config.json that is all there is, if so."""
    if path.is_file():
        return path if path.suffix == ".json" else None
    config = path / CONFIG
    return config if config.is_file() and not any(path.glob("*.safetensors*")) else None


def _of_model(
    model: Model, program: Program, stored: Mapping[str, Mapping[str, Layout]], backend: Backend, copied: bool
) -> Subject:
    cache = cache_of(program, backend, BATCHED_TOKENS)
    planned = dict(stored) | {name: _all_in(format, model, program) for name, format in FORMATS.items()}
    weights = (_of_program(name, program, found, cache, backend, copied) for name, found in planned.items())
    return Subject(cache, _values(model, program), tuple(weights), model.config)


def _values(model: Model, program: Program) -> int:
    entries = [model.table.entries[name] for name in program.weights]
    return sum(prod(entry.weight.shape) for entry in entries if entry.same_as not in program.weights)


def _served(model: Model, program: Program, quantization: str) -> dict[str, Layout]:
    """Floats, quantised as they are loaded."""
    return in_formats(layouts(model, program, lambda _: F32), recipe_formats(model, quantization))


def _all_in(format: Format, model: Model, program: Program) -> dict[str, Layout]:
    """Every matrix in one format; vectors stay float32."""

    def chosen(source: Source) -> Format:
        return fitting(format, source.shape[-1])

    return layouts(model, program, chosen)


def _of_program(
    name: str, program: Program, found: Mapping[str, Layout], cache: Cache, backend: Backend, copied: bool
) -> Weights:
    sizes = {key: layout.nbytes for key, layout in found.items()}
    element = cache.token_bytes / kv_bytes_per_token(program, 1)

    def step_bytes(sequences: int, context: int) -> float:
        load = Load([1] * sequences, [context] * sequences, sequences, element)
        return total(program, sizes, load).bytes

    copy = in_formats(found, copy_formats(program, found)) if copied else None
    drafter = 0 if copy is None else backend.weight_bytes(program, copy)
    return Weights(name, backend.weight_bytes(program, found), step_bytes, drafter)
