"""A model, understood, as a GGUF file would describe it: names of tensors, and the keys of its numbers.

Owes: for a model that came as safetensors, what llama.cpp's readers (and ours) expect; for one that came as GGUF, its
own names. Does not know formats, files or tokenizers. Source: ggml-org/llama.cpp, gguf-py/gguf/constants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import BadModelFile
from headrace.models.config import Config
from headrace.models.keys import NAMES
from headrace.models.registry import GGUF, Model
from headrace.models.table import Piece, Row, extents
from headrace.program import Rope

_SPELLED = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "mistral": "llama", "mixtral": "llama"}


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of a GGUF file. shape: numpy's order. weight: ours that holds its rows.

    parts: which sources of that weight, in the order of its entry, lie one under the other in it. first: where its rows
    begin among those of a vector. turned: whether the file has the rotary pairs of its rows side by side.
    """

    name: str
    shape: tuple[int, ...]
    weight: str
    parts: tuple[int, ...]
    first: int
    turned: bool


def architecture_name(config: Config) -> str:
    """What GGUF calls the architecture. BadModelFile if it knows none."""
    name = _SPELLED.get(config.architecture, config.architecture)
    if name not in GGUF:
        raise BadModelFile("the model", f"GGUF has no architecture for {config.architecture!r}")
    return name


def targets(model: Model) -> list[Target]:
    """The tensors of the model in a GGUF file, layer by layer, then the rest; a tied head's left out."""
    rows = model.architecture.WEIGHTS
    layered = [row for row in rows if "{i}" in row.name]
    found = [t for i in range(model.config.layers) for row in layered for t in _of_row(model, row, i)]
    return found + [t for row in rows if row not in layered for t in _of_row(model, row, 0)]


def _of_row(model: Model, row: Row, i: int) -> Iterator[Target]:
    name = row.name.format(i=i)
    entry = model.table.entries.get(name)
    if entry is None or entry.same_as:
        return
    first = 0
    for at, piece in enumerate(row.pieces):
        end = "bias" if row.name.endswith(".bias") else "weight"
        spelled = f"blk.{i}.{piece.gguf}.{end}" if "{i}" in row.name else f"{piece.gguf}.{end}"
        shape = _shape(model.config, row, piece)
        parts = tuple(range(at, len(entry.sources), len(row.pieces)))
        yield Target(spelled, shape, name, parts, first, piece.gguf_transform == "neox")
        first += shape[0]


def _shape(c: Config, row: Row, piece: Piece) -> tuple[int, ...]:
    sizes = extents(c)
    shape = (sizes[piece.rows], sizes[row.columns]) if row.columns else (sizes[piece.rows],)
    return (c.experts, *shape) if row.stacked else shape


def metadata(model: Model, name: str) -> dict[str, Any]:
    """The model's keys but its tokenizer's. BadModelFile for what GGUF cannot say."""
    c, spelled = model.config, architecture_name(model.config)
    found = {**_sizes(c), **_optional(c), **_windows(c)}
    keys = {NAMES[ours][1]: value for ours, value in found.items()} | _rope(_turning(c)) | _local_rope(c)
    return {
        "general.architecture": spelled,
        "general.name": name,
        **{f"{spelled}.{key}": value for key, value in keys.items()},
    }


def _sizes(c: Config) -> dict[str, Any]:
    return {
        "layers": c.layers,
        "context": c.context,
        "dim": c.dim,
        "hidden": c.hidden,
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "value_dim": c.head_dim,
        "eps": c.eps,
        "vocab": c.vocab,
        "rotary": c.rotary,
        "rope_theta": _turning(c).theta,
    }


# What a file says only where it is not this.
_NEUTRAL: dict[str, tuple[float, Callable[[Config], float]]] = {
    "attention_softcap": (0.0, lambda c: c.attention_softcap),
    "logit_softcap": (0.0, lambda c: c.logit_softcap),
    "residual_scale": (1.0, lambda c: c.residual_scale),
    "logit_divisor": (1.0, lambda c: 1.0 / c.logit_scale),
    "experts": (0, lambda c: c.experts),
    "experts_used": (0, lambda c: c.experts_used),
}


def _optional(c: Config) -> dict[str, Any]:
    found: dict[str, Any] = {name: of(c) for name, (neutral, of) in _NEUTRAL.items() if of(c) != neutral}
    if c.architecture == "granite":  # others derive these from their sizes
        found |= {"embed_scale": c.embed_scale, "attention_scale": c.attention_scale}
    if c.architecture == "qwen3_moe":
        found["expert_hidden"] = c.hidden
    return found


def _windows(c: Config) -> dict[str, Any]:
    """One window at most, in the layers in which the architecture has it when a GGUF file says nothing else."""
    widths = {window for window in c.windows if window}
    if not widths:
        return {}
    if len(widths) > 1:
        raise BadModelFile("the model", "its layers see windows of several sizes; GGUF has one for all")
    return {"window": widths.pop()}


def _turning(c: Config) -> Rope:
    """The rotation of the layers that see everything, or of any."""
    pairs = list(zip(c.windows, c.ropes, strict=True))
    whole = (rope for window, rope in pairs if rope and not window)
    return next(whole, next((rope for _, rope in pairs if rope), Rope(c.head_dim)))


def _rope(rope: Rope) -> dict[str, Any]:
    if rope.kind in ("default", "llama3"):
        return {}  # llama3: see `rope_factors`
    found: dict[str, Any] = {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        found["rope.scaling.original_context_length"] = rope.original
        found["rope.scaling.yarn_beta_fast"] = rope.beta_fast
        found["rope.scaling.yarn_beta_slow"] = rope.beta_slow
    return found


def _local_rope(c: Config) -> dict[str, Any]:
    """The base of layers with a window, where it is one of their own."""
    local = next((rope for window, rope in zip(c.windows, c.ropes, strict=True) if rope and window), None)
    return {} if local is None or local == _turning(c) else {"rope.freq_base_swa": local.theta}


def rope_factors(c: Config) -> tuple[float, ...]:
    """By what each pair's frequency is divided, where only a tensor can say so; () where nothing need be said."""
    rope = _turning(c)
    if rope.freq_factors:
        return rope.freq_factors
    if rope.kind != "llama3":
        return ()
    unscaled = Rope(rope.rotary, rope.theta).frequencies()
    return tuple(map(float, unscaled / rope.frequencies()))
