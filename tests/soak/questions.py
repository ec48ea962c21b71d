"""What a soak asks: good requests, whose answers are learnt from a server that does nothing else, and bad ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SHARED = "Everybody who asks begins with these same words, page after page, and goes on elsewhere. " * 2
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["one", "two", "three"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@dataclass
class Question:
    """A request that has one right answer. answer: text, reason and log-probabilities of each choice."""

    path: str
    body: dict[str, Any]
    answer: list[Choice] = field(default_factory=list)


Choice = tuple[str, str, Any]


def good(rng: random.Random, count: int) -> list[Question]:
    """Of all kinds: every field that changes an answer in another way is there a few times."""
    extras: tuple[dict[str, Any], ...] = (
        {}, {"temperature": 0}, {"temperature": 1.3, "top_p": 0.9}, {"n": 3}, {"n": 2, "stop": ["e", "zz"]},
        {"min_tokens": 5, "stop_token_ids": [70, 71]}, {"frequency_penalty": 0.7, "repetition_penalty": 1.1},
        {"top_k": 20, "min_p": 0.01, "presence_penalty": 0.5}, {"logit_bias": {"40": 5, "41": -100}},
        {"structured_outputs": {"regex": "[a-f]{3,40}x"}}, {"structured_outputs": {"choice": ["left", "right"]}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    )  # fmt: skip
    questions = []
    for number in range(count):
        extra = extras[number % len(extras)]
        prompt = " ".join(f"word{rng.randrange(1000)}" for _ in range(rng.choice((1, 4, 4, 20, 40))))
        if number % 3 == 0:
            prompt = SHARED + prompt
        body = {
            "seed": number,
            "max_tokens": rng.choice((6, 8, 30, 60) if "min_tokens" in extra else (1, 8, 30, 60)),
            **extra,
        }
        if "structured_outputs" not in extra and "response_format" not in extra:
            body["ignore_eos"] = rng.random() < 0.7
        logprobs = rng.random() < 0.3
        if number % 2:
            told: dict[str, Any] = {"prompt": prompt, **({"logprobs": 2} if logprobs else {})}
            questions.append(Question(COMPLETIONS, {**told, **body}))
        else:
            told = {"messages": [{"role": "user", "content": prompt}]}
            told |= {"logprobs": True, "top_logprobs": 2} if logprobs else {}
            questions.append(Question(CHAT, {**told, **body}))
    for number in range(count // 10):
        said, most = f"question {number}", rng.choice((5, 30))
        questions.append(Question(RESPONSES, {"input": said, "max_output_tokens": most, "temperature": 0}))
        messages = [{"role": "user", "content": said}]
        body = {"model": "tiny", "messages": messages, "max_tokens": most, "temperature": 0}
        questions.append(Question(MESSAGES, body))
    return questions


def long_one(rng: random.Random) -> dict[str, Any]:
    """A request that only ends when it is given up: its answer is of no interest."""
    return {"prompt": f"{rng.random()} " * rng.choice((1, 12)), "max_tokens": 400, "ignore_eos": True}


BAD: tuple[tuple[bytes, frozenset[int]], ...] = tuple(
    (body if isinstance(body, bytes) else json.dumps(body).encode(), frozenset(statuses))
    for body, statuses in (
        (b"", {400}), (b"{", {400}), (b"[]", {400}), (b"null", {400}), (b"\xff\xfe", {400}), (b'{"a":NaN}', {400}),
        (b"[" * 5000, {400}), ({"prompt": None}, {400}), ({"prompt": [-1]}, {400}), ({"prompt": [[1.5]]}, {400}),
        ({"prompt": "x", "n": 10**18}, {400}), ({"prompt": "x", "n": 0, "stream": True}, {400}),
        ({"prompt": "x", "temperature": "hot"}, {400}), ({"prompt": "x", "stop_token_ids": [10**7]}, {400}),
        ({"prompt": "x", "logit_bias": {"999999": 1}}, {400}), ({"prompt": "x", "repetition_penalty": 0}, {400}),
        ({"prompt": "x" * 40_000}, {400}), ({"prompt": "x", "model": "\n ERROR"}, {404}),
        ({"prompt": "x", "structured_outputs": {"regex": "("}}, {400}),
        ({"prompt": "x", "structured_outputs": {"json": {"type": "strng"}}}, {400}),
        ({"prompt": "x", "structured_outputs": {"grammar": "no grammar"}}, {400}),
        ({"prompt": "x", "stop": [""]}, {400}), ({"prompt": "x", "nonsense": 1}, {400}),
    )
)  # fmt: skip


def whole(answer: dict[str, Any]) -> list[Choice]:
    """The choices of an answer that came whole."""
    if "output" in answer:
        parts = [part["text"] for item in answer["output"] for part in item["content"]]
        return [("".join(parts), answer["status"], None)]
    if "stop_reason" in answer:
        return [("".join(part["text"] for part in answer["content"]), answer["stop_reason"], None)]
    return [
        (choice["text"] if "text" in choice else choice["message"]["content"] or "", choice["finish_reason"],
         _logprobs(choice.get("logprobs")))
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
    ]  # fmt: skip


def joined(events: Iterable[dict[str, Any]]) -> list[Choice]:
    """The choices of an answer that came as a stream, without the ``[DONE]``."""
    events = list(events)
    if "type" in events[-1]:
        return _joined_types(events)
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[index] = texts.get(index, "") + said
            logprobs.setdefault(index, []).extend(_logprobs(choice.get("logprobs")))
            if choice["finish_reason"]:
                assert index not in reasons, "two ends of one choice"
                reasons[index] = choice["finish_reason"]
    return [(texts[index], reasons[index], logprobs[index]) for index in sorted(texts)]


def _joined_types(events: list[dict[str, Any]]) -> list[Choice]:
    """The same of APIs whose events have types."""
    text, reason = "", ""
    for event in events:
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif event["type"] == "content_block_delta":
            text += event["delta"]["text"]
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
        elif event["type"] in LAST:
            reason = reason or event["response"]["status"]
    return [(text, reason, None)]


LAST = frozenset({"message_stop", "response.completed", "response.incomplete"})


def _logprobs(told: Any) -> list[Any]:
    if told is None:
        return []
    if "content" in told:
        return [(token["token"], token["logprob"]) for token in told["content"]]
    return list(zip(told["tokens"], told["token_logprobs"], strict=True))
