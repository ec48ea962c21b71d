"""More than can be taken: refused with a time to come back at, which clients obey."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine

from child_server import Reader, Server, running, serving, until
from headrace.engine.queue import Queue
from headrace.serve.app import App

pytest_plugins = ["serve_fixtures"]

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_whatever_is_asked(
    client: httpx.AsyncClient, engine: FakeEngine, app: App, stream: bool
) -> None:
    engine.queue = queue = Queue(places=1, most=2, most_tokens=1000)
    with queue.room(3, 3):
        response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        chat = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "stream": stream}
        )
    assert response.status_code == chat.status_code == 429
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert "max_num_queued_reqs" in error["message"]
    assert 1 <= int(response.headers["retry-after"]) <= 120
    assert int(response.headers["retry-after"]) * 1000 >= int(response.headers["retry-after-ms"]) >= 1000
    assert not engine.seen
    assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
    assert queue.live == queue.waiting == queue.tokens == 0
    lines = app.metrics.text().decode().splitlines()
    refused = next(line for line in lines if "admission_rejections_total{" in line and "num_queued_reqs" in line)
    assert refused.startswith("vllm:admission_rejections_total{") and refused.endswith(" 2.0")


async def test_prompts_that_would_fit_only_in_part_are_refused_whole(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.queue = queue = Queue(places=2, most=2, most_tokens=1000)
    with queue.room(2, 2):
        response = await client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
        assert response.status_code == 429 and not engine.seen
        assert (await client.post(COMPLETIONS, json={"prompt": ["a"], "n": 3, "seed": 1})).status_code == 429
        assert (await client.post(COMPLETIONS, json={"prompt": ["a", "b"]})).status_code == 200
    queue.most_tokens = 10
    with queue.room(1, 1):
        assert (await client.post(COMPLETIONS, json={"prompt": [[5] * 4, [6] * 6]})).status_code == 429
        assert (await client.post(COMPLETIONS, json={"prompt": [[5] * 4, [6] * 5]})).status_code == 200
    assert (await client.post(COMPLETIONS, json={"prompt": [[5] * 40, [6] * 40]})).status_code == 200, "nothing waits"
    assert queue.live == queue.waiting == queue.tokens == 0


@pytest.fixture(scope="module")
def narrow(tiny: Path) -> Iterator[Server]:
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--max-model-len", "2k")
    with serving(tiny, "--served-model-name", "tiny", *flags) as server:
        yield server


@pytest.mark.slow
def test_the_openai_client_is_told_to_come_back(narrow: Server) -> None:
    readers = [Reader(narrow, max_tokens=1900, prompt=p) for p in "ab"]
    until(lambda: queued(narrow) == 1 and running(narrow) == 1)
    asked: Any = {"model": "tiny", "prompt": "c", "max_tokens": 3, "temperature": 0}
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as refused:
            narrow.openai.completions.create(**asked, stream=stream)
        assert refused.value.code == "queue_full"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 120
    patient = narrow.openai.with_options(max_retries=20).completions.create(**asked)
    assert patient.usage is not None and patient.usage.completion_tokens == 3
    for reader in readers:
        reader.join(60)
        assert reader.frames[-1] == "data: [DONE]"
    assert narrow.openai.completions.create(**asked).choices[0].text == patient.choices[0].text
    until(lambda: queued(narrow) == running(narrow) == 0)


def queued(server: Server) -> float:
    text = httpx.get(server.url + "/metrics").text
    name = "vllm:num_requests_waiting_by_reason{"
    return float(next(x for x in text.splitlines() if x.startswith(name) and 'reason="capacity"' in x).split()[-1])
