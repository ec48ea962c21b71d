"""What a request waited for and what it cost: the `timings` block and `usage.cost`, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from headrace.base.errors import SettingError
from headrace.base.settings import EngineSettings
from headrace.engine.client import EngineClient
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.serve.settings import ServeSettings

pytest_plugins = ["serve_fixtures"]

ASK = {"prompt": "the answer", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
PRICE = 7.2  # a day's coffee an hour: 0.002 a second


@pytest.fixture
async def priced(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = App(engine, AppSettings(names=("tiny",), price_per_hour=PRICE))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as made:
        yield made


@pytest.fixture
async def served(tiny: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A real engine."""
    made = await EngineClient.start(EngineSettings(model=str(tiny), max_model_len=512, max_num_batched_tokens=64))
    app = App(made, AppSettings(names=("tiny",), price_per_hour=PRICE))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        yield client
    await made.close()


async def post(client: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(client: httpx.AsyncClient, body: dict[str, Any], path: str) -> list[dict[str, Any]]:
    text = (await client.post(path, json=body | {"stream": True})).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_nothing_is_told_unasked(client: httpx.AsyncClient) -> None:
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        for extra in ({}, {"timings": False}, {"timings": None}):
            answer = await post(client, body | extra, path)
            assert "timings" not in answer and "cost" not in answer["usage"]
            assert all("timings" not in event for event in await events(client, body | extra, path))


@pytest.mark.parametrize("bad", ["yes", 1, [], {}])
async def test_timings_is_a_flag(client: httpx.AsyncClient, bad: Any) -> None:
    response = await client.post("/v1/completions", json=ASK | {"timings": bad})
    assert response.status_code == 400 and response.json()["error"]["param"] == "timings"
    assert "timings" in await post(client, ASK | {"timings": True})


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_timings_say_what_the_engine_noted(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    told = (answer := await post(client, body | {"timings": True}, path))["timings"]
    assert (told["queue_ms"], told["prefill_ms"], told["decode_ms"], told["total_ms"]) == (250, 500, 1000, 1750)
    assert told["prefill"] == [{"start": 1, "tokens": 2, "at_ms": 250, "ms": 400, "share": 0.5, "mates": 3}]
    assert told["batch_mates"] == {"mean": 1.5, "max": 3} and told["machine_ms"] == {"prompt": 200, "completion": 300}
    assert (told["preemptions"], told["recomputed_tokens"], told["cached_tokens"], told["decode_steps"]) == (1, 2, 1, 3)
    assert len(told["token_ms"]) == told["predicted_n"] == 3 and told["token_ms"] == sorted(told["token_ms"])
    assert told["prompt_n"] + told["cache_n"] == answer["usage"]["prompt_tokens"] and told["cache_n"] == 1
    assert told["prompt_ms"] == 500 and told["prompt_per_second"] == pytest.approx(2 * told["prompt_n"])
    assert told["predicted_ms"] == 1000 and told["predicted_per_second"] == 2  # two after the first
    assert "others" not in told


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_a_stream_tells_them_at_its_end(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    *others, last = await events(client, body | {"timings": True}, path)
    assert last["timings"]["total_ms"] == 1750 and last["choices"] == [] and "usage" not in last
    assert not any("timings" in event for event in others)
    options = {"stream_options": {"include_usage": True}}
    *others, last = await events(client, body | {"timings": True} | options, path)
    assert last["timings"]["predicted_n"] == last["usage"]["completion_tokens"] == 3
    assert not any("timings" in event or event["usage"] for event in others)


async def test_each_choice_has_its_own(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["the answer", "is"], "max_tokens": 2, "n": 2, "timings": True}
    told = (await post(client, body))["timings"]
    assert len(told["others"]) == 3 and all(len(block["token_ms"]) == 2 for block in [told, *told["others"]])


async def test_costs_are_machine_time_times_price(priced: httpx.AsyncClient) -> None:
    usage = (await post(priced, ASK | {"n": 2}))["usage"]
    assert usage["cost_details"] == {"prompt": pytest.approx(0.0008), "completion": pytest.approx(0.0012)}
    assert usage["cost"] == pytest.approx(0.002)
    last = (await events(priced, CHAT | {"stream_options": {"include_usage": True}}, "/v1/chat/completions"))[-1]
    assert last["usage"]["cost"] == pytest.approx(0.001)


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_is_a_number_from_0_on(price: float) -> None:
    with pytest.raises(SettingError) as raised:
        ServeSettings(price_per_hour=price)
    assert raised.value.param == "price_per_hour"


async def test_the_parts_add_up_to_what_the_client_waited(served: httpx.AsyncClient) -> None:
    """Requests side by side, one that a stop string ends: their parts within the clients' time, as their costs."""
    whole = (await post(served, {"prompt": "a b c", "max_tokens": 30, "temperature": 0}))["choices"][0]["text"]
    body = {"temperature": 0, "ignore_eos": True, "timings": True}

    async def timed(**more: Any) -> tuple[float, dict[str, Any]]:
        start = time.monotonic()
        answer = await post(served, body | more)
        return time.monotonic() - start, answer

    start = time.monotonic()
    answers = await asyncio.gather(
        *(timed(prompt="word " * (20 * i + 1), max_tokens=20) for i in range(5)),
        timed(prompt="a b c", max_tokens=400, stop=whole[4:7]),
    )
    waited = time.monotonic() - start
    for seconds, answer in answers:
        told, usage = answer["timings"], answer["usage"]
        assert told["queue_ms"] + told["prefill_ms"] + told["decode_ms"] == pytest.approx(told["total_ms"])
        assert 0 < told["total_ms"] <= 1e3 * seconds and told["queue_ms"] >= 0
        assert sum(chunk["ms"] for chunk in told["prefill"]) <= told["prefill_ms"] + 1e-3
        assert sum(chunk["tokens"] for chunk in told["prefill"]) == told["prompt_n"]
        assert len(told["token_ms"]) == usage["completion_tokens"]
        assert told["token_ms"][0] >= told["queue_ms"] + told["prefill_ms"] - 1
        machine = told["machine_ms"]["prompt"] + told["machine_ms"]["completion"]
        assert usage["cost"] == pytest.approx(PRICE / 3600 / 1e3 * machine) and 0 < machine < told["total_ms"]
    for _, answer in answers[:5]:
        told = answer["timings"]
        assert told["token_ms"][-1] >= told["total_ms"] - 1 and told["decode_steps"] == 19
    assert sum(answer["usage"]["cost"] for _, answer in answers) <= PRICE / 3600 * waited
