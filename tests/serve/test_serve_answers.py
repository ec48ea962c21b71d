"""What good requests get: OpenAI's shapes, whole and streamed, from a scripted engine."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

pytest_plugins = ["serve_fixtures"]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
ANSWER = "the answer is here"


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    return chunks


async def test_a_chat_answer(client: httpx.AsyncClient) -> None:
    answer = await post(client, CHAT, messages=HI, model="other", seed=7)
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["seed"] == 7
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_a_seed_is_drawn_and_reported(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answers = [await post(client, CHAT, messages=HI) for _ in range(2)]
    assert [a["seed"] for a in answers] == [add.seed for add in engine.seen]
    assert answers[0]["seed"] != answers[1]["seed"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_says_what_the_whole_answer_says(client: httpx.AsyncClient, path: str, n: int) -> None:
    asks: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": ["ab", "cde"]}
    asks |= {"n": n, "seed": 1, "max_tokens": 6, "logprobs": True if path == CHAT else 2}
    whole = await post(client, path, **asks)
    chunks = await events(client, path, **asks, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["finish_reason"]
        if path == CHAT:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
            assert own[-1]["delta"] == {}
            tokens = [t for c in own if c["logprobs"] for t in c["logprobs"]["content"]]
            assert tokens == choice["logprobs"]["content"]
        else:
            assert "".join(c["text"] for c in own) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert [v for c in own if c["logprobs"] for v in c["logprobs"][name]] == values


async def test_without_include_usage_no_chunk_has_it(client: httpx.AsyncClient) -> None:
    for chunk in await events(client, CHAT, messages=HI, stream_options={"include_usage": False}):
        assert "usage" not in chunk
        assert len(chunk["choices"]) == 1


async def test_prompts_and_choices_are_numbered_together(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, TEXT, prompt=["a", "bb"], n=2)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sum(len(add.prompt) for add in engine.seen) == 3
    assert len({add.request_id for add in engine.seen}) == 2
    assert [c["seed"] for c in answer["choices"]] == [engine.seen[i].seed for i in (0, 0, 1, 1)]


@pytest.mark.parametrize("prompt", ["ab", ["ab"], "IDS", ["IDS"]])
async def test_a_prompt_is_text_or_ids(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any) -> None:
    ids = engine.tokenizer.encode("ab")
    prompt = ids if prompt == "IDS" else [ids] if prompt == ["IDS"] else prompt
    answer = await post(client, TEXT, prompt=prompt, echo=True)
    assert answer["choices"][0]["text"] == "ab" + ANSWER
    assert engine.seen[0].prompt == ids


async def test_echo_scores_the_prompt(client: httpx.AsyncClient) -> None:
    """What evaluation harnesses live on: nothing generated, every prompt token but the first with its value."""
    answer = await post(client, TEXT, prompt=["abc", "a"], echo=True, max_tokens=0, logprobs=1)
    first, second = answer["choices"]
    assert first["text"] == "abc"
    assert first["finish_reason"] == "length"
    assert first["logprobs"]["tokens"] == ["a", "b", "c"]
    assert first["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert first["logprobs"]["text_offset"] == [0, 1, 2]
    assert first["logprobs"]["top_logprobs"][1:] == [{"b": -0.5}, {"c": -0.5}]
    assert second["logprobs"]["token_logprobs"] == [None]
    assert answer["usage"]["completion_tokens"] == 0


async def test_echo_in_a_stream(client: httpx.AsyncClient) -> None:
    chunks = await events(client, TEXT, prompt="abc", echo=True, max_tokens=2, logprobs=0)
    texts = [c["text"] for chunk in chunks for c in chunk["choices"]]
    assert texts[0] == "abc"
    assert ANSWER.startswith("".join(texts[1:]))
    offsets = [o for chunk in chunks for c in chunk["choices"] for o in c["logprobs"]["text_offset"]]
    assert offsets[:4] == [0, 1, 2, 3]


async def test_chat_logprobs_give_true_bytes(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """An emoji in four tokens: their bytes, joined, are the text (a known fault of others)."""
    tokenizer = engine.tokenizer
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    engine.says = [by_bytes[bytes([b])] for b in "🌽".encode()]
    answer = await post(client, CHAT, messages=HI, logprobs=True, top_logprobs=2, max_tokens=4)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert (
        bytes(b for token in tokens for b in token["bytes"]).decode()
        == "🌽"
        == answer["choices"][0]["message"]["content"]
    )
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    assert tokens[0]["token"] == "�"
    text = await post(client, TEXT, prompt="x", logprobs=1, max_tokens=4)
    assert text["choices"][0]["logprobs"]["tokens"][0] == "bytes:\\xf0"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_character_is_one_mark(
    client: httpx.AsyncClient, engine: FakeEngine, count: int, stream: bool
) -> None:
    by_bytes = {engine.tokenizer.token_bytes(i): i for i in range(engine.tokenizer.vocab_size)}
    engine.says = [by_bytes[bytes([b])] for b in "🌽".encode()]
    asks: dict[str, Any] = {"messages": HI, "max_tokens": count}
    if stream:
        chunks = await events(client, CHAT, **asks, stream_options={"include_usage": True})
        text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
        usage = chunks[-1]["usage"]
    else:
        answer = await post(client, CHAT, **asks)
        text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    assert text == "�"
    assert usage["completion_tokens"] == count


async def test_a_token_beyond_the_alternatives_is_still_told(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.unlikely = True
    answer = await post(client, CHAT, messages=HI, logprobs=True, top_logprobs=2, max_tokens=1)
    (token,) = answer["choices"][0]["logprobs"]["content"]
    assert token["logprob"] == -100.5
    assert [top["logprob"] for top in token["top_logprobs"]] == [-1.5, -2.5]
    answer = await post(client, TEXT, prompt="a", logprobs=2, max_tokens=1)
    assert sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()) == [-100.5, -2.5, -1.5]


async def test_infinite_logprobs_are_floored(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.logprob = -math.inf
    answer = await post(client, CHAT, messages=HI, logprobs=True, top_logprobs=3)
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    answer = await post(client, TEXT, prompt="a", logprobs=3, echo=True)
    assert answer["choices"][0]["logprobs"]["token_logprobs"][1] == -9999.0


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_never_show(client: httpx.AsyncClient, stream: bool) -> None:
    asks: dict[str, Any] = {"messages": HI, "stop": ["is he", "nowhere"]}
    if stream:
        chunks = await events(client, CHAT, **asks)
        text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
        last = chunks[-1]["choices"][0]
    else:
        last = (await post(client, CHAT, **asks))["choices"][0]
        text = last["message"]["content"]
    assert text == "the answer "
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "is he")


async def test_extras_of_vllm(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(
        client, CHAT, messages=HI, return_token_ids=True, return_tokens_as_token_ids=True, logprobs=True,
        prompt_logprobs=1, top_k=5, min_p=0.1, priority=3, cache_salt="s", ignore_eos=True, max_tokens=2,
    )  # fmt: skip
    assert answer["choices"][0]["token_ids"] == engine.says[:2]
    assert answer["prompt_token_ids"] == engine.seen[0].prompt
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{engine.says[0]}"
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(engine.seen[0].prompt)
    add = engine.seen[0]
    assert (add.params.top_k, add.params.min_p, add.terms.priority, add.terms.cache_salt) == (5, 0.1, 3, "s")


async def test_fields_that_change_nothing_are_taken(client: httpx.AsyncClient) -> None:
    neutral: dict[str, Any] = {
        "store": False, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "parallel_tool_calls": True,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "safety_identifier": "x",
        "prompt_cache_key": "k", "modalities": ["text"], "length_penalty": 1.0, "unheard_of": None,
        "stream_options": None, "stop": None, "seed": None, "logit_bias": None, "reasoning_effort": None,
    }  # fmt: skip
    answer = await post(client, CHAT, messages=HI, **neutral)
    assert answer["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_completion_tokens": None}, {"max_tokens": 10**18}])
async def test_no_limit_or_a_huge_one_is_the_context(
    client: httpx.AsyncClient, engine: FakeEngine, limit: dict[str, Any]
) -> None:
    await post(client, CHAT, messages=HI, **limit)
    assert engine.seen[0].params.max_tokens in (None, 10**18)


async def test_the_newer_name_of_the_limit_wins(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await post(client, CHAT, messages=HI, max_tokens=5, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_the_context_may_be_filled_but_for_one_token(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    most = engine.info.max_model_len
    ids = [10] * most
    await post(client, TEXT, prompt=ids[1:], max_tokens=5)
    answer = await post(client, TEXT, prompt=ids, max_tokens=0, echo=True)
    assert answer["usage"]["prompt_tokens"] == most
    for prompt, limit in ((ids, 1), (ids, None), ([*ids, 10], 0)):
        response = await client.post(TEXT, json={"prompt": prompt, "max_tokens": limit, "echo": True})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]
        assert str(len(prompt)) in error["message"]


async def test_request_ids_come_back(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    sent = {"x-request-id": "mine-1"}
    for _ in range(2):
        response = await client.post(CHAT, json={"messages": HI}, headers=sent)
        assert response.headers["x-request-id"] == "mine-1"
        assert response.json()["id"] == "chatcmpl-mine-1"
    assert len({add.request_id for add in engine.seen}) == 2
    forged = await client.get("/health", headers={"x-request-id": "a b\tERROR"})
    assert len(forged.headers["x-request-id"]) == 32


async def test_small_routes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert set((await client.get("/version")).json()) == {"version"}
    models = (await client.get("/v1/models")).json()
    assert [m["id"] for m in models["data"]] == ["tiny", "other"]
    assert models["data"][0]["max_model_len"] == 64
    assert (await client.get("/v1/models/other")).json()["id"] == "other"
    assert (await client.get("/v1/models/none/such")).json()["error"]["code"] == "model_not_found"
    assert len((await client.get("/trace?last=2")).json()["steps"]) == 2
    assert (await client.get("/trace?last=-1")).status_code == 400


async def test_metrics_have_vllms_names(client: httpx.AsyncClient) -> None:
    await post(client, CHAT, messages=HI)
    response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    names = {line.split("{")[0] for line in response.text.splitlines() if not line.startswith("#")}
    assert {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_sum", "vllm:request_queue_time_seconds_count",
        "vllm:request_prompt_tokens_count", "vllm:request_generation_tokens_count", "vllm:cache_config_info",
    } <= names  # fmt: skip
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0' in response.text
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0' in response.text
