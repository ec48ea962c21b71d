"""The architectures by the names that checkpoints give them, and the way from a configuration to a recorded program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.base.errors import BadModelFile
from headrace.models import gemma2, gemma3, granite, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe, smollm3
from headrace.models.config import Config
from headrace.models.keys import Keys, Kind
from headrace.models.table import Row, Table, lay_out
from headrace.program import Program, Recorder, StepInputs, Value, Weight


class Architecture(Protocol):
    """What each file of this folder holds."""

    @property
    def WEIGHTS(self) -> tuple[Row, ...]: ...

    def config(self, keys: Keys) -> Config: ...

    def forward(self, ops: Recorder, c: Config, w: Mapping[str, Weight], step: StepInputs) -> Value: ...


HF: dict[str, Architecture] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "phi3": phi3,
    "smollm3": smollm3,
    "granite": granite,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}

GGUF: dict[str, Architecture] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "smollm3": smollm3,
    "granite": granite,
    "qwen3moe": qwen3_moe,
}

# What the tensors of a layer are called after its number, by every architecture; "{e}" for the number of an expert.
KNOWN = frozenset(
    name
    for module in (*HF.values(), *GGUF.values())
    for row in module.WEIGHTS
    if "{i}" in row.name
    for piece in row.pieces
    for name in (piece.hf, piece.gguf)
)


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint understood: its numbers, where its weights come from, and its maths."""

    config: Config
    table: Table
    architecture: Architecture

    def record(self) -> Program:
        """Runs `forward` once with symbolic values."""
        weights = {name: entry.weight for name, entry in self.table.entries.items()}
        ops = Recorder(weights)
        return ops.program(self.architecture.forward(ops, self.config, weights, ops.inputs))

    def with_rope_factors(self, factors: tuple[float, ...]) -> Model:
        return replace(self, config=self.config.with_rope_factors(factors))


def _text_half(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the decoder inside a model that also sees; its images are refused elsewhere."""
    text = raw.get("text_config")
    if raw.get("model_type") != "gemma3" or not isinstance(text, Mapping):
        return raw
    return {**text, "model_type": "gemma3_text"}


def _find(raw: Mapping[str, Any], kind: Kind, file: str) -> tuple[str, Architecture]:
    known, key = (GGUF, "general.architecture") if kind == "gguf" else (HF, "model_type")
    name = raw.get(key)
    if not isinstance(name, str) or name not in known:
        raise BadModelFile(file, f"the architecture {name!r} ({key}) is not supported; known: {', '.join(known)}")
    mixture = kind == "gguf" and name == "llama" and raw.get("llama.expert_count")
    return name, mixtral if mixture else known[name]


def describe(
    raw: Mapping[str, Any], kind: Kind, shapes: Mapping[str, tuple[int, ...]], file: str = "the model"
) -> Model:
    """Reads a configuration, for a file whose tensors have these shapes.

    Raises `BadModelFile` (naming `file`) for an architecture, activation, rope kind or feature that is not supported,
    and for numbers that make no sense. Whether the tensors fit the table is for the caller to check.
    """
    if kind == "safetensors":
        raw = _text_half(raw)
    name, architecture = _find(raw, kind, file)
    keys = Keys(raw, kind, name, shapes, file)
    config = architecture.config(keys)
    return Model(config, lay_out(keys, config, architecture.WEIGHTS), architecture)
