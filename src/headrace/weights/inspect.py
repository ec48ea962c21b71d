"""What a checkpoint is made of: formats and bytes by group of tensors. Knows architectures by tensor names only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from headrace.weights.checkpoint import Checkpoint, Kind, Tensor

# The first pattern that a tensor's name contains decides; names of GGUF and of safetensors alike.
_GROUPS = (
    ("norms", re.compile(r"norm")),
    ("experts", re.compile(r"_exps\b|\.experts\.|_shexp\b|shared_expert")),
    ("router", re.compile(r"ffn_gate_inp|\.(router|gate)\.")),
    ("attention", re.compile(r"attn|self_attn")),
    ("mlp", re.compile(r"ffn|mlp|feed_forward")),
    ("embedding", re.compile(r"token_embd|embed_tokens|\bwte\b")),
    ("head", re.compile(r"^output\.|lm_head")),
)
_REST = "other"


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one purpose. formats: format name -> how many tensors have it, the most frequent first."""

    name: str
    tensors: int
    values: int
    bytes: int
    formats: dict[str, int]


@dataclass(frozen=True, slots=True)
class Description:
    """name, architecture: as the checkpoint calls itself, or empty. scheme: as in `Checkpoint`.

    files: that hold tensors. groups: largest first.
    """

    path: Path
    kind: Kind
    name: str
    architecture: str
    scheme: str
    files: int
    tensors: int
    values: int
    bytes: int
    groups: tuple[Group, ...]


def describe(checkpoint: Checkpoint) -> Description:
    tensors = list(checkpoint.tensors.values())
    grouped: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        grouped.setdefault(group_of(tensor.name), []).append(tensor)
    groups = (_group(name, members) for name, members in grouped.items())
    return Description(
        path=checkpoint.path,
        kind=checkpoint.kind,
        name=_text(checkpoint.config.get("general.name", checkpoint.config.get("_name_or_path"))),
        architecture=_architecture(checkpoint),
        scheme=checkpoint.scheme,
        files=len({tensor.file for tensor in tensors}),
        tensors=len(tensors),
        values=_values(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        groups=tuple(sorted(groups, key=lambda group: -group.bytes)),
    )


def group_of(name: str) -> str:
    """Which group the tensor of that name belongs to."""
    return next((group for group, pattern in _GROUPS if pattern.search(name)), _REST)


def _group(name: str, tensors: list[Tensor]) -> Group:
    formats = Counter(tensor.format.name for tensor in tensors)
    return Group(name, len(tensors), _values(tensors), sum(t.nbytes for t in tensors), dict(formats.most_common()))


def _values(tensors: Iterable[Tensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def _architecture(checkpoint: Checkpoint) -> str:
    """GGUF says ``general.architecture``; a config.json ``model_type``."""
    key = "general.architecture" if checkpoint.kind == "gguf" else "model_type"
    return _text(checkpoint.config.get(key))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
