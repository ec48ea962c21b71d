"""Tools and reasoning through /v1/responses and /v1/messages, and whatever else their bodies may hold."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from pydantic import TypeAdapter

from headrace.engine.loading import TextSide
from headrace.serve.api.messages import MESSAGES
from headrace.serve.api.responses import RESPONSES
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.text import ChatTemplate

pytest_plugins = ["serve_fixtures"]

RESP, MSG, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
# Shows all that a conversation can hold, in the format of Hermes.
TEMPLATE = """{%- if tools %}T{{ tools | tojson }}{% endif %}
{%- for m in messages %}[{{ m.role }}{{ ' ' + m.name if m.name else '' }}|{{ m.content }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{{- call.function.arguments | tojson }}</tool_call>{% endfor %}]{% endfor %}
{%- if add_generation_prompt %}[assistant|{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
SAYS = '<think>so it is</think>Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": [2, 3]}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

RESP_TOOLS: dict[str, Any] = {"tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "description": "d"}]}
MSG_TOOLS: dict[str, Any] = {"tools": [{"name": "add", "input_schema": SCHEMA, "description": "d"}]}
CHAT_TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA, "description": "d"}}]
}
ASKS: dict[str, dict[str, Any]] = {
    RESP: {"input": "hi"},
    MSG: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500},
    COUNT: {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture
async def engine(words: TextSide) -> FakeEngine:
    engine = FakeEngine(words.tokenizer, ChatTemplate(TEMPLATE, words.tokenizer), max_model_len=2000)
    engine.says = words.tokenizer.encode(SAYS, add_special_tokens=False)
    return engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = App(engine, AppSettings(names=("tiny",)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json={**ASKS[path], **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(path, json={**ASKS[path], **body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {"output": items, "usage": response["usage"], "status": response["status"]}


async def test_a_response_of_items(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    whole = await post(client, RESP, **RESP_TOOLS)
    Response.model_validate(whole)
    thought, said, call = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "so it is"}]
    assert said["content"][0]["text"] == "Well."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", ARGUMENTS)
    assert (thought["id"][:3], said["id"][:4], call["id"][:3], call["call_id"][:5]) == ("rs_", "msg_", "fc_", "call_")
    assert whole["status"] == "completed"
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
    assert (whole["tools"], whole["tool_choice"]) == (RESP_TOOLS["tools"], "auto")


async def test_a_response_streamed_item_by_item(client: httpx.AsyncClient) -> None:
    whole = await post(client, RESP, **RESP_TOOLS)
    told = await events(client, RESP, **RESP_TOOLS)
    assert without_ids(told[-1]["response"]) == without_ids(whole)
    wanted = {"reasoning_text": "so it is", "output_text": "Well.", "function_call_arguments": ARGUMENTS}
    for index, (kind, text) in enumerate(wanted.items()):
        deltas = [e for e in told if e["type"] == f"response.{kind}.delta"]
        (done,) = (e for e in told if e["type"] == f"response.{kind}.done")
        assert "".join(e["delta"] for e in deltas) == text == done.get("text", done.get("arguments"))
        assert {(e["output_index"], e["item_id"]) for e in [*deltas, done]} == {
            (index, told[-1]["response"]["output"][index]["id"])
        }
    added = [e for e in told if e["type"] == "response.output_item.added"]
    done = [e for e in told if e["type"] == "response.output_item.done"]
    assert [e["output_index"] for e in added] == [e["output_index"] for e in done] == [0, 1, 2]
    assert added[2]["item"] == {**done[2]["item"], "arguments": "", "status": "in_progress"}
    assert [e["item"] for e in done] == told[-1]["response"]["output"]


async def test_a_message_of_blocks(client: httpx.AsyncClient) -> None:
    whole = await post(client, MSG, **MSG_TOOLS)
    Message.model_validate(whole)
    thought, said, use = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "so it is")
    assert said["text"] == "Well."
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", json.loads(ARGUMENTS))
    assert whole["stop_reason"] == "tool_use"
    assert 0 < whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]


@pytest.mark.parametrize("limit", [500, 95, 80, 30, 10])
async def test_a_message_streamed_block_by_block(client: httpx.AsyncClient, limit: int) -> None:
    """Put together as Anthropic's client does, however much of it there is."""
    whole = await post(client, MSG, max_tokens=limit, **MSG_TOOLS)
    message, buffers = None, {}
    for event in await events(client, MSG, max_tokens=limit, **MSG_TOOLS):
        if event["type"] != "ping":
            message = accumulate_event(event=EVENT.validate_python(event), current_snapshot=message, json_bufs=buffers)
    assert message is not None
    blocks = [block.model_dump() for block in message.content]
    for block, streamed in zip(whole["content"], blocks, strict=True):
        assert {name: streamed[name] for name in block if name != "id"} == {k: v for k, v in block.items() if k != "id"}
    assert whole["stop_reason"] == message.stop_reason
    assert whole["usage"]["output_tokens"] == message.usage.output_tokens


async def test_the_history_is_the_one_that_chat_has(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "reasoning": "so it is", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "6"},
        {"role": "user", "content": "and?"},
    ]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so it is"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": "6"},
        {"role": "user", "content": "and?"},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so it is", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "c1", "name": "add", "input": json.loads(ARGUMENTS)}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "6"}], "is_error": False},
            {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    response = await client.post("/v1/chat/completions", json={"messages": chat, **CHAT_TOOLS})
    assert response.status_code == 200, response.text
    await post(client, RESP, input=items, **RESP_TOOLS)
    await post(client, MSG, messages=messages, **MSG_TOOLS)
    first, second, third = (add.prompt for add in engine.seen)
    assert first == second == third
    count = await post(client, COUNT, messages=messages, **MSG_TOOLS)
    assert count["input_tokens"] == len(first)
    text = engine.tokenizer.decode(first)
    assert "[tool add|6]" in text
    assert "<think>so it is</think><tool_call>add" in text


async def test_what_was_answered_can_be_sent_back(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, RESP, **RESP_TOOLS)
    call = answer["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "6"}
    await post(client, RESP, input=[{"role": "user", "content": "hi"}, *answer["output"], result], **RESP_TOOLS)
    said = await post(client, MSG, **MSG_TOOLS)
    result = {"type": "tool_result", "tool_use_id": said["content"][-1]["id"], "content": "6"}
    turns = [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [result]}]
    await post(client, MSG, messages=[*ASKS[MSG]["messages"], *turns], **MSG_TOOLS)
    assert engine.seen[1].prompt == engine.seen[3].prompt


async def test_without_tools_to_call_nothing_is_a_call(client: httpx.AsyncClient) -> None:
    whole = await post(client, MSG, **MSG_TOOLS, tool_choice={"type": "none"})
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert whole["stop_reason"] == "end_turn"
    whole = await post(client, RESP, **RESP_TOOLS, tool_choice="none")
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]


async def test_thinking_is_a_variable_of_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    thinks = [None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}]
    for thinking in thinks:
        await post(client, MSG, thinking=thinking)
    await post(client, RESP, reasoning={"effort": "none"})
    default, off, on, adaptive, none = (add.prompt for add in engine.seen)
    assert default == on == adaptive != off == none


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        (RESP, "tools[1].name", {"tools": [*RESP_TOOLS["tools"], *RESP_TOOLS["tools"]]}),
        (RESP, "tools[0].name", {"tools": [{"type": "function", "name": "a b"}]}),
        (RESP, "tools[0].parameters.type", {"tools": [{"type": "function", "name": "a", "parameters": {"type": "x"}}]}),
        (RESP, "tool_choice.name", {**RESP_TOOLS, "tool_choice": {"type": "function", "name": "none"}}),
        (RESP, "tool_choice", {"tool_choice": "required"}),
        (RESP, "reasoning.effort", {"reasoning": {"effort": "high"}}),
        (MSG, "tools[1].name", {"tools": [*MSG_TOOLS["tools"], *MSG_TOOLS["tools"]]}),
        (MSG, "tools[0].input_schema.type", {"tools": [{"name": "a", "input_schema": {"type": "x"}}]}),
        (MSG, "tool_choice.name", {**MSG_TOOLS, "tool_choice": {"type": "tool", "name": "none"}}),
        (MSG, "output_config.effort", {"output_config": {"effort": "high"}}),
    ],
)
async def test_what_chat_refuses_has_its_own_path(
    client: httpx.AsyncClient, path: str, param: str, body: dict[str, Any]
) -> None:
    response = await client.post(path, json={**ASKS[path], **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(param), error
    assert "function" not in error["message"]
    assert error.get("param", param) == param
    assert (await client.post(path, json=ASKS[path])).status_code == 200


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | st.text(max_size=6) | st.sampled_from(
        ["text", "user", "assistant", "function", "message", "tool_use", "tool_result", "input_text", "thinking"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "role", "content", "text", "name", "input", "id", "tool_use_id", "call_id", "output",
                         "arguments", "format", "schema", "summary", "thinking", "effort"]) | st.text(max_size=4),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_no_body_is_an_internal_error(client: httpx.AsyncClient, engine: FakeEngine, data: st.DataObject) -> None:
    path, table = data.draw(st.sampled_from([(RESP, RESPONSES), (MSG, MESSAGES), (COUNT, MESSAGES)]))
    odd = data.draw(st.dictionaries(st.sampled_from(sorted(table)) | st.text(max_size=5), VALUES, max_size=3))
    body = {**ASKS[path], **odd} if data.draw(st.booleans()) else odd
    sent = json.dumps(body)
    response = await client.post(path, content=sent, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        answer = response.json()
        assert answer["error"]["message"]
        assert (answer.get("type") == "error") == (path != RESP)
    engine.seen.clear()


@pytest.mark.parametrize("path", [RESP, MSG])
async def test_time_and_cost_are_told_to_who_asks(engine: FakeEngine, path: str) -> None:
    app = App(engine, AppSettings(names=("tiny",), price_per_hour=3600.0))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        whole = await post(client, path, timings=True)
        told = await events(client, path, timings=True)
        assert "timings" not in await post(client, path)
    (last,) = (event for event in told if event["type"] in ("response.completed", "message_delta"))
    for answer in (whole, last.get("response", last)):
        assert answer["usage"]["cost"] == engine.account.prompt_machine + engine.account.completion_machine
        assert answer["timings"]["queue_ms"] == 1e3 * engine.account.queue


async def test_a_call_that_a_stop_string_cuts_is_not_complete(client: httpx.AsyncClient) -> None:
    whole = await post(client, RESP, **RESP_TOOLS, stop=["[2"])
    assert whole["output"][-1]["arguments"] == '{"a": 1, "b": '
    assert whole["output"][-1]["status"] == "incomplete"
    assert [item["status"] for item in whole["output"][:-1]] == ["completed"] * 2
    told = await post(client, MSG, **MSG_TOOLS, stop_sequences=["[2"])
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "[2")
