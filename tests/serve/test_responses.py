"""/v1/responses: OpenAI's shapes, whole and streamed, from a scripted engine; its own types are the judge."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from headrace.core.sampling import SamplingParams
from headrace.serve.api.answers import Turn
from headrace.serve.api.news import News
from headrace.serve.api.responses import ResponseReply, parse_response
from headrace.serve.app import App
from headrace.serve.errors import Problem

pytest_plugins = ["serve_fixtures"]

URL = "/v1/responses"
ANSWER = "the answer is here"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Response.model_validate(answer)
    return answer


async def events(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each numbered and named twice."""
    response = await client.post(URL, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *frames, last = response.text.split("\n\n")
    assert last == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        EVENT.validate_python(found[-1])
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def refused(client: httpx.AsyncClient, param: str, **body: Any) -> dict[str, Any]:
    """The error; after it a good request has its right answer."""
    response = await client.post(URL, json={"input": "hi", **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["param"] == param, error
    assert (await post(client, input="hi"))["output"][0]["content"][0]["text"] == ANSWER
    return error


async def test_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, model="other", input="hi", instructions="be kind", metadata={"a": "b"}, seed=7)
    assert answer["id"].startswith("resp_")
    assert (answer["model"], answer["status"], answer["seed"]) == ("tiny", "completed", 7)
    assert (answer["instructions"], answer["metadata"]) == ("be kind", {"a": "b"})
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert item["content"] == [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]
    usage = answer["usage"]
    assert usage["input_tokens"] == len(engine.seen[0].prompt)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 1
    assert Response.model_validate(answer).output_text == ANSWER


async def test_the_same_prompt_as_chat_has(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    said = [("system", "s"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    chat = [{"role": role, "content": content} for role, content in said]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
        {"type": "message", "role": "user", "content": "d"},
    ]  # fmt: skip
    await client.post("/v1/chat/completions", json={"messages": chat})
    await post(client, instructions="s", input=items)
    assert engine.seen[0].prompt == engine.seen[1].prompt


@pytest.mark.parametrize("limit", [3, None])
async def test_a_stream_says_what_the_whole_answer_says(client: httpx.AsyncClient, limit: int | None) -> None:
    asks = {"input": "hi", "seed": 1, "max_output_tokens": limit, "top_logprobs": 2,
            "include": ["message.output_text.logprobs"]}  # fmt: skip
    whole = await post(client, **asks)
    told = await events(client, **asks)
    last = told[-1]["response"]
    assert told[-1]["type"] == f"response.{whole['status']}"
    assert whole["status"] == ("completed" if limit is None else "incomplete")
    for drawn in ("id", "created_at", "completed_at"):
        whole.pop(drawn), last.pop(drawn)
    (item,), (other,) = whole["output"], last["output"]
    item.pop("id"), other.pop("id")
    assert whole == last
    assert item["status"] == whole["status"]
    text = item["content"][0]
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == text["text"]
    assert [token for event in deltas for token in event["logprobs"]] == text["logprobs"]
    assert len(text["logprobs"]) == whole["usage"]["output_tokens"]
    assert all(len(token["top_logprobs"]) == 2 for token in text["logprobs"])


async def test_tokens_of_a_stop_string_keep_their_logprobs(client: httpx.AsyncClient) -> None:
    asks = {"input": "hi", "stop": "is he", "include": ["message.output_text.logprobs"]}
    whole, told = await post(client, **asks), await events(client, **asks)
    text = whole["output"][0]["content"][0]
    assert text["text"] == "the answer "
    assert len(text["logprobs"]) == whole["usage"]["output_tokens"]
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert [token for event in deltas for token in event["logprobs"]] == text["logprobs"]


async def test_a_stream_that_breaks_before_it_begins(engine: FakeEngine, app: App) -> None:
    stream = engine.submit([1], SamplingParams(), request_id="r")
    given = parse_response({"input": "hi"}, app.limits)
    reply = ResponseReply("resp_1", "tiny", given, News([stream], app.metrics), Turn(), engine.tokenizer)
    told = reply.failed(Problem(503, "overloaded_error", "going")).decode()
    assert [line[7:] for line in told.splitlines() if line.startswith("event: ")] == [
        "response.created", "response.in_progress", "response.failed", "error",
    ]  # fmt: skip
    await stream.aclose()


async def test_events_come_in_order(client: httpx.AsyncClient) -> None:
    told = await events(client, input="hi")
    kinds = [event["type"].removeprefix("response.") for event in told]
    kinds = [kind for i, kind in enumerate(kinds) if kinds[i - 1 : i] != [kind]]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert (told[2]["item"]["content"], told[3]["part"]["text"]) == ([], "")
    assert told[0]["response"]["status"] == "in_progress"
    assert len({event["item_id"] for event in told if "item_id" in event} | {told[2]["item"]["id"]}) == 1


async def test_an_empty_answer_has_an_item(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.says = []
    assert (await post(client, input="hi"))["output"][0]["content"][0]["text"] == ""
    assert (await events(client, input="hi"))[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_vllms_extras_reach_the_sampler(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, input="hi", top_k=5, min_p=0.1, temperature=0.5, logit_bias={"3": 1}, priority=2, cache_salt="x")
    add = engine.seen[0]
    assert (add.params.top_k, add.params.min_p, add.params.temperature, add.params.logit_bias) == (5, 0.1, 0.5, {3: 1})
    assert (add.terms.priority, add.terms.cache_salt) == (2, "x")


async def test_null_is_absent(client: httpx.AsyncClient) -> None:
    names = ["instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "store", "truncation",
             "previous_response_id", "conversation", "background", "prompt", "include", "metadata", "stream",
             "unheard_of"]  # fmt: skip
    await post(client, input="hi", **dict.fromkeys(names))
    await post(client, input="hi", text={"format": None}, reasoning={"effort": None, "summary": "auto"}, store=False)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {"input": None}),
        ("input", {"input": []}),
        ("input", {"input": 5}),
        ("input[0].role", {"input": [{"content": "x"}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[1].type", {"input": [{"role": "user", "content": "x"}, {"type": "web_search_call"}]}),
        ("input[0].content[1].type", {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:"}]}]}),
        ("input[0].content[0].colour", {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "x", "colour": 1}]}]}),
        ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": 3}),
        ("n", {"n": 2}),
        ("store", {"store": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("truncation", {"truncation": "auto"}),
        ("include[0]", {"include": ["file_search_call.results"]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("reasoning.summary", {"reasoning": {"summary": "detailed"}}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
        ("stream_options", {"stream_options": {}}),
        ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
        ("Input", {"Input": "hi"}),
    ],
)  # fmt: skip
async def test_what_is_not_done_is_refused_by_path(client: httpx.AsyncClient, param: str, body: dict[str, Any]) -> None:
    error = await refused(client, param, **body)
    assert param.rpartition(".")[2] in error["message"]


async def test_too_long_a_prompt(client: httpx.AsyncClient) -> None:
    error = await refused(client, "input", input="x " * 500)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length" in error["message"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_nothing_is_kept(client: httpx.AsyncClient, method: str) -> None:
    response = await client.request(method, f"{URL}/resp_1")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "response_not_found"


async def test_another_model(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"model": "gpt-4", "input": "hi"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("at", [0, 2])
async def test_a_stream_that_breaks_says_so(client: httpx.AsyncClient, engine: FakeEngine, at: int) -> None:
    def break_off(stream: Any, number: int) -> None:
        if number == at:
            stream.fail(RuntimeError("secret"))

    engine.trouble = break_off
    told = await events(client, input="hi")
    failed, error = told[-2:]
    assert told[0]["type"] == "response.created"
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert (error["type"], error["error"]["type"]) == ("error", "server_error")
    assert "secret" not in json.dumps(told)
    engine.trouble = None
    assert (await post(client, input="hi"))["status"] == "completed"
