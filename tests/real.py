"""Real models in tests: their names, and the reference values for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# fixture name: the model's file, and that of its reference values, without suffixes
REAL = {
    "smollm2": "smollm2-135m-instruct-q4_1",
    "qwen_coder": "qwen2.5-coder-0.5b-instruct-q4_k_m",
    "gemma3": "gemma-3-270m-q4_k_m",
}


def golden(name: str) -> dict[str, Any]:
    """The reference values for a model of `REAL`, or another file of tests/data/golden."""
    path = Path(__file__).parent / "data" / "golden" / f"{REAL.get(name, name)}.json"
    data: dict[str, Any] = json.loads(path.read_text())
    return data
