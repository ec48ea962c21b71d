"""The documentation says what the server does: the document is whole, and agrees with what is accepted."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from headrace.serve.api.service import AppSettings
from headrace.serve.app import App

pytest_plugins = ["serve_fixtures"]


@pytest.fixture
async def document(client: httpx.AsyncClient) -> dict[str, Any]:
    response = await client.get("/openapi.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def references(value: Any) -> set[str]:
    """Every $ref in there."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_the_document_has_every_route_and_no_loose_end(document: dict[str, Any], app: App) -> None:
    assert document["openapi"].startswith("3.1.")
    documented = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert documented == {(method, path.replace(":path", "")) for method, path, _, _ in app.table}
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in schemas)
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert {"200", "401", "429", "500", "503"} <= operation["responses"].keys()


async def test_every_field_is_explained(document: dict[str, Any]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["additionalProperties"] is False
        assert all(len(field["description"]) > 10 for field in schema["properties"].values())


async def test_what_is_needed_is_told_first_and_what_is_not_supported_last(document: dict[str, Any]) -> None:
    for path, first in (("/v1/chat/completions", "messages"), ("/v1/messages", "max_tokens"), ("/tokenize", None)):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        told = list(schema["properties"])
        assert set(told[: len(schema["required"])]) == set(schema["required"])
        assert first is None or first in schema["required"]
        refused = [field["description"].startswith("Not supported") for field in schema["properties"].values()]
        assert refused == sorted(refused)


async def test_the_page_shows_all_and_loads_nothing(client: httpx.AsyncClient, document: dict[str, Any]) -> None:
    response = await client.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    for path in document["paths"]:
        assert f"POST {path}</h2>" in response.text or f"GET {path}</h2>" in response.text
    assert "min_p" in response.text and "fraction as likely" in response.text
    assert not re.search(r"src=|<link|<script|https?://|@import|url\(", response.text)
    style = re.search(r"<style>(.*?)</style>", response.text, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in response.headers["content-security-policy"]
    assert "default-src 'none'" in response.headers["content-security-policy"]


async def test_the_documentation_can_be_turned_off(engine: FakeEngine) -> None:
    app = App(engine, AppSettings(docs=False))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test") as client:
        assert [(await client.get(path)).status_code for path in ("/docs", "/openapi.json", "/health")] == [
            404,
            404,
            200,
        ]
        assert "/docs" not in (await client.get("/")).text


def validator(document: dict[str, Any], reference: str) -> Draft202012Validator:
    registry = Registry().with_resource("urn:api", Resource.from_contents(document, DRAFT202012))
    return Draft202012Validator({"$ref": f"urn:api{reference}"}, registry=registry)


EVERYTHING: dict[str, Any] = {"n": 2, "return_token_ids": True, "return_prompt_text": True, "timings": True}
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("POST", "/v1/chat/completions",
     {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1,
      **EVERYTHING}),
    ("POST", "/v1/completions", {"prompt": ["a", "b"]}),
    ("POST", "/v1/completions", {"prompt": "a b", "logprobs": 2, "echo": True, "prompt_logprobs": 1, **EVERYTHING}),
    ("POST", "/v1/completions", {"prompt": 5}),
    ("POST", "/v1/chat/completions", {"model": "x", "messages": []}),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True, "with_pieces": True}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", "/v1/models", {}),
    ("GET", "/health", {}),
    ("GET", "/version", {}),
    ("GET", "/load", {}),
    ("GET", "/trace", {}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body"), ASKED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_as_documented(
    client: httpx.AsyncClient, document: dict[str, Any], method: str, path: str, body: dict[str, Any], stream: bool
) -> None:
    if stream and not path.startswith("/v1/c"):
        return
    sent = {name: value for name, value in body.items() if not stream or name != "prompt_logprobs"}
    sent |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await client.request(method, path, **({"json": sent} if method == "POST" else {}))
    operation = document["paths"][path][method.lower()]
    media = response.headers["content-type"].partition(";")[0]
    told = operation["responses"][str(response.status_code)]["content"][media]
    reference = told.get("x-events", told["schema"])["$ref"]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line and line != "data: [DONE]"]
    for text in events if media == "text/event-stream" else [response.text]:
        validator(document, reference).validate(json.loads(text))


async def test_bodies_that_need_more_are_documented_so(document: dict[str, Any]) -> None:
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    base = {"messages": [{"role": "user", "content": "hi"}]}
    legal: list[dict[str, Any]] = [
        {}, {"top_logprobs": None}, {"logprobs": True, "top_logprobs": 2}, {"stream": True, "stream_options": {}},
        {"truncate_prompt_tokens": 5, "truncation_side": "left"}, {"seed": None},
    ]  # fmt: skip
    illegal: list[dict[str, Any]] = [
        {"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2}, {"stream_options": {}},
        {"truncation_side": "left"}, {"messages": None},
        {"messages": []}, {"messages": [{"content": "hi"}]}, {"unknown": 1}, {"n": 0},
    ]  # fmt: skip
    check = Draft202012Validator(schema)
    assert [check.is_valid(base | fields) for fields in legal] == [True] * len(legal)
    assert [check.is_valid(base | fields) for fields in illegal] == [False] * len(illegal)
