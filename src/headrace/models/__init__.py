"""Floor 2: what a model is. One short file an architecture: numbers (`config`), weights (`WEIGHTS`), maths (`forward`).

Knows no weight formats, no KV layout, no ranks, and no files: it takes plain mappings, names and shapes.
"""

from __future__ import annotations

from headrace.models.config import Config
from headrace.models.keys import Keys, Kind
from headrace.models.registry import GGUF, HF, Architecture, Model, describe
from headrace.models.table import Entry, Source, Table, leftovers

__all__ = [
    "GGUF",
    "HF",
    "Architecture",
    "Config",
    "Entry",
    "Keys",
    "Kind",
    "Model",
    "Source",
    "Table",
    "describe",
    "leftovers",
]
