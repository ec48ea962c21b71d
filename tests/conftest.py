"""The models that tests use: real ones, fetched by `headrace pull` or named by HEADRACE_TEST_MODELS, and tiny ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.log import log
from real import REAL
from tiny_model import write_tiny

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or programs under test would not hear it either


def _find(name: str) -> Path:
    places = [os.environ.get("HEADRACE_TEST_MODELS"), Path.home() / ".cache" / "headrace" / "models"]
    if os.environ.get("HEADRACE_CACHE"):
        places.append(Path(os.environ["HEADRACE_CACHE"]) / "models")
    for place in filter(None, places):
        for path in sorted(Path(place).rglob("*.gguf")):
            if path.name.lower().startswith(name) or path.stem.lower() == name:
                return path
    if os.environ.get("HEADRACE_REQUIRE_MODELS"):
        pytest.fail(f"model {name} is not there, and HEADRACE_REQUIRE_MODELS is set")
    pytest.skip(f"model {name} is not downloaded: run `headrace pull`, or set HEADRACE_TEST_MODELS")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _find(REAL["smollm2"])


@pytest.fixture(scope="session")
def qwen_coder() -> Path:
    return _find(REAL["qwen_coder"])


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return _find(REAL["gemma3"])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of many formats: see `tiny_model`."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`quick` is what needs no real model and is neither slow nor a soak: `make check` runs it."""
    for item in items:
        if set(getattr(item, "fixturenames", ())) & set(REAL):
            item.add_marker(pytest.mark.real)
        if not any(item.get_closest_marker(name) for name in ("real", "slow", "soak")):
            item.add_marker(pytest.mark.quick)


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """What a test, or a command that it runs, does to the project's logger ends with it."""
    handlers, level, propagate = log.handlers.copy(), log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)
