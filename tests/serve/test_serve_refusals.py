"""What bad requests get: 4xx in OpenAI's shape, naming the field; and after each, a good one gets its usual answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.errors import SettingError
from headrace.base.log import shown
from headrace.serve.api.fields import CHAT as CHAT_FIELDS
from headrace.serve.api.fields import COMPLETION
from headrace.serve.app import App
from headrace.serve.settings import ServeSettings

pytest_plugins = ["serve_fixtures"]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


async def good(client: httpx.AsyncClient) -> None:
    """An ordinary request works, and nothing is left running."""
    response = await client.post(CHAT, json={"messages": HI})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "the answer is here"


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


NUMBERS = ["0.7", True, [1], {}, "NaN"]
# field, values that it must refuse in a chat request
BAD_SCHEMAS: list[Any] = [
    "", [], False, {"type": "strng"}, {"abc": "def"}, {"type": "string", "pattern": "["}, {"$ref": "#/nope"},
    {"enum": []}, {"minLength": 5, "maxLength": 2}, {"properties": {"a": {"not": {}}}}, {"uniqueItems": True},
]  # fmt: skip
BAD_PATTERNS = ["(", "a{3,1}", "(?<=a)b", "", "a\0"]

CHAT_REFUSALS: list[tuple[str, list[Any]]] = [
    *((name, NUMBERS) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")),
    *((name, [*NUMBERS, 1.5]) for name in ("n", "top_k", "min_tokens", "max_tokens", "max_completion_tokens")),
    ("temperature", [-0.1, 2.0001, 1e308]),
    ("top_p", [0, -1, 1.0000001]),
    ("top_k", [-2, 10**18]),
    ("min_p", [-0.1, 1.5]),
    ("presence_penalty", [-3, 3]),
    ("repetition_penalty", [0, -1, 1e-45, 1e308]),
    ("n", [0, -1, 10**6, 10**18]),
    ("max_tokens", [0, -1, 2**64]),
    ("max_completion_tokens", [0, -5]),
    ("seed", ["1", 1.5, 10**40]),
    ("stop", [5, [5], [""], "", ["a"] * 20000, ["a" * 5000], {"a": 1}]),
    ("stop_token_ids", [[10**7], [-1], [2**63], ["5"], [True], 5]),
    ("allowed_token_ids", [[], [10**7], ["a"]]),
    ("bad_words", [[""], [1], "word"]),
    ("logit_bias", [{"10000000": -100}, {"-1": 5}, {"abc": 1}, {"5": "x"}, {"5": 1000}, {" 5": 1}, [1], {"5": None}]),
    ("logit_bias", [{str(i): 1 for i in range(10_000)}]),
    ("logprobs", [1, "true", 0]),
    ("top_logprobs", [2, 0]),
    ("prompt_logprobs", [-2, 21, True]),
    ("stream", ["true", 1, 0]),
    ("stream_options", [{}, {"include_usage": True}, True]),
    ("messages", [None, [], "hi", {"role": "user"}, 5]),
    ("model", [5, [], {}, True]),
    ("skip_special_tokens", ["yes", 1]),
    ("continue_final_message", ["yes", 1]),
    ("chat_template_kwargs", [[], "a", {f"a{i}": 1 for i in range(200)}, {"a" * 200: 1}, {"": 1}]),
    ("priority", ["1", 2**40, True]),
    ("cache_salt", [1, "a" * 1000]),
    ("user", [5, {}]),
    ("metadata", ["a", []]),
    ("tools", [[{"type": "function", "function": {"name": "f"}}], {}]),
    ("tool_choice", ["required", {"type": "function"}]),
    ("response_format", [{"type": "json_schema"}, {"type": "grammar"}, "json", {}, {"type": "text", "x": 1}]),
    ("response_format", [{"type": "json_schema", "json_schema": {"name": "a", "schema": s}} for s in BAD_SCHEMAS]),
    ("store", [True]),
    ("service_tier", ["flex"]),
    ("modalities", [["audio"]]),
    ("use_beam_search", [True]),
    ("reasoning_effort", ["high"]),
    ("guided_json", [*BAD_SCHEMAS, '{"type": "object"']),
    ("guided_regex", [*BAD_PATTERNS, 5, False]),
    ("guided_choice", [[], [""], "a", [1], False, {}]),
    ("guided_grammar", ["start: nothing", 'start: "a"{2,1}', "root ::= x", "", 1]),
    ("guided_decoding_backend", ["outlines"]),
    ("structured_outputs", [{}, {"json": None}, {"json": {}, "regex": "a"}, {"json_object": False}, {"xml": "a"}, "a"]),
    ("structured_outputs", [{"json": s} for s in BAD_SCHEMAS] + [{"regex": p} for p in BAD_PATTERNS]),
    ("structured_outputs", [{"choice": []}, {"choice": None}, {"grammar": "start: <|nope|>"}]),
    ("chat_template", ["{{ x }}"]),
    ("temprature", [1]),
    ("\nERROR forged", [1]),
    ("best_of", [0, 2, 10**18, "1"]),
    ("stream_interval", [0, -1, "2", 10**18]),
    ("truncate_prompt_tokens", [0, -2, 1.5, "1", 2**40]),
    ("truncation_side", ["left", "middle"]),
    ("request_id", ["", "a b", "x" * 129, "\nERROR", 5]),
    ("documents", [[{"text": "a"}], "a", [1]]),
    ("kv_transfer_params", [{}, {"a": 1}]),
    (
        "repetition_detection",
        [
            {},
            {"max_pattern_size": 3},
            {"max_pattern_size": 3, "min_count": 1},
            5,
            [],
            {"max_pattern_size": 3, "min_count": 2, "min_pattern_size": 4},
            {"max_pattern_size": 10**9, "min_count": 2},
            {"max_pattern_size": 0, "min_count": 2},
        ],
    ),
    ("mm_processor_kwargs", [{"a": 1}]),
    ("prediction", [{"type": "content", "content": "x"}]),
    ("audio", [{"voice": "a", "format": "wav"}]),
    ("web_search_options", [{}]),
]


@pytest.mark.parametrize(("field", "values"), CHAT_REFUSALS, ids=lambda v: str(v)[:20] if isinstance(v, str) else "")
async def test_a_chat_field_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, values: list[Any]
) -> None:
    for value in values:
        response = await client.post(CHAT, json={"messages": HI, field: value})
        error = error_of(response)
        assert error["param"].split(".")[0].split("[")[0] == shown(field), (value, error)
        assert len(error["message"]) < 1000
    assert engine.seen == []
    await good(client)


PROMPTS: list[Any] = [
    None, [], [[]], [[], [1]], [-1], [320], [4294967295], [1.5], [True], ["a", 1], [1, "a"], [[1], "a", 2], [["a"]],
    5, {}, "", [""], ["a"] * 100_000, [2**64],
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda v: str(v)[:30])
async def test_a_prompt_is_refused_by_name(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any) -> None:
    response = await client.post(TEXT, json={"prompt": prompt})
    status = 413 if len(response.request.content) > 100_000 else 400
    error = error_of(response, status)
    assert status == 413 or error["param"].split("[")[0] == "prompt"
    assert engine.seen == []
    await good(client)


@pytest.mark.parametrize(
    ("field", "value"),
    [("logprobs", True), ("logprobs", 21), ("logprobs", -1), ("max_tokens", -1), ("suffix", "x"), ("best_of", 2),
     ("echo", "yes"), ("messages", HI), ("top_logprobs", 1), ("max_completion_tokens", 4), ("n", 129)],
)  # fmt: skip
async def test_a_completion_field_is_refused_by_name(client: httpx.AsyncClient, field: str, value: Any) -> None:
    error = error_of(await client.post(TEXT, json={"prompt": "a", field: value}))
    assert error["param"] == field
    await good(client)


MESSAGES: list[tuple[Any, str]] = [
    ([None], "messages[0]"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [None]}], "messages[0].content[0]"),
    ([*HI, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[1].content[0]"),
]


@pytest.mark.parametrize(("messages", "path"), MESSAGES, ids=[path for _, path in MESSAGES])
async def test_a_message_is_refused_by_path(client: httpx.AsyncClient, messages: Any, path: str) -> None:
    error = error_of(await client.post(CHAT, json={"messages": messages}))
    assert error["param"].startswith(path)
    await good(client)


async def test_parts_of_text_are_all_read_in_order(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    for content in ("A\nB", parts):
        await client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
    assert engine.seen[0].prompt == engine.seen[1].prompt


BODIES: list[tuple[bytes, dict[str, str], int]] = [
    (b"", JSON, 400),
    (b"[]", JSON, 400),
    (b"null", JSON, 400),
    (b'"hi"', JSON, 400),
    (b"{", JSON, 400),
    (b'{"messages": "hi"}', JSON, 400),
    (b"\xff\xfe", JSON, 400),
    (b'{"model": "\xc0\x80"}', JSON, 400),
    (b'{"messages": [{"role": "user", "content": "\xc4\xe3"}]}', JSON, 400),
    ("{}".encode("utf-16"), JSON, 400),
    (b"\xef\xbb\xbf{}", JSON, 400),
    (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', JSON, 400),
    (b'{"model": "\\ud83d"}', JSON, 400),
    (b'{"stop": "\\ude00", "messages": []}', JSON, 400),
    (b'{"temperature": NaN}', JSON, 400),
    (b'{"temperature": 1e400}', JSON, 400),
    (b"[" * 50_000, JSON, 400),
    (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, JSON, 400),
    (b"1" * 5000, JSON, 400),
    (b"{}", {"content-type": "text/plain"}, 415),
    (b"{}", {}, 415),
    (b"{}", {**JSON, "content-encoding": "gzip"}, 415),
    (b'"' + b"a" * 100_001 + b'"', JSON, 413),
]


@pytest.mark.parametrize(("body", "headers", "status"), BODIES, ids=lambda v: repr(v)[:24])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_broken_body_is_refused(
    client: httpx.AsyncClient, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    error_of(await client.post(path, content=body, headers=headers), status)
    await good(client)


async def test_a_body_without_length_is_limited_as_well(client: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        for _ in range(10_000):
            yield b" " * 1000

    error_of(await client.post(CHAT, content=endless(), headers=JSON), 413)
    await good(client)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("POST", "/v1/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405),
     ("POST", "/health", 405), ("GET", "/v1/%0aERROR", 404)],
)  # fmt: skip
async def test_unknown_routes_and_methods(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    error = error_of(await client.request(method, path), status)
    assert "\n" not in error["message"]
    assert ("/docs" in error["message"]) == (status == 404)


@pytest.mark.parametrize("name", ["gpt-4", "x" * 90_000, "a\nERROR", "\x1b[2J"])
async def test_an_unknown_model_is_404(client: httpx.AsyncClient, name: str) -> None:
    error = error_of(await client.post(CHAT, json={"model": name, "messages": HI}), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "does not exist. Valid aliases: tiny, other." in error["message"]
    assert len(error["message"]) < 400
    assert error["message"].isprintable()
    await good(client)


@pytest.mark.parametrize("text", ["a " * 40_000, "a" * 90_000, "🌽" * 20_000])
async def test_a_prompt_far_too_long_is_not_tokenized(
    client: httpx.AsyncClient, engine: FakeEngine, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.tokenizer), "encode", None)
    monkeypatch.setattr(type(engine.tokenizer), "encode_chat", None)
    for path, body in ((TEXT, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        error = error_of(await client.post(path, json=body))
        assert error["code"] == "context_length_exceeded"
        assert "at least" in error["message"]


async def test_messages_of_too_many_values_are_refused(client: httpx.AsyncClient) -> None:
    call = {"function": {"name": "f", "arguments": {"a": [1] * 2000}}}
    error = error_of(await client.post(CHAT, json={"messages": [{"role": "assistant", "tool_calls": [call]}]}))
    assert error["message"] == "messages hold more than 1024 JSON values."
    await good(client)


@pytest.mark.parametrize(
    "given",
    [{"served_model_name": ("a", "")}, {"served_model_name": ("a\nb",)}, {"max_body_bytes": 0}, {"max_connections": 0}],
)
def test_settings_that_serve_nobody(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as error:
        ServeSettings(**given)
    assert error.value.param == next(iter(given))


async def test_variables_of_the_template_count_too(client: httpx.AsyncClient) -> None:
    for values in ([1] * 2000, ["a" * 200] * 400):
        error = error_of(await client.post(CHAT, json={"messages": HI, "chat_template_kwargs": {"a": values}}))
        assert error["param"] == "messages"
    await good(client)


async def test_a_bias_too_large_is_refused_by_its_size(client: httpx.AsyncClient) -> None:
    bias = {f"x{i}": 1 for i in range(5000)}
    error = error_of(await client.post(CHAT, json={"messages": HI, "logit_bias": bias}))
    assert "at most 4096" in error["message"]
    await good(client)


async def test_more_messages_than_the_context_holds_are_refused(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(CHAT, json={"messages": HI * 1000}))
    assert error["code"] == "context_length_exceeded"
    await good(client)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
EVERY_FIELD = {
    CHAT: sorted(CHAT_FIELDS),
    TEXT: sorted(COMPLETION),
}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), path=st.sampled_from([CHAT, TEXT]))
async def test_any_value_of_any_field_is_answered_or_refused(
    client: httpx.AsyncClient, data: st.DataObject, path: str
) -> None:
    chosen = data.draw(st.dictionaries(st.sampled_from(EVERY_FIELD[path]), VALUES, min_size=1, max_size=3))
    base: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "a"}
    body = json.dumps({**base, **chosen}).encode()
    response = await client.post(path, content=body, headers=JSON)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        param = error_of(response, response.status_code)["param"]
        assert param is None or param.split(".")[0].split("[")[0] in {*chosen, "messages", "prompt"}
    elif not chosen.get("stream"):
        assert response.json()["choices"]


async def test_nothing_a_client_sends_reaches_the_log_raw(
    client: httpx.AsyncClient, engine: FakeEngine, app: App, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "my secret prompt\nERROR forged"

    def break_down(*_: object) -> None:
        raise RuntimeError("/some/path is broken")

    engine.trouble = break_down
    engine.submit = break_down  # type: ignore[method-assign, assignment]
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": secret}]})
    error = error_of(response, 500)
    assert "/some/path" not in error["message"]
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in caplog.text
