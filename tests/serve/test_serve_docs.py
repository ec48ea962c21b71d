"""The documentation says what the server does: the document is whole, and agrees with what is accepted."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from headrace.serve.app import App
from headrace.serve.service import AppSettings

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
