"""More than can be taken: refused with a time to come back at, which clients obey."""

from __future__ import annotations

import json
import socket
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


def post(port: int, **body: Any) -> socket.socket:
    """A request on a raw connection."""
    text = json.dumps({"max_tokens": 1900, "ignore_eos": True, "temperature": 0, **body}).encode()
    raw = socket.create_connection(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    raw.sendall(f"{head}{len(text)}\r\n\r\n".encode() + text)
    return raw


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_gives_back_place_and_pages(narrow: Server, stream: bool) -> None:
    """While it runs, while it waits, and by a half-closed socket."""
    asked: Any = {"model": "tiny", "prompt": "c", "max_tokens": 3, "temperature": 0}
    expected = narrow.openai.completions.create(**asked).choices[0].text
    for leave in (socket.socket.close, lambda raw: raw.shutdown(socket.SHUT_WR)):
        runs = post(narrow.port, prompt="a", stream=stream)
        until(lambda: running(narrow) == 1, 20)
        waits = post(narrow.port, prompt="b", stream=stream)
        until(lambda: queued(narrow) == 1, 20)
        leave(waits)
        until(lambda: queued(narrow) == 0, 20)
        assert running(narrow) == 1
        leave(runs)
        until(lambda: running(narrow) == 0 == narrow.metric("vllm:kv_cache_usage_perc"), 20)
        assert narrow.openai.completions.create(**asked).choices[0].text == expected
        runs.close()
        waits.close()


@pytest.mark.slow
def test_who_does_not_read_holds_no_pages(narrow: Server) -> None:
    with post(narrow.port, prompt="a", stream=True, logprobs=20):
        until(lambda: running(narrow) == 1, 20)
        until(lambda: running(narrow) == 0 == narrow.metric("vllm:kv_cache_usage_perc"), 60)
        assert narrow.openai.completions.create(model="tiny", prompt="c", max_tokens=3).choices
