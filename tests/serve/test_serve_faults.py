"""Requests that have broken engines, sent to a real one: each is answered or refused as it should be, and whoever asks
beside it or after it gets the answer that is known.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headrace.base.settings import EngineSettings
from headrace.engine.client import EngineClient
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
LENGTH = 96  # the context
KNOWN = {"prompt": "The quick brown fox", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tiny: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = EngineSettings(model=str(tiny), max_model_len=LENGTH, max_num_seqs=8, kv_cache_memory_bytes=1 << 20)
    engine = await EngineClient.start(settings)
    app = App(engine, AppSettings(names=("tiny",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test", timeout=60) as client:
        yield client
    await engine.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def known(client: httpx.AsyncClient) -> str:
    text: str = (await client.post(TEXT, json=KNOWN)).json()["choices"][0]["text"]
    assert text
    return text


async def beside(client: httpx.AsyncClient, known: str, path: str, body: Any) -> httpx.Response:
    """The response to `body`, which ran beside a request whose answer is known."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    response, good = await asyncio.gather(
        client.post(path, content=content, headers=kind), client.post(TEXT, json=KNOWN)
    )
    assert good.json()["choices"][0]["text"] == known, body
    return response


async def answer(client: httpx.AsyncClient, known: str, path: str, **fields: Any) -> Any:
    base: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "a b"}
    response = await beside(client, known, path, {"temperature": 0, "max_tokens": 4, **base, **fields})
    assert response.status_code == 200, response.text
    return response.json()


REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(("temperature", {"temperature": t}) for t in ("NaN", 2.0001, 1e308, -1e-9)),
    *(("repetition_penalty", {"repetition_penalty": p}) for p in (0, -1, 1e-45, 1e308)),
    *(("presence_penalty", {"presence_penalty": p}) for p in (-3, 3)),
    *(("min_p", {"min_p": p}) for p in (-0.1, 1.5)),
    *(("top_p", {"top_p": p}) for p in (0, -1, 1.0000001)),
    ("top_k", {"top_k": -2}),
    ("stop_token_ids", {"stop_token_ids": [10_000_000], "min_tokens": 5, "max_tokens": 10}),
    *(("stop_token_ids", {"stop_token_ids": ids}) for ids in ([-1], [2**63], ["5"], [True])),
    *(("logit_bias", {"logit_bias": b}) for b in (
        {"10000000": -100}, {"-1": 5}, {"abc": 1}, {"5": "x"}, {"5": None}, {"5": 1000}, {"320": 1})),
    *(("max_tokens", {"max_tokens": n}) for n in (-1, 2.5, "5", True)),
    *(("n", {"n": n}) for n in (0, -1, 10**6, 10**18)),
    ("best_of", {"best_of": 10**6}),
    ("stop", {"stop": ["a"] * 20_000}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(10**5)}}),
]  # fmt: skip


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=lambda value: str(value)[:40])
async def test_what_cannot_be_is_refused_by_name(
    client: httpx.AsyncClient, known: str, param: str, fields: dict[str, Any]
) -> None:
    for path, base in ((TEXT, {"prompt": "a b"}), (CHAT, {"messages": HI})):
        response = await beside(client, known, path, {**base, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].split("[")[0].split(".")[0] == param


async def test_literals_that_are_not_json_are_refused(client: httpx.AsyncClient, known: str) -> None:
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        body = f'{{"prompt": "a", "temperature": {text}}}'.encode()
        assert (await beside(client, known, TEXT, body)).status_code == 400


async def test_temperatures_near_nothing_are_greedy(client: httpx.AsyncClient, known: str) -> None:
    for temperature in (0, -0.0, 1e-6, 1e-30, 5e-324):
        told = await answer(client, known, TEXT, **{**KNOWN, "temperature": temperature, "seed": 3})
        assert told["choices"][0]["text"] == known, temperature
    for temperature in (1e-3, 1e-4, 1e-5):
        assert (await answer(client, known, TEXT, temperature=temperature))["choices"][0]["text"]


async def test_narrow_filters_take_the_likeliest_token(client: httpx.AsyncClient, known: str) -> None:
    for fields in ({"top_p": 1e-30}, {"min_p": 1}, {"top_k": 1}, {"top_p": 5e-324, "top_k": 1, "min_p": 1}):
        told = await answer(client, known, TEXT, **{**KNOWN, "temperature": 1, **fields})
        assert told["choices"][0]["text"] == known, fields


async def test_log_probabilities_are_numbers_and_complete(client: httpx.AsyncClient, known: str) -> None:
    told = await answer(client, known, TEXT, echo=True, logprobs=1, top_k=1, temperature=1)
    assert all(value is None or value <= 0 for value in told["choices"][0]["logprobs"]["token_logprobs"])
    told = await answer(client, known, CHAT, logprobs=True, top_logprobs=20, allowed_token_ids=[65])
    for token in told["choices"][0]["logprobs"]["content"]:
        assert len(token["top_logprobs"]) == 20 and token["logprob"] <= 0
    told = await answer(client, known, TEXT, logprobs=5, logit_bias={"65": -100})
    assert len(told["choices"][0]["logprobs"]["tokens"]) == 4


async def test_scoring_tells_each_token_of_a_prompt(client: httpx.AsyncClient, known: str) -> None:
    prompts: list[Any] = [[5], [5, 6, 7], list(range(20, 20 + LENGTH))]
    for _ in range(2):  # cold, then with the prefix known
        told = await answer(client, known, TEXT, prompt=prompts, echo=True, logprobs=1, max_tokens=0)
        for prompt, choice in zip(prompts, told["choices"], strict=True):
            shown = choice["logprobs"]["token_logprobs"]
            assert len(shown) == len(prompt) and shown[0] is None and None not in shown[1:]
            assert choice["finish_reason"] == "length"
        assert told["usage"]["completion_tokens"] == 0


async def test_the_length_of_a_prompt_at_the_edge(client: httpx.AsyncClient, known: str) -> None:
    ids = [5] * (LENGTH + 1)
    for length, most, status in (
        (LENGTH - 1, 1, 200), (LENGTH - 1, 5, 200), (LENGTH - 1, None, 200), (LENGTH, 0, 200), (LENGTH, 1, 400),
        (LENGTH, None, 400), (LENGTH + 1, 0, 400), (LENGTH + 1, 1, 400),
    ):  # fmt: skip
        body = {"prompt": ids[:length], "max_tokens": most, "ignore_eos": True, "temperature": 0, "echo": most == 0}
        response = await beside(client, known, TEXT, body)
        assert response.status_code == status, (length, most, response.text)
        if status == 200:
            assert response.json()["usage"]["completion_tokens"] == (0 if most == 0 else 1)
            assert response.json()["choices"][0]["finish_reason"] == "length"
        else:
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert str(LENGTH) in response.json()["error"]["message"]


async def test_how_long_an_answer_may_be(client: httpx.AsyncClient, known: str) -> None:
    usage = {}
    for name, fields in {
        "null": {"max_tokens": None}, "absent": {}, "huge": {"max_tokens": 10**18}, "tenfold": {"max_tokens": 960},
        "both": {"max_tokens": 9, "max_completion_tokens": 3},
    }.items():  # fmt: skip
        body = {"messages": HI, "temperature": 0, "ignore_eos": True, **fields}
        response = await beside(client, known, CHAT, body)
        usage[name] = response.json()["usage"] | {"prompt_tokens_details": None}  # what is cached grows
    assert usage["null"] == usage["absent"] == usage["huge"] == usage["tenfold"]
    assert usage["null"]["total_tokens"] == LENGTH and usage["both"]["completion_tokens"] == 3
    for fields, count in (({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 5}, 5)):
        body = {"prompt": "a", "ignore_eos": True, **fields}
        assert (await beside(client, known, TEXT, body)).json()["usage"]["completion_tokens"] == count


async def test_greedy_choices_are_the_same(client: httpx.AsyncClient, known: str) -> None:
    told = await answer(client, known, TEXT, **{**KNOWN, "n": 3})
    assert [choice["text"] for choice in told["choices"]] == [known] * 3


async def test_an_answer_that_goes_round_is_ended(client: httpx.AsyncClient, known: str) -> None:
    asks: dict[str, Any] = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "logit_bias": {"65": 100}}
    detects = {"max_pattern_size": 3, "min_count": 4}
    for fields, tokens in (({}, 4), ({"min_tokens": 9}, 10)):
        told = await answer(client, known, TEXT, **asks, **fields, repetition_detection=detects)
        choice = told["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
        assert told["usage"]["completion_tokens"] == tokens
    longer = {**detects, "min_pattern_size": 2}
    told = await answer(client, known, TEXT, **asks, repetition_detection=longer)
    assert told["usage"]["completion_tokens"] == 8
    told = await answer(client, known, TEXT, **asks)
    assert told["choices"][0]["finish_reason"] == "length"


HISTORIES: list[tuple[Any, int]] = [
    ([*HI, {"role": "assistant", "content": ""}, *HI], 200),
    ([*HI, {"role": "assistant", "content": None}, *HI], 200),
    ([*HI, {"role": "assistant", "content": "x", "tool_calls": []}, *HI], 200),
    ([*HI, {"role": "assistant"}, *HI], 200),
    ([{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}], 200),
    ([{"role": "user", "content": "\x00"}], 200),
    ([], 400),
    ([{"role": "user"}], 400),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], 400),
    ([{"role": "user", "content": [None]}], 400),
]


@pytest.mark.parametrize(("messages", "status"), HISTORIES, ids=lambda value: str(value)[:50])
async def test_histories(client: httpx.AsyncClient, known: str, messages: Any, status: int) -> None:
    response = await beside(client, known, CHAT, {"messages": messages, "max_tokens": 2})
    assert response.status_code == status, response.text
    assert status == 200 or response.json()["error"]["param"].startswith("messages")
