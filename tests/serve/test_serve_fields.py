"""What single fields do: each of these fails if its field is ignored."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine

from headrace.engine.loading import TextSide
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.weights.report import Quality

pytest_plugins = ["serve_fixtures"]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
SAYS = "the answer is here"


async def asked(client: httpx.AsyncClient, path: str = CHAT, **fields: Any) -> Any:
    """The decoded answer, or the list of events of a stream."""
    base: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "a b"}
    response = await client.post(path, json={**base, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def content(events: list[Any]) -> list[str]:
    return [event["choices"][0]["delta"]["content"] for event in events if event["choices"][0]["delta"].get("content")]


async def test_an_interval_joins_tokens_and_loses_none(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    total = len(engine.says)
    alone = content(await asked(client, stream=True))
    joined = content(await asked(client, stream=True, stream_interval=4))
    assert len(alone) == total
    assert len(joined) == -(-total // 4)
    assert "".join(joined) == "".join(alone) == SAYS
    logprobs = await asked(client, stream=True, stream_interval=4, logprobs=True, n=2)
    tokens = [e["choices"][0]["logprobs"]["content"] for e in logprobs if e["choices"][0].get("logprobs")]
    assert sum(map(len, tokens)) == 2 * (total + 1)  # the token that ends it too


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_in_every_event(client: httpx.AsyncClient, path: str) -> None:
    events = await asked(client, path, stream=True, stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] > counts[0]
    whole = await asked(client, path)
    assert events[-1]["usage"] == whole["usage"]


async def test_the_body_names_the_request(client: httpx.AsyncClient) -> None:
    response = await client.post(
        CHAT, json={"messages": HI, "request_id": "mine.1"}, headers={"x-request-id": "another"}
    )
    assert response.json()["id"] == "chatcmpl-mine.1"
    assert response.headers["x-request-id"] == "mine.1"


async def test_prompts_are_cut_where_asked(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    ids = list(range(5, 105))
    for fields, left in (
        ({"truncate_prompt_tokens": 7}, ids[-7:]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "right"}, ids[:7]),
        ({"truncate_prompt_tokens": -1}, ids[-63:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 0}, ids[-63:]),
    ):
        await asked(client, TEXT, prompt=ids, **fields)
        assert engine.seen[-1].prompt == left
    await asked(client, TEXT, prompt=ids[:5], truncate_prompt_tokens=7)
    assert engine.seen[-1].prompt == ids[:5]
    await asked(client, CHAT, truncate_prompt_tokens=3)
    assert len(engine.seen[-1].prompt) == 3
    told = await asked(client, TEXT, prompt="a b c d", truncate_prompt_tokens=2, echo=True, max_tokens=0)
    assert told["choices"][0]["text"] == engine.tokenizer.decode(engine.seen[-1].prompt) != "a b c d"
    refused = await client.post(TEXT, json={"prompt": ids})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_the_prompt_is_told(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    both = {"return_prompt_text": True, "return_token_ids": True}
    whole = await asked(client, **both)
    ids, text = engine.seen[-1].prompt, engine.tokenizer.decode(engine.seen[-1].prompt)
    assert (whole["prompt_text"], whole["prompt_token_ids"]) == (text, ids) and "hi" in text
    events = await asked(client, stream=True, n=2, **both)
    assert [event.get("prompt_text") for event in events[:3]] == [text, None, None]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    whole = await asked(client, TEXT, **both)
    assert whole["choices"][0]["prompt_text"] == "a b"
    events = await asked(client, TEXT, stream=True, **both)
    told = [event["choices"][0].get("prompt_text") for event in events]
    assert told[0] == "a b" and set(told[1:]) == {None}
    assert "prompt_text" not in await asked(client)


async def test_the_last_message_is_said_again(client: httpx.AsyncClient) -> None:
    begun = [*HI, {"role": "assistant", "content": "so: "}]
    asks = {"messages": begun, "echo": True, "continue_final_message": True}
    assert (await asked(client, **asks))["choices"][0]["message"]["content"] == "so: " + SAYS
    assert "".join(content(await asked(client, stream=True, **asks))) == "so: " + SAYS
    assert (await asked(client, echo=True))["choices"][0]["message"]["content"] == SAYS


async def test_special_tokens_are_added_to_a_chat_on_request(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "_with_special", lambda ids: [0, *ids])
    await asked(client)
    await asked(client, add_special_tokens=True)
    plain, more = (add.prompt for add in engine.seen)
    assert more == [0, *plain]


async def test_a_template_comes_with_the_request_only_if_trusted(engine: FakeEngine) -> None:
    app = App(engine, AppSettings(trusts_templates=True))  # type: ignore[arg-type]
    template = "{% for d in documents %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}!"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        await asked(client, chat_template=template, documents=[{"text": "a"}, {"text": "b"}])
        assert engine.tokenizer.decode(engine.seen[-1].prompt) == "[a][b]hi!"
        for bad in ("{% for %}", "{{ x.y.z() }}", "{{ raise_exception('no') }}", ""):
            response = await client.post(CHAT, json={"messages": HI, "chat_template": bad})
            assert response.status_code == 400, bad
        await asked(client)
    assert engine.seen[-1].prompt == engine.tokenizer.encode_chat(engine.template.render(HI))  # type: ignore[union-attr]


async def test_best_of_as_much_as_n(client: httpx.AsyncClient) -> None:
    assert len((await asked(client, TEXT, n=3, best_of=3))["choices"]) == 3
    response = await client.post(TEXT, json={"prompt": "a", "n": 3, "best_of": 1})
    assert response.json()["error"]["param"] == "best_of"


async def test_requests_fall_back_on_the_models_defaults(words: TextSide) -> None:
    generation = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3, "skip_special_tokens": False, "top_p": "x"}
    engine = FakeEngine(words.tokenizer, words.template, generation=generation)
    app = App(engine, AppSettings())  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        await asked(client)
        await asked(client, temperature=0.5, top_k=0, max_tokens=2, skip_special_tokens=True)
        await asked(client, temperature=None, max_tokens=None)
        await asked(client, max_completion_tokens=4, max_tokens=2)
    params = [add.params for add in engine.seen]
    assert [p.temperature for p in params] == [0.25, 0.5, 0.25, 0.25]
    assert [p.top_k for p in params] == [7, 0, 7, 7]
    assert [p.max_tokens for p in params] == [3, 2, 3, 4]
    assert [p.skip_special_tokens for p in params] == [False, True, False, False]
    assert [p.top_p for p in params] == [1.0] * 4


async def test_any_name_where_that_is_allowed(engine: FakeEngine) -> None:
    app = App(engine, AppSettings(names=("tiny",), any_name=True))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        assert (await asked(client, model="gpt-4"))["model"] == "tiny"
        response = await client.post(CHAT, json={"messages": HI, "model": 5})
        assert response.json()["error"]["param"] == "model"


async def test_an_empty_name_is_the_model_that_is_served(client: httpx.AsyncClient) -> None:
    assert (await asked(client, model=""))["model"] == "tiny"


async def test_the_cards_of_models(engine: FakeEngine) -> None:
    engine = FakeEngine(engine.tokenizer, engine.template, name="/secret/folder/tiny.gguf", trained_len=128)
    app = App(engine, AppSettings(names=("tiny", "other")))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "other"]
        assert (await client.get("/v1/models/other")).json() == listed[1]
        assert (await client.get("/load")).json() == {"server_load": 0}
    card = listed[0]
    assert (card["root"], card["parent"], card["max_model_len"]) == ("tiny.gguf", None, 64)
    assert card["permission"][0]["allow_sampling"] is True
    assert (card["meta"]["n_ctx_train"], card["meta"]["n_vocab"]) == (128, engine.tokenizer.vocab_size)
    assert "quality" not in card


async def test_the_card_of_a_model_that_was_measured(engine: FakeEngine) -> None:
    known = Quality(perplexity=9.5, kl_mean=0.1, kl_p99=0.5, top1=0.9, against="x.gguf", text="y", tokens=10)
    engine = FakeEngine(engine.tokenizer, engine.template, quality=known)
    app = App(engine, AppSettings(names=("tiny",)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        card = (await client.get("/v1/models/tiny")).json()
        shapes = (await client.get("/openapi.json")).json()["components"]["schemas"]
    assert card["quality"] == msgspec.to_builtins(known)
    assert set(shapes["Quality"]["properties"]) == set(card["quality"])
