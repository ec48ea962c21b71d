"""LangChain's ChatOpenAI: asked, streamed, in a batch, and with a context that is too long."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from child_server import Server
from real import golden

ASKED: str = golden("smollm2")["chat"][0]["messages"][0]["content"]
PARIS = "The capital of France is Paris."


@pytest.fixture
def chat(served: Server) -> ChatOpenAI:
    return chat_model(served, "smollm2")


def chat_model(server: Server, name: str, **more: Any) -> ChatOpenAI:
    told: Any = {"temperature": 0, "max_retries": 0, "max_tokens": 100, **more}
    return ChatOpenAI(model=name, base_url=server.url + "/v1", api_key="none", **told)  # type: ignore[arg-type]


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.invoke(ASKED)
    assert answer.content == PARIS
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream(chat: ChatOpenAI) -> None:
    chunks = list(chat.stream(ASKED))
    assert "".join(str(chunk.content) for chunk in chunks) == PARIS
    assert len(chunks) > 3


async def test_a_batch_says_what_each_says_alone(chat: ChatOpenAI) -> None:
    asked = [ASKED, "Count to three.", "Say hello."]
    alone = [(await chat.ainvoke(one)).content for one in asked]
    assert [answer.content for answer in await chat.abatch(asked)] == alone
    assert alone[0] == PARIS


def test_a_conversation(served: Server, chat: ChatOpenAI) -> None:
    messages = [SystemMessage("You answer briefly."), HumanMessage(ASKED), AIMessage(PARIS), HumanMessage("And Italy?")]
    roles = ("system", "user", "assistant", "user")
    plain: Any = [{"role": role, "content": m.content} for role, m in zip(roles, messages, strict=True)]
    whole = served.openai.chat.completions.create(model="smollm2", messages=plain, temperature=0, max_tokens=100)
    assert chat.invoke(messages).content == whole.choices[0].message.content


def test_log_probabilities(chat: ChatOpenAI) -> None:
    content = chat.bind(logprobs=True).invoke(ASKED).response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in content).removesuffix("<|im_end|>") == PARIS


def test_a_context_too_long_is_its_error(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat.invoke("word " * 3000)
    assert chat.invoke(ASKED).content == PARIS
