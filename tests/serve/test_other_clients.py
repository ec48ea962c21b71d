"""OpenAI's and Anthropic's own clients against served models, through /v1/responses and /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from child_server import Server, serving

SAYS = "Say hello to the world in one short sentence."
SHORT: Any = {"extra_body": {"stop_token_ids": list(range(256))}}  # so that the answer ends
GREEDY: Any = {"extra_body": {"temperature": 0}}  # the client has a field for it no longer
HI: Any = [{"role": "user", "content": SAYS}]


def claude(server: Server) -> dict[str, Any]:
    return {"base_url": server.url, "api_key": "none", "max_retries": 0}


@pytest.fixture(scope="module")
def tiny_server(tiny: Path) -> Iterator[Server]:
    with serving(tiny, "--served-model-name", "tiny", "--max_model_len", "2k") as server:
        yield server


@pytest.fixture(scope="module")
def smol_server(smollm2: Path) -> Iterator[Server]:
    with serving(smollm2, "--served-model-name", "smol", "--max_model_len", "1k", "--backend", "cpu") as server:
        yield server


@pytest.mark.slow
class TestTiny:
    """What a model says is of no matter here."""

    def test_responses(self, tiny_server: Server) -> None:
        client = tiny_server.openai
        asks: dict[str, Any] = {"model": "tiny", "input": "hi", "instructions": "be", "max_output_tokens": 12,
                                "temperature": 0}  # fmt: skip
        whole = client.responses.create(**asks)
        assert whole.status == "incomplete"
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage is not None
        assert whole.usage.output_tokens == 12
        told = list(client.responses.create(**asks, stream=True))
        text = "".join(event.delta for event in told if event.type == "response.output_text.delta")
        last = told[-1]
        assert last.type == "response.incomplete"
        assert text == last.response.output_text == whole.output_text

    def test_a_streamed_response_to_its_end(self, tiny_server: Server) -> None:
        client = tiny_server.openai
        # A bias makes the model end.
        asks: dict[str, Any] = {
            "model": "tiny",
            "input": "hi",
            "temperature": 0,
            "extra_body": {"stop_token_ids": list(range(256))},
        }
        with client.responses.stream(**asks) as stream:
            final = stream.get_final_response()
        assert final.status == "completed"
        assert final.output_text == client.responses.create(**asks).output_text

    async def test_responses_async(self, tiny_server: Server) -> None:
        client = openai.AsyncOpenAI(base_url=tiny_server.url + "/v1", api_key="none", max_retries=0)
        async with client.responses.stream(model="tiny", input="hi", temperature=0, **SHORT) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert final.status == "completed"

    def test_errors_of_responses(self, tiny_server: Server) -> None:
        client = tiny_server.openai
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_1")
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="gpt", input="hi")
        assert client.responses.create(model="tiny", input="hi", max_output_tokens=1).usage is not None

    def test_messages(self, tiny_server: Server) -> None:
        client = anthropic.Anthropic(**claude(tiny_server))
        asks: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": HI, "system": "be", **GREEDY}
        whole = client.messages.create(**asks)
        assert whole._request_id
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
        (block,) = whole.content
        assert block.type == "text"
        count = client.messages.count_tokens(model="tiny", messages=HI, system="be")
        assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        with client.messages.stream(**asks) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == block.text == stream.get_final_text()
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
        raw = client.messages.create(**asks, stream=True)
        assert [event.type for event in raw][-1] == "message_stop"

    async def test_messages_async(self, tiny_server: Server) -> None:
        client = anthropic.AsyncAnthropic(**claude(tiny_server))
        asks: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": HI, **GREEDY}
        whole = await client.messages.create(**asks)
        async with client.messages.stream(**asks) as stream:
            text = await stream.get_final_text()
        assert [block.text for block in whole.content if block.type == "text"] == [text]

    def test_errors_of_messages(self, tiny_server: Server) -> None:
        client = anthropic.Anthropic(**claude(tiny_server))
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(model="tiny", max_tokens=5, messages=HI, extra_body={"temperature": 2})
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="claude", max_tokens=5, messages=HI)
        assert missing.value.request_id
        assert client.messages.create(model="tiny", max_tokens=1, messages=HI).usage.output_tokens == 1


def test_smollm2_answers_alike_through_all_apis(smol_server: Server) -> None:
    chat = smol_server.openai.chat.completions.create(model="smol", messages=HI, max_tokens=24, **GREEDY)
    wanted = chat.choices[0].message.content
    response = smol_server.openai.responses.create(model="smol", input=SAYS, temperature=0, max_output_tokens=24)
    message = anthropic.Anthropic(**claude(smol_server)).messages.create(
        model="smol", messages=HI, max_tokens=24, **GREEDY
    )
    assert response.output_text == wanted
    assert [block.text for block in message.content if block.type == "text"] == [wanted]


def test_smollm2_goes_on_with_what_was_begun(smol_server: Server) -> None:
    client = anthropic.Anthropic(**claude(smol_server))
    begun: Any = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    answer = client.messages.create(model="smol", messages=begun, max_tokens=4, **GREEDY)
    (block,) = answer.content
    assert block.type == "text"
    assert "Paris" in block.text


@pytest.fixture(scope="module")
def qwen_server(qwen_coder: Path) -> Iterator[Server]:
    with serving(qwen_coder, "--served-model-name", "qwen", "--max_model_len", "2k", "--backend", "cpu") as server:
        yield server


SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED = "What is the weather in Paris? Use the tool."


def test_qwen_calls_a_function_and_reads_its_output(qwen_server: Server) -> None:
    client = qwen_server.openai
    tools: Any = [{"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}]
    asks: dict[str, Any] = {"model": "qwen", "tools": tools, "temperature": 0, "max_output_tokens": 64}
    items: Any = [{"role": "user", "content": ASKED}]
    with client.responses.stream(input=items, **asks) as stream:
        arguments = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert json.loads(arguments) == json.loads(call.arguments) == {"city": "Paris"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "19 degrees, rain"}
    answer = client.responses.create(input=[*items, *final.output, output], **{**asks, "tools": []})
    assert "19" in answer.output_text


def test_qwen_uses_a_tool_and_reads_its_result(qwen_server: Server) -> None:
    client = anthropic.Anthropic(**claude(qwen_server))
    tools: Any = [{"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}]
    asks: dict[str, Any] = {"model": "qwen", "tools": tools, "max_tokens": 64, **GREEDY}
    messages: Any = [{"role": "user", "content": ASKED}]
    with client.messages.stream(messages=messages, **asks) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (use,) = [block for block in final.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "19 degrees, rain"}
    turns: Any = [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=[*messages, *turns], **{**asks, "tools": []})
    assert any("19" in block.text for block in answer.content if block.type == "text")


class City(pydantic.BaseModel):
    name: str
    country: str


def test_qwen_answers_in_the_shape_that_was_asked_for(qwen_server: Server) -> None:
    asked = "Which city is the capital of France? Answer as JSON."
    parsed = qwen_server.openai.responses.parse(
        model="qwen", input=asked, text_format=City, temperature=0, max_output_tokens=64
    )
    assert parsed.output_parsed == City(name="Paris", country="France")
    message = anthropic.Anthropic(**claude(qwen_server)).messages.parse(
        model="qwen", messages=[{"role": "user", "content": asked}], output_format=City, max_tokens=64, **GREEDY
    )
    assert message.parsed_output == City(name="Paris", country="France")


def test_qwen_must_use_a_tool(qwen_server: Server) -> None:
    client = anthropic.Anthropic(**claude(qwen_server))
    tools: Any = [{"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        answer = client.messages.create(
            model="qwen", messages=HI, tools=tools, tool_choice=choice, max_tokens=64, **GREEDY
        )
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert uses and all(set(use.input) == {"city"} for use in uses)
        assert answer.stop_reason == "tool_use"
    bad = {**SCHEMA, "unheardOf": 1}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema"):
        client.messages.create(
            model="qwen",
            messages=HI,
            tools=[{**tools[0], "input_schema": bad}],
            tool_choice={"type": "any"},
            max_tokens=9,
        )
    with pytest.raises(openai.BadRequestError) as refused:
        text: Any = {"format": {"type": "json_schema", "name": "x", "schema": bad}}
        qwen_server.openai.responses.create(model="qwen", input="hi", text=text)
    assert str(refused.value.param).startswith("text.format.schema")
