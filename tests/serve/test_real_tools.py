"""OpenAI's own client calls tools of a served Qwen2.5-Coder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from child_server import Server, serving
from real import golden

ASK = "What is the weather in Paris?"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters | {"additionalProperties": False}}}


CITY = {"type": "string", "maxLength": 20}
TOOLS: Any = [tool("get_weather", city=CITY, unit={"enum": ["celsius", "fahrenheit"]}), tool("get_time", city=CITY)]
NAMES = {"get_weather": {"city", "unit"}, "get_time": {"city"}}


@pytest.fixture(scope="module")
def server(qwen_coder: Path) -> Iterator[Server]:
    with serving(qwen_coder, "--backend", "cpu", "--served-model-name", "qwen", "--max-model-len", "2k") as server:
        yield server


def ask(server: Server, content: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    options = {"tools": TOOLS, "temperature": 0, "max_tokens": 200, "messages": messages, **more}
    return server.openai.chat.completions.create(model="qwen", **options)


def calls_of(choice: Any) -> list[tuple[str, dict[str, Any]]]:
    """The calls, each with the arguments that its tool wants."""
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert all(NAMES[name] == set(arguments) for name, arguments in calls)
    return calls


def test_prompts_with_tools_are_the_references_and_so_is_the_call(server: Server) -> None:
    for case in golden("qwen2.5-coder-tools")["chat_with_tools"]:
        answer = ask(server, "", messages=case["messages"], tools=case["tools"], extra_body={"return_token_ids": True})
        assert answer.prompt_token_ids == case["prompt_ids"]
        (choice,) = answer.choices
        said = case["text"].partition("<|im_end|>")[0]
        written = json.JSONDecoder().raw_decode(said)[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (written["name"], written["arguments"])
        assert choice.finish_reason == "tool_calls"
    plain = ask(server, "Hello, who are you?")
    assert plain.choices[0].message.tool_calls is None and "Alibaba" in plain.choices[0].message.content


def test_calls_that_are_required_or_named(server: Server) -> None:
    required = ask(server, "What is the weather in Paris and in Rome?", tool_choice="required").choices[0]
    assert {name for name, _ in calls_of(required)} <= set(NAMES) and required.finish_reason == "tool_calls"
    assert {arguments["city"] for _, arguments in calls_of(required)} == {"Paris", "Rome"}
    assert required.message.content is None
    one = ask(server, "What is the weather in Paris and in Rome?", tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(one.choices[0])) == 1
    named = ask(server, "Hello!", tool_choice={"type": "function", "function": {"name": "get_time"}}).choices[0]
    assert [name for name, _ in calls_of(named)] == ["get_time"]
    assert named.finish_reason == "stop"


def test_streams_put_together_are_the_whole_answer(server: Server) -> None:
    for more in ({}, {"tool_choice": "required"}):
        whole = ask(server, ASK, **more).choices[0].message.tool_calls
        arguments: dict[int, str] = {}
        names = []
        for chunk in ask(server, ASK, stream=True, **more):
            for part in chunk.choices[0].delta.tool_calls or ():
                names += [part.function.name] if part.function.name else []
                arguments[part.index] = arguments.get(part.index, "") + part.function.arguments
        assert names == [call.function.name for call in whole]
        assert list(arguments.values()) == [call.function.arguments for call in whole]


def test_the_clients_own_parser_of_strict_tools(server: Server) -> None:
    strict: Any = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    messages: Any = [{"role": "user", "content": ASK}]
    with server.openai.chat.completions.stream(
        model="qwen", messages=messages, tools=strict, temperature=0, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = choice.message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, dict) and call.function.parsed_arguments["city"] == "Paris"


def test_a_conversation_with_a_result(server: Server) -> None:
    first = ask(server, ASK, tool_choice={"type": "function", "function": {"name": "get_weather"}}).choices[0].message
    (call,) = first.tool_calls
    history: Any = [
        {"role": "user", "content": ASK},
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "clear"}'},
        {"role": "user", "content": "Tell me in one sentence."},
    ]
    last = ask(server, "", messages=history, tool_choice="none").choices[0].message
    assert last.tool_calls is None and last.content[0] not in "{<", last.content


def test_a_bad_tool_is_refused_and_the_next_request_is_answered(server: Server) -> None:
    odd = tool("odd", city={"type": "string", "pattern": "["})
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, ASK, tools=[*TOOLS, odd], tool_choice="required")
    assert caught.value.param == "tools[2].function.parameters"
    assert calls_of(ask(server, ASK, tool_choice="required").choices[0])
