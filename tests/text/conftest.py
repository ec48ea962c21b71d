"""The three real vocabularies, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.text import Tokenizer
from headrace.weights.gguf import read_gguf

FIXTURES = ("smollm2", "qwen_coder", "gemma3")


@pytest.fixture(scope="session")
def metadata(smollm2: Path, qwen_coder: Path, gemma3: Path) -> dict[str, dict[str, Any]]:
    return {
        name: dict(read_gguf(path).config) for name, path in zip(FIXTURES, (smollm2, qwen_coder, gemma3), strict=True)
    }


@pytest.fixture(scope="session")
def real(metadata: dict[str, dict[str, Any]]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_gguf(values) for name, values in metadata.items()}


@pytest.fixture(params=FIXTURES)
def tokenizer(request: pytest.FixtureRequest, real: dict[str, Tokenizer]) -> Tokenizer:
    return real[request.param]
