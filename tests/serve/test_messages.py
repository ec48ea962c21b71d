"""/v1/messages: Anthropic's shapes, whole and streamed, from a scripted engine; its own types are the judge."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fake_engine import FakeEngine
from pydantic import TypeAdapter

from headrace.base.errors import CapacityError
from headrace.serve.app import App
from headrace.serve.net.front import Cors, front
from headrace.serve.net.keys import Key, KeyRing

pytest_plugins = ["serve_fixtures"]

URL = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
ANSWER = "the answer is here"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
GOOD: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": HI}


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={**GOOD, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Message.model_validate(answer)
    return answer


async def events(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each named twice."""
    response = await client.post(URL, json={**GOOD, **body, "stream": True})
    assert response.status_code == 200, response.text
    *frames, last = response.text.split("\n\n")
    assert last == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] not in ("ping", "error"):
            EVENT.validate_python(found[-1])
    return found


async def refused(client: httpx.AsyncClient, status: int = 400, url: str = URL, **body: Any) -> dict[str, Any]:
    """The error; after it a good request has its right answer."""
    response = await client.post(url, json={**GOOD, **body})
    assert response.status_code == status, response.text
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["request_id"] == response.headers["request-id"]
    assert (await post(client))["content"][0]["text"] == ANSWER
    error: dict[str, Any] = answer["error"]
    return error


async def test_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, model="other", system="be kind", seed=7, max_tokens=10**9)
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"], answer["seed"]) == ("message", "assistant", "tiny", 7)
    assert answer["content"] == [{"type": "text", "text": ANSWER, "citations": None}]
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] == 1
    assert usage["input_tokens"] + 1 == len(engine.seen[0].prompt)
    assert usage["cache_creation_input_tokens"] == 0


async def test_the_same_prompt_as_chat_has(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    said = [("system", "s\nt"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    chat = [{"role": role, "content": content} for role, content in said]
    await client.post("/v1/chat/completions", json={"messages": chat})
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "text", "text": "c", "citations": None}]},
        {"role": "user", "content": "d"},
    ]
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t", **cached}]
    await post(client, system=system, messages=messages)
    assert engine.seen[0].prompt == engine.seen[1].prompt
    count = await client.post(f"{URL}/count_tokens", json={"model": "tiny", "system": system, "messages": messages})
    assert count.json() == {"input_tokens": len(engine.seen[0].prompt)}


