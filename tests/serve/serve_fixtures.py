"""An app over a scripted engine, and a client that speaks to it without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine

from headrace.base.settings import EngineSettings
from headrace.engine.loading import TextSide, open_text
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.weights import open_checkpoint


@pytest.fixture(scope="session")
def words(tiny: Path) -> TextSide:
    return open_text(EngineSettings(), open_checkpoint(tiny))


@pytest.fixture
async def engine(words: TextSide) -> FakeEngine:
    return FakeEngine(words.tokenizer, words.template)


@pytest.fixture
async def app(engine: FakeEngine) -> App:
    return App(engine, AppSettings(names=("tiny", "other"), max_body_bytes=100_000))  # type: ignore[arg-type]


@pytest.fixture
async def client(app: App) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        yield client
