"""Guessed tokens through HTTP: the same answers, what is told of them, and the request's own word about it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from headrace.base.settings import EngineSettings
from headrace.engine.client import EngineClient
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App

pytest_plugins = ["serve_fixtures"]

# Answers that go round: greedy, without an end, from a model of random weights.
ASK = {"prompt": [70, 71, 72] * 20, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "seed": 3}
SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["suffix", "draft_model"])
async def guessing(tiny: Path, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A real engine with and without guesses gives the same; this one has them."""
    config = {"method": request.param} | ({"model": str(tiny)} if request.param == "draft_model" else {})
    settings = EngineSettings(model=str(tiny), max_model_len=512, speculative_config=config)
    made = await EngineClient.start(settings)
    app = App(made, AppSettings(names=("tiny",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        yield client
    await made.close()


async def post(client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    response = await client.post(path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_guesses_change_nothing(guessing: httpx.AsyncClient) -> None:
    """Whether any are made depends on what steps take here."""
    for sampled in ({}, {"temperature": 0.4, "repetition_penalty": 0.5, "logprobs": 2}):
        body = ASK | sampled
        plain = await post(guessing, body | {"num_speculative_tokens": 0})
        assert "completion_tokens_details" not in plain["usage"]
        for limit in (None, 1, 16):
            assert (await post(guessing, body | {"num_speculative_tokens": limit}))["choices"] == plain["choices"]
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total" in (await guessing.get("/metrics")).text
    steps = (await guessing.get("/trace?last=1000")).json()["steps"]
    assert all(0 <= step["accepted_tokens"] <= step["drafted_tokens"] < step["decode_tokens"] + 1 for step in steps)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_was_guessed_is_told(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    body: dict[str, Any] = {"n": 2, "max_tokens": 3, "timings": True}
    body |= {"prompt": "a"} if path.endswith("/completions") and "chat" not in path else {"messages": SAID}
    plain = await post(client, body, path)
    assert "accepted_prediction_tokens" not in str(plain) and "draft_n" not in plain["timings"]
    engine.guessed = 5, 3
    answer = await post(client, body | {"num_speculative_tokens": 4}, path)
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (6, 4)
    assert answer["usage"]["completion_tokens"] == 6 == plain["usage"]["completion_tokens"]
    each = [answer["timings"], *answer["timings"]["others"]]
    assert [(one["draft_n"], one["draft_n_accepted"]) for one in each] == [(5, 3)] * 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_how_many_may_be_guessed_is_checked(client: httpx.AsyncClient, path: str) -> None:
    body = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": SAID},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": SAID, "max_tokens": 5, "model": "tiny"},
    }[path]
    for bad in (-1, 17, True, 1.5, "2", [1]):
        response = await client.post(path, json=body | {"num_speculative_tokens": bad})
        assert response.status_code == 400 and "num_speculative_tokens" in response.text, bad
    for good in (0, 16, None):
        await post(client, body | {"num_speculative_tokens": good}, path)