async def test_the_last_message_is_gone_on_with(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [*HI, {"role": "assistant", "content": "well"}]
    await client.post(
        "/v1/chat/completions",
        json={"messages": messages, "continue_final_message": True, "add_generation_prompt": False},
    )
    await post(client, messages=messages)
    await post(client, messages=[*HI, {"role": "assistant", "content": ""}])
    await post(client)
    first, second, empty, none = (add.prompt for add in engine.seen)
    assert first == second
    assert empty == none != first


@pytest.mark.parametrize(
    ("body", "reason", "by"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["nowhere", "is he"]}, "stop_sequence", "is he"),
    ],
)
async def test_a_stream_says_what_the_whole_answer_says(
    client: httpx.AsyncClient, body: dict[str, Any], reason: str, by: str | None
) -> None:
    whole = await post(client, seed=1, **body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, by)
    told = await events(client, seed=1, **body)
    kinds = [event["type"] for event in told]
    deltas = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    assert kinds == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * len(deltas),
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert told[2]["content_block"]["text"] == ""
    assert "".join(deltas) == whole["content"][0]["text"]
    started = told[0]["message"]
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert started["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert told[-2]["usage"] == whole["usage"]
    assert told[-2]["delta"] == {"stop_reason": reason, "stop_sequence": by}


async def test_an_empty_answer_has_a_block(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.says = []
    assert (await post(client))["content"] == [{"type": "text", "text": "", "citations": None}]
    assert [event["type"] for event in await events(client)][2:4] == ["content_block_start", "content_block_stop"]


async def test_null_is_absent(client: httpx.AsyncClient) -> None:
    names = ["system", "stop_sequences", "temperature", "top_p", "top_k", "stream", "metadata", "tools", "tool_choice",
             "thinking", "output_config", "service_tier", "cache_control", "unheard_of"]  # fmt: skip
    await post(client, **dict.fromkeys(names))
    await post(client, thinking={"type": "disabled"}, metadata={"user_id": "me"}, service_tier="auto", tools=[])


async def test_fields_reach_the_sampler(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, stop_sequences=["x"], max_tokens=5)
    params = engine.seen[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.5, 0.5, 3, 0.1, 5)
    assert params.stop == ["x"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": "5"}),
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "assistant", "content": ""}]}),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}),
        ("messages[0]", {"messages": ["hi"]}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content[1].type", {"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [USE]}]}),
        ("messages[0].content[0].content[0].type", {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]}),
        ("messages[1].content", {"messages": [*HI, {"role": "assistant", "content": [USE]}]}),
        ("system[0].type", {"system": [IMAGE]}),
        ("temperature", {"temperature": 1.5}),
        ("stop_sequences[0]", {"stop_sequences": [""]}),
        ("thinking.type", {"thinking": {"type": "maybe"}}),
        ("tool_choice.type", {"tool_choice": {"type": "maybe"}}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
        ("metadata.who", {"metadata": {"who": "me"}}),
        ("container", {"container": "c"}),
        ("mcp_servers", {"mcp_servers": []}),
        ("stop", {"stop": ["x"]}),
        ("n", {"n": 2}),
    ],
)  # fmt: skip
async def test_what_is_not_done_is_refused_by_path(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    error = await refused(client, **body)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{path} "), error["message"]


async def test_other_errors_have_their_types(
    client: httpx.AsyncClient, engine: FakeEngine, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await refused(client, 404, model="claude"))["type"] == "not_found_error"
    assert "maximum context length" in (await refused(client, system="x " * 500))["message"]
    assert (
        "maximum context length"
        in (await refused(client, url=f"{URL}/count_tokens", max_tokens=None, system="x " * 500))["message"]
    )
    large = await client.post(URL, json={**GOOD, "system": "x" * 100_000})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise CapacityError("too many", retry_after=3)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "submit", full)
        response = await client.post(URL, json=GOOD)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert response.headers["retry-after"] == "3"
    app.desk.closing = True
    response = await client.post(URL, json=GOOD)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


async def test_errors_have_the_shape_of_the_paths_api(client: httpx.AsyncClient) -> None:
    response = await client.get(f"{URL}/none", headers={"x-request-id": "mine"})
    assert response.status_code == 404
    error = response.json()
    assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "not_found_error", "mine")
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    response = await client.get("/v1/messagesnone")
    assert response.json()["error"]["code"] == "unknown_url"
    assert "request-id" not in response.headers


async def test_without_a_key(app: App) -> None:
    ring = KeyRing([Key.of("sesame")])
    transport = httpx.ASGITransport(front(app.routes, ring, Cors()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(URL, json=GOOD)
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        assert response.json()["request_id"] == response.headers["request-id"]
        assert (await client.post(URL, json=GOOD, headers={"x-api-key": "sesame"})).status_code == 200


@pytest.mark.parametrize("at", [0, 2])
async def test_a_stream_that_breaks_says_so(client: httpx.AsyncClient, engine: FakeEngine, at: int) -> None:
    def break_off(stream: Any, number: int) -> None:
        if number == at:
            stream.fail(RuntimeError("secret"))

    engine.trouble = break_off
    told = await events(client)
    assert [event["type"] for event in told].count("error") == 1
    assert (told[-1]["type"], told[-1]["error"]["type"]) == ("error", "api_error")
    assert "secret" not in json.dumps(told)
    engine.trouble = None
    assert (await post(client))["stop_reason"] == "end_turn"
