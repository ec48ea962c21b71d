"""openai-python's own retries carry a caller over a full queue and over an engine that died."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from child_server import Server, serving

pytestmark = pytest.mark.slow
FLAGS = ("--served-model-name", "tiny", "--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--backend", "cpu")


@pytest.fixture
def server(tiny: Path) -> Iterator[Server]:
    with serving(tiny, *FLAGS) as server:
        yield server


async def ask(server: Server, retries: int, number: int = 0) -> str:
    told: Any = {"prompt": f"number {number}", "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=retries) as client:
        return (await client.completions.create(model="tiny", **told)).choices[0].text


async def test_a_full_queue(server: Server) -> None:
    alone = [await ask(server, 0, number) for number in range(6)]
    impatient = await asyncio.gather(*(ask(server, 0, number) for number in range(6)), return_exceptions=True)
    refused = [error for error in impatient if isinstance(error, openai.RateLimitError)]
    assert refused
    assert all(error.code == "queue_full" and float(error.response.headers["retry-after"]) > 0 for error in refused)
    assert [text for text in impatient if isinstance(text, str)]
    assert await asyncio.gather(*(ask(server, 20, number) for number in range(6))) == alone


async def test_an_engine_that_died(server: Server) -> None:
    before = await ask(server, 0)
    os.kill(server.children()[0], signal.SIGKILL)
    with pytest.raises(openai.InternalServerError) as away:
        while True:
            await ask(server, 0)
    assert away.value.status_code == 503
    assert await ask(server, 20) == before
