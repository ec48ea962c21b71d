from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """Writes bytes to a file of tmp_path and returns its path."""

    def store(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return store
