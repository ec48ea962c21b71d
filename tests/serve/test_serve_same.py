"""One request, asked in every way: whole or streamed, of the server or of `LLM`, its answer is one answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from child_server import serving
from headrace import LLM, SamplingParams

pytestmark = pytest.mark.slow
URL = "/v1/completions"
# The tiny model says bytes at random: letters, halves of characters and control tokens all come up.
WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
STOPS = st.lists(st.sampled_from(["e", "t", "\ufffd", "a\ufffd", " ", "he", "\n", "é", "\ufffd\ufffd"]), max_size=3)
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "seed": st.integers(0, 2**32), "temperature": st.sampled_from([0, 0.7, 1.5])},
    optional={
        "stop": STOPS,
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 292), max_size=20),
        "n": st.integers(1, 3),
        "logit_bias": st.dictionaries(st.integers(3, 292), st.integers(-20, 8), max_size=8),
        "frequency_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "top_k": st.sampled_from([1, 5, 50]),
    },
)
Choice = tuple[str, str | None, Any]  # text, why it ended, stop_reason


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), max_model_len=256, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(tiny: Path) -> Iterator[httpx.Client]:
    with (
        serving(tiny, "--max-model-len", "256", "--backend", "cpu", "--threads", "1") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def whole(client: httpx.Client, body: dict[str, Any]) -> list[Choice]:
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    return [(c["text"], c["finish_reason"], c["stop_reason"]) for c in response.json()["choices"]]


def streamed(client: httpx.Client, body: dict[str, Any]) -> list[Choice]:
    response = client.post(URL, json={**body, "stream": True})
    *events, done = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    texts = [""] * body.get("n", 1)
    ends: list[tuple[str | None, Any]] = [(None, None)] * len(texts)
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"], choice["stop_reason"]
    return [(text, *end) for text, end in zip(texts, ends, strict=True)]


def of_llm(llm: LLM, prompt: str, params: dict[str, Any]) -> list[Choice]:
    (output,) = llm.generate([prompt], SamplingParams(**params))
    if not params.get("stop"):
        for choice in output.outputs:
            ids = choice.token_ids[: -1 if choice.finish_reason == "stop" else None]
            assert choice.text == llm.get_tokenizer().decode(ids, params.get("skip_special_tokens", True))
    return [(choice.text, choice.finish_reason, choice.stop_reason) for choice in output.outputs]


@settings(max_examples=100, deadline=None)
@given(prompt=WORDS, params=PARAMS)
def test_one_answer(client: httpx.Client, llm: LLM, prompt: str, params: dict[str, Any]) -> None:
    if params["temperature"] == 0:
        params.pop("n", None)
    right = of_llm(llm, prompt, params)
    body = {**params, "prompt": prompt}
    if "logit_bias" in params:
        body["logit_bias"] = {str(id): bias for id, bias in params["logit_bias"].items()}
    assert whole(client, body) == right
    assert streamed(client, body) == right


@settings(max_examples=60, deadline=None)
@given(text=WORDS)
@example("\U0001f33d\u200d\u0301\x00\x7f\u2028\ufeff\ufffd\\\"'")
def test_any_text_comes_through(client: httpx.Client, text: str) -> None:
    """In a prompt that is echoed, and out of a model that must say it."""
    assert whole(client, {"prompt": text, "echo": True, "max_tokens": 0})[0][0] == text
    text = text.replace("\0", "0")  # refused there
    body = {"prompt": "x", "structured_outputs": {"choice": [text]}, "max_tokens": 100, "seed": 1}
    assert whole(client, body)[0][:2] == streamed(client, body)[0][:2] == (text, "stop")
