"""Models as they are served, for other people's clients: `make test` installs those (requirements.txt)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from child_server import Server, serving

# Clients that would ask the network for price lists, or send traces, are told not to by their own settings.
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing them takes seconds, and none of their tests is quick."""
    if config.getoption("markexpr") == "quick":
        return True
    if importlib.util.find_spec("litellm") is None and not os.environ.get("HEADRACE_REQUIRE_MODELS"):
        return True  # not `make test`
    return None


@pytest.fixture(scope="session")
def served(smollm2: Path) -> Iterator[Server]:
    """SmolLM2 under the name ``smollm2``, with a context of 2,048 tokens."""
    with serving(smollm2, "--served-model-name", "smollm2", "--max-model-len", "2048", "--backend", "cpu") as server:
        yield server


@pytest.fixture(scope="session")
def served_qwen(qwen_coder: Path) -> Iterator[Server]:
    """Qwen2.5-Coder, which can call tools, under the name ``qwen``."""
    with serving(qwen_coder, "--served-model-name", "qwen", "--max-model-len", "4096", "--backend", "cpu") as server:
        yield server


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a proxy that is not there, only the served model can be reached."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
