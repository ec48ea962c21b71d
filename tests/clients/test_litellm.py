"""LiteLLM as its users call it: a completion, a stream, many at once, and its own exceptions."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

from child_server import Server
from real import golden

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # its own
FRANCE: Any = golden("smollm2")["chat"][0]["messages"]
PARIS = "The capital of France is Paris."


@pytest.fixture
def asked(served: Server) -> dict[str, Any]:
    return {
        "model": "openai/smollm2", "api_base": served.url + "/v1", "api_key": "none", "messages": FRANCE,
        "temperature": 0, "max_tokens": 20, "num_retries": 0, "max_retries": 0,
    }  # fmt: skip


def test_a_completion(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0


def test_a_stream(asked: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 0


async def test_many_at_once(asked: dict[str, Any]) -> None:
    answers = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(4)))
    assert {answer.choices[0].message.content for answer in answers} == {PARIS}


def test_fields_of_our_own_go_through(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, top_k=1, extra_body={"min_p": 0.1, "stop_token_ids": [0]})
    assert answer.choices[0].message.content == PARIS


def test_text_completions(asked: dict[str, Any]) -> None:
    told = {name: value for name, value in asked.items() if name not in ("messages", "model", "max_tokens")}
    answer = litellm.text_completion(
        model="text-completion-openai/smollm2", prompt="The capital of France is", max_tokens=1, **told
    )
    assert answer.choices[0].text == " Paris"


BAD: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, litellm.ContextWindowExceededError),
    ({"model": "openai/gpt-4"}, litellm.NotFoundError),
    ({"temperature": 7}, litellm.BadRequestError),
    ({"n": 10**6}, litellm.BadRequestError),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("bad", "kind"), BAD)
def test_refusals_are_its_exceptions(
    asked: dict[str, Any], bad: dict[str, Any], kind: type[Exception], stream: bool
) -> None:
    with pytest.raises(kind):
        litellm.completion(**{**asked, **bad, "stream": stream})
    assert litellm.completion(**asked).choices[0].message.content == PARIS
