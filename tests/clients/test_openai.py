"""openai-python against a served SmolLM2: typed answers, streams that equal them, and errors as its exceptions."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from child_server import Server, running, until
from real import golden

FRANCE: Any = golden("smollm2")["chat"][0]["messages"]
PARIS = "The capital of France is Paris."


@pytest.fixture
def client(served: Server) -> OpenAI:
    return served.openai


def ask(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="smollm2", messages=FRANCE, temperature=0, **{"max_tokens": 20, **more})


def test_models(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "smollm2"
    assert client.models.retrieve("smollm2") == card


def test_an_answer_and_its_usage(client: OpenAI) -> None:
    answer = ask(client)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_a_stream_is_the_answer(client: OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == PARIS
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage == ask(client).usage or chunks[-1].usage.total_tokens == ask(client).usage.total_tokens
    assert len({c.id for c in chunks}) == 1


def test_the_stream_helper_accumulates(client: OpenAI) -> None:
    with client.chat.completions.stream(model="smollm2", messages=FRANCE, temperature=0, max_tokens=20) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert whole.choices[0].message.content == PARIS


async def test_many_at_once_say_what_each_says_alone(served: Server) -> None:
    async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:

        async def one(number: int, stream: bool) -> str:
            asked: Any = {"model": "smollm2", "prompt": f"{number}, {number + 1},", "max_tokens": 12, "temperature": 0}
            if not stream:
                return (await client.completions.create(**asked)).choices[0].text
            return "".join([c.choices[0].text async for c in await client.completions.create(**asked, stream=True)])

        alone = [await one(number, False) for number in range(8)]
        assert await asyncio.gather(*(one(number, False) for number in range(8))) == alone
        assert await asyncio.gather(*(one(number, True) for number in range(8))) == alone


def test_log_probabilities(client: OpenAI) -> None:
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    said = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in said).decode().removesuffix("<|im_end|>") == PARIS
    for token in said:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)  # greedy
        assert math.exp(token.logprob) <= 1
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) < 1.0001


def test_choices_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": FRANCE, "n": 3, "seed": 5, "max_tokens": 20, "temperature": 1.5}
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [choice.message.content for choice in again.choices] == texts
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_echo_and_legacy_log_probabilities(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", echo=True, logprobs=2, max_tokens=1, temperature=0
    ).choices[0]
    assert answer.text == "The capital of France is Paris"
    assert answer.logprobs is not None
    assert answer.logprobs.token_logprobs is not None
    assert answer.logprobs.token_logprobs[0] is None
    assert "".join(answer.logprobs.tokens or []) == answer.text
    assert all(value < 0 for value in answer.logprobs.token_logprobs[1:])


BAD: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None, str | None]] = [
    ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
    ({"temperature": 3}, openai.BadRequestError, "temperature", None),
    ({"n": 10**6}, openai.BadRequestError, "n", None),
    ({"messages": []}, openai.BadRequestError, "messages", None),
    ({"logit_bias": {"99999999": 1}}, openai.BadRequestError, "logit_bias", None),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, openai.BadRequestError, "messages",
     "context_length_exceeded"),
    ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature", "unsupported_parameter"),
    ({"extra_body": {"top_k": -7}}, openai.BadRequestError, "top_k", None),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("bad", "kind", "param", "code"), BAD)
def test_refusals_are_its_exceptions_and_hurt_nobody(
    client: OpenAI, bad: dict[str, Any], kind: type[openai.APIStatusError], param: str | None, code: str | None,
    stream: bool,
) -> None:  # fmt: skip
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**{"model": "smollm2", "messages": FRANCE, "stream": stream, **bad})
    if param is not None:
        assert refused.value.param == param
    if code is not None:
        assert refused.value.code == code
    assert refused.value.request_id
    assert ask(client).choices[0].message.content == PARIS


def test_leaving_a_stream_frees_its_place(served: Server, client: OpenAI) -> None:
    stream = client.completions.create(
        model="smollm2", prompt="Once upon a time", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert running(served) == 1
    stream.close()
    until(lambda: running(served) == 0)


def test_nobody_there_is_a_connection_error() -> None:
    with pytest.raises(openai.APIConnectionError):
        OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0).models.list()
