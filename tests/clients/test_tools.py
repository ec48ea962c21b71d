"""Tools on a served Qwen2.5-Coder, as openai-python, LangChain and LiteLLM call them."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel

from child_server import Server

ASKED = "What is the weather in Paris right now? Use the tool."
HI: Any = [{"role": "user", "content": ASKED}]


class get_weather(BaseModel):
    """The weather of a city, now."""

    city: str


class Sum(BaseModel):
    """Two numbers and their sum."""

    first: int
    second: int
    total: int


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city, now.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture
def client(served_qwen: Server) -> OpenAI:
    return served_qwen.openai


@pytest.fixture
def chat(served_qwen: Server) -> ChatOpenAI:
    told: Any = {"temperature": 0, "max_retries": 0, "max_tokens": 100, "api_key": "none"}
    return ChatOpenAI(model="qwen", base_url=served_qwen.url + "/v1", **told)


def ask(client: OpenAI, **more: Any) -> Any:
    told: Any = {"messages": HI, "tools": TOOLS, "temperature": 0, "max_tokens": 100, **more}
    return client.chat.completions.create(model="qwen", **told)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_whole_and_streamed(client: OpenAI, choice: Any) -> None:
    whole = ask(client, tool_choice=choice).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason in ("tool_calls", "stop")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    name, arguments, reasons = "", "", []
    for chunk in ask(client, tool_choice=choice, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert [reason for reason in reasons if reason] == [whole.finish_reason]


def test_none_is_none(client: OpenAI) -> None:
    message = ask(client, tool_choice="none").choices[0].message
    assert not message.tool_calls
    assert message.content


def test_the_result_is_read(client: OpenAI) -> None:
    first = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"degrees": 17, "sky": "cloudy"}'}
    answer = ask(client, messages=[*HI, first.model_dump(exclude_none=True), result]).choices[0].message
    assert "17" in (answer.content or "")


def test_langchain_binds_tools(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather])
    first = bound.invoke(ASKED)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = ToolMessage('{"degrees": 17, "sky": "cloudy"}', tool_call_id=call["id"])
    assert "17" in str(bound.invoke([HumanMessage(ASKED), first, result]).content)
    whole: Any = None
    for chunk in bound.stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structures_the_output(chat: ChatOpenAI, method: Any) -> None:
    found = chat.with_structured_output(Sum, method=method).invoke("Add 2 and 3.")
    assert isinstance(found, Sum)
    assert (found.first, found.second) == (2, 3)


def test_litellm_calls(served_qwen: Server) -> None:
    told: Any = {"api_base": served_qwen.url + "/v1", "api_key": "none", "temperature": 0, "max_tokens": 100}
    answer = litellm.completion(model="openai/qwen", messages=HI, tools=TOOLS, tool_choice="required", **told)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
