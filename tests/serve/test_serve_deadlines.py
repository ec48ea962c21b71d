"""How long a client is willing to wait: by field or header, told apart from an answer that is merely long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine

from child_server import Server, running, serving, until
from headrace.core.sequence import TIMEOUT
from headrace.engine.client import Stream
from headrace.engine.messages import Update

pytest_plugins = ["serve_fixtures"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def times_out(*numbers: tuple[int, int]) -> Any:
    """Trouble for a fake engine: (prompt, choice) are over before they have a word, as the engine says it."""

    def trouble(stream: Stream, number: int) -> None:
        prompt = int(stream.request_id.rpartition("-")[2]) if len(numbers) > 1 else 0
        for which, choice in numbers:
            if which == prompt and number == 0:
                stream.push(Update(stream.request_id, choice, [], reason="length", stop=TIMEOUT))

    return trouble


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_end_without_a_word_is_an_error(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    asked: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    engine.trouble = times_out((0, 0))
    response = await client.post(path, json=asked)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
    events = (await client.post(path, json={**asked, "stream": True})).text
    assert json.loads(events.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in events and '"finish_reason":"' not in events
    engine.trouble = None
    assert (await client.post(path, json=asked)).status_code == 200


async def test_what_other_choices_have_said_is_kept(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.trouble = times_out((0, 1))
    choices = (await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "seed": 1})).json()["choices"]
    assert choices[0]["text"] and choices[0]["finish_reason"] != "length"
    assert (choices[1]["text"], choices[1]["finish_reason"], choices[1]["stop_reason"]) == ("", "length", "timeout")


async def test_the_sooner_of_field_and_header_counts(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for field, header, least in ((5000, None, 5), (None, "7000", 7), (5000, "7000", 5), (9000, "7000", 7)):
        before = time.monotonic()
        body = {"prompt": "a"} | ({} if field is None else {"timeout_ms": field})
        headers = {} if header is None else {"x-request-timeout-ms": header}
        assert (await client.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
        assert before + least <= engine.seen[-1].terms.deadline <= time.monotonic() + least
    await client.post(COMPLETIONS, json={"prompt": "a"})
    assert engine.seen[-1].terms.deadline == 0


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "abc", "", "1e3", "999999999", "9" * 50, "٣"])
async def test_bad_headers_are_refused_by_name(client: httpx.AsyncClient, engine: FakeEngine, value: str) -> None:
    response = await client.post(
        COMPLETIONS, json={"prompt": "a"}, headers={b"x-request-timeout-ms": value.encode("utf-8")}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-timeout-ms"
    assert not engine.seen
    assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, 10**18, [1]])
async def test_bad_fields_are_refused_by_name(client: httpx.AsyncClient, value: Any) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "a", "timeout_ms": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout_ms")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    flags = ("--max-num-seqs", "1", "--max-model-len", "2k", "--no-enable-prefix-caching")
    with serving(tiny, "--served-model-name", "tiny", *flags) as server:
        yield server


@pytest.mark.slow
def test_the_openai_client_and_deadlines(server: Server) -> None:
    """Both ways of ending, and the refusal at once when the engine knows how long it takes."""
    client = server.openai.with_options(max_retries=3)
    asked: Any = {"model": "tiny", "prompt": [65] * 20, "temperature": 0}
    known = client.completions.create(**asked, max_tokens=5).choices[0].text
    endless = {**asked, "max_tokens": 2000, "extra_body": {"ignore_eos": True, "timeout_ms": 1000}}

    start = time.monotonic()
    cut = client.completions.create(**endless)
    assert time.monotonic() - start >= 0.9
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].model_dump()["stop_reason"] == "timeout"
    assert cut.usage is not None and 0 < cut.usage.completion_tokens < 2000
    assert cut.choices[0].text.startswith(known[:3])
    until(lambda: running(server) == 0)

    with client.completions.create(**endless, stream=True) as events:
        chunks = list(events)
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].model_dump()["stop_reason"]) == (
        "length",
        "timeout",
    )

    blocker = client.completions.create(**{**endless, "extra_body": {"ignore_eos": True}}, stream=True)
    next(iter(blocker))
    start = time.monotonic()
    with pytest.raises(openai.APIStatusError) as late:
        client.completions.create(**asked, extra_body={"timeout_ms": 300})
    assert late.value.status_code == 408 and late.value.code == "deadline_exceeded"  # type: ignore[attr-defined]
    assert time.monotonic() - start < 3, "not tried again"
    blocker.close()
    until(lambda: running(server) == 0)

    client.completions.create(**{**asked, "prompt": [65] * 1500}, max_tokens=1)
    queue: Any = [[65 + i] * 1900 for i in range(40)]
    blocker = client.completions.create(**{**asked, "prompt": queue}, max_tokens=1, stream=True)
    next(iter(blocker))
    start = time.monotonic()
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**{**asked, "prompt": [70] * 1900}, max_tokens=1, extra_body={"timeout_ms": 500})
    assert refused.value.code == "deadline_infeasible"
    assert refused.value.response.headers["x-should-retry"] == "false"
    blocker.close()
    assert client.completions.create(**asked, max_tokens=5).choices[0].text == known
