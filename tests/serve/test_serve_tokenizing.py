"""/tokenize tells the ids that a request would have; /detokenize gives the text back."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from headrace.engine.loading import TextSide
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App

pytest_plugins = ["serve_fixtures"]

HI = [{"role": "user", "content": "hi"}]
TEXTS = ["", "a b", "the answer", "grüß 🌽 dich", "\x00", "<|im_end|>", "a" * 3000]


async def post(client: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:20])
@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_there_and_back(client: httpx.AsyncClient, engine: FakeEngine, text: str, prefix: str) -> None:
    answer = await post(client, f"{prefix}/tokenize", prompt=text, model="tiny")
    assert answer["tokens"] == engine.tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (len(answer["tokens"]), 64, None)
    back = await post(client, f"{prefix}/detokenize", tokens=answer["tokens"])
    assert back == {"prompt": text, "content": text}
    assert engine.seen == []


async def test_a_conversation_has_the_ids_of_its_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        told = await post(client, "/tokenize", messages=HI, **fields)
        await post(client, "/v1/chat/completions", messages=HI, **fields)
        assert told["tokens"] == engine.seen[-1].prompt, fields


async def test_texts_of_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    told = await post(client, "/tokenize", prompt="a 🌽", return_token_strs=True)
    assert told["token_strs"] == [engine.tokenizer.token_text(id) for id in told["tokens"]]
    told = await post(client, "/tokenize", content="a 🌽", with_pieces=True)
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in told["tokens"])
    assert raw.decode() == "a 🌽"
    assert any(isinstance(piece["piece"], list) for piece in told["tokens"])


async def test_special_tokens_are_added_where_the_names_say_so(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "_with_special", lambda ids: [0, *ids])
    plain = engine.tokenizer.encode("a", add_special_tokens=False)
    for fields, added in (
        ({"prompt": "a"}, True),
        ({"prompt": "a", "add_special_tokens": False}, False),
        ({"content": "a"}, False),
        ({"content": "a", "add_special": True}, True),
    ):
        assert (await post(client, "/tokenize", **fields))["tokens"] == ([0, *plain] if added else plain), fields
    chat = (await post(client, "/tokenize", messages=HI))["tokens"]
    assert (await post(client, "/tokenize", messages=HI, add_special_tokens=True))["tokens"] == [0, *chat]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "messages"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "content"),
        ("/tokenize", {"prompt": "a", "documents": []}, "documents"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [5]}, "messages[0]"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/tokenize", {"prompt": "a", "add_special": True, "add_special_tokens": True}, "add_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [320]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**64]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    assert (await post(client, path, 400, **body))["error"]["param"] == param
    assert (await post(client, "/detokenize", tokens=[]))["prompt"] == ""


@pytest.mark.parametrize("field", ["prompt", "content"])
async def test_a_text_is_refused_by_its_length_before_it_is_tokenized(
    engine: FakeEngine, words: TextSide, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    app = App(engine, AppSettings(names=("tiny",)))  # type: ignore[arg-type]
    monkeypatch.setattr(type(words.tokenizer), "encode", lambda *_: pytest.fail("it was tokenized"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        told = await post(client, "/tokenize", 400, **{field: "a " * 600_000})
    assert told["error"]["param"] == field


async def test_another_model_is_unknown_here_too(client: httpx.AsyncClient) -> None:
    assert (await post(client, "/tokenize", 404, prompt="a", model="x"))["error"]["code"] == "model_not_found"
    assert (await post(client, "/detokenize", 404, tokens=[1], model="x"))["error"]["code"] == "model_not_found"


async def test_what_the_tokenizer_is(client: httpx.AsyncClient, words: TextSide) -> None:
    told = (await client.get("/tokenizer_info")).json()
    assert words.template is not None
    assert told == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": words.template.source,
        "model_max_length": 64,
    }
    assert (await post(client, "/tokenize", prompt=told["eos_token"], add_special_tokens=False))["tokens"] == [2]
