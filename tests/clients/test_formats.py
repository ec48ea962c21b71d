"""Structured outputs of a served SmolLM2 through openai-python: they fit, streamed or not, whatever else is asked."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from child_server import Server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"$ref": "#/$defs/thing"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
    "$defs": {"thing": {"enum": ["tea", 'the "sea"', "Käse"]}},
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
ASKED: Any = [{"role": "user", "content": "Describe a person as JSON."}]
TEXT: Any = {"max_tokens": 120, "temperature": 0}


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    pet: Pet | None
    likes: list[Literal["tea", "coffee"]] = Field(max_length=2)


@pytest.fixture
def client(served: Server) -> OpenAI:
    return served.openai


def ask(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="smollm2", messages=ASKED, **{**TEXT, **more})


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def test_an_answer_follows_its_schema(client: OpenAI) -> None:
    answer = ask(client, response_format=FORMAT)
    check(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"


def test_the_stream_is_the_answer_and_each_choice_fits(client: OpenAI) -> None:
    fields: Any = {
        "response_format": FORMAT, "n": 2, "temperature": 1, "seed": 4, "logprobs": True, "top_logprobs": 3,
        "frequency_penalty": 0.5,
    }  # fmt: skip
    whole = ask(client, **fields)
    texts, tokens, ends = ["", ""], [0, 0], ["", ""]
    for chunk in ask(client, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len(choice.logprobs.content or []) if choice.logprobs else 0
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    for choice in whole.choices:
        check(choice.message.content)
        assert texts[choice.index] == choice.message.content
        assert tokens[choice.index] == len(choice.logprobs.content)
    assert ends == ["stop", "stop"] and texts[0] != texts[1]


def test_the_parse_helper_gives_objects(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="smollm2", messages=ASKED, response_format=Person, max_tokens=200, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_any_object(client: OpenAI) -> None:
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=300, frequency_penalty=1.0)
    assert answer.choices[0].message.content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[A-Z][a-z]{2,8} [0-9]{2}"}}, "[A-Z][a-z]{2,8} [0-9]{2}"),
        ({"structured_outputs": {"choice": ["positive", "negative"]}}, "positive|negative"),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{1,5}/ ">"'}}, "<[a-z]{1,5}>"),
        ({"guided_regex": "(yes|no)!"}, "(yes|no)!"),
        ({"guided_choice": ["a\nb", "ü"]}, "a\nb|ü"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
    ],
    ids=str,
)
def test_other_kinds_in_both_apis(client: OpenAI, fields: dict[str, Any], pattern: str) -> None:
    chat = ask(client, extra_body=fields)
    assert re.fullmatch(pattern, chat.choices[0].message.content)
    text = client.completions.create(model="smollm2", prompt="I say", extra_body=fields, **TEXT)
    assert re.fullmatch(pattern, text.choices[0].text)
    assert {chat.choices[0].finish_reason, text.choices[0].finish_reason} == {"stop"}


def test_no_end_comes_inside_whatever_bias_it_has(client: OpenAI) -> None:
    """vLLM #49227: the grammar knew one end token of several."""
    answer = ask(client, response_format=FORMAT, logit_bias={"0": 100, "2": 100})
    check(answer.choices[0].message.content)


async def test_bad_schemas_are_their_own_requests_400_and_streams_go_on(served: Server) -> None:
    """vLLM #17248: one bad schema stopped everybody."""
    async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.create
        stream = await create(model="smollm2", messages=ASKED, max_tokens=300, stream=True, temperature=1, seed=1)
        bad: list[Any] = [
            {"type": "strng"}, {"abc": "def"}, {"type": "string", "pattern": "["}, {"$ref": "#/nope"}, {"enum": []},
            {"minLength": 5, "maxLength": 2}, {"properties": {"a": {"not": {}}}},
        ]  # fmt: skip

        async def refused(schema: Any) -> str | None:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            with pytest.raises(openai.BadRequestError) as caught:
                await create(model="smollm2", messages=ASKED, response_format=form, stream=True)
            return caught.value.param

        assert set(await asyncio.gather(*map(refused, bad))) == {"response_format.json_schema.schema"}
        good = await create(model="smollm2", messages=ASKED, response_format=FORMAT, **TEXT)
        check(good.choices[0].message.content)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
