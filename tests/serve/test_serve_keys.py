"""Keys, cross-origin answers, and the door while the model is being loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from headrace.base.errors import SettingError
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.serve.net.callers import caller_of
from headrace.serve.net.front import Cors, Gate, front
from headrace.serve.net.keys import Key, KeyRing, key_ring
from headrace.serve.settings import ServeSettings

pytest_plugins = ["serve_fixtures"]

BODY = {"prompt": "x", "max_tokens": 3, "temperature": 0}
KEYS = KeyRing([Key.of("sk-anna", "anna", 2), Key.of("sk-anna-new", "anna", 2), Key.of("sk-nobody")])
PAGE = Cors(origins=("https://page.example",))


def asking(app: Any, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=headers)


@pytest.fixture
async def keyed(app: App) -> AsyncIterator[httpx.AsyncClient]:
    async with asking(front(app.routes, KEYS, PAGE)) as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sk-anna"},
        {"Authorization": "bearer  sk-anna-new"},
        {"x-api-key": "sk-nobody"},
        {"Authorization": "Bearer none", "x-api-key": "sk-anna"},
    ],
)
async def test_a_key_opens(keyed: httpx.AsyncClient, headers: dict[str, str]) -> None:
    answer = await keyed.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer sk-ann"},
        {"Authorization": "Bearer sk-anna2"},
        {"Authorization": "Bearer SK-ANNA"},
        {"Authorization": "Basic sk-anna"},
        {"Authorization": "sk-anna"},
        {"Authorization": "Bearer sk-annä".encode().decode("latin-1")},
        {"x-api-key": "Bearer sk-anna"},
        {"x-api-key": "anna"},
        {"x-api-key": "x" * 10_000},
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/models", "/metrics", "/trace", "/nothing", "/health/", "//health", "/docs"]
)
async def test_anything_else_does_not(keyed: httpx.AsyncClient, path: str, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = await keyed.request("POST" if "compl" in path else "GET", path, json=BODY, headers=encoded)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert "anna" not in answer.text
    assert answer.headers["x-request-id"]
    assert (await keyed.get("/v1/models", headers={"x-api-key": "sk-anna"})).status_code == 200


async def test_health_is_open_and_metrics_when_asked(app: App, keyed: httpx.AsyncClient) -> None:
    for path in ("/health", "/v1/health", "/ready", "/live", "/ping", "/version"):
        assert (await keyed.get(path)).status_code == 200, path
    async with asking(front(app.routes, KEYS, Cors(), metrics_open=True)) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


async def test_without_keys_all_is_open(app: App) -> None:
    async with asking(front(app.routes, KeyRing([]), Cors())) as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_key_is_a_caller(app: App, keyed: httpx.AsyncClient, engine: FakeEngine) -> None:
    for secret in ("sk-anna", "sk-anna-new", "sk-nobody"):
        await keyed.post("/v1/completions", json=BODY, headers={"x-api-key": secret})
    terms = [add.terms for add in engine.seen]
    assert [(term.tenant, term.weight) for term in terms[:2]] == [("anna", 2.0)] * 2
    assert terms[2].tenant.startswith("key-")
    assert "nobody" not in terms[2].tenant
    assert {term.cache_salt for term in terms} == {""}


async def test_a_prefix_cache_for_each_caller(engine: FakeEngine) -> None:
    app = App(engine, AppSettings(prefix_cache_per_key=True))  # type: ignore[arg-type]
    async with asking(front(app.routes, KEYS, Cors())) as client:
        for secret in ("sk-anna", "sk-anna-new", "sk-nobody"):
            await client.post("/v1/completions", json=BODY, headers={"x-api-key": secret})
        await client.post("/v1/completions", json={**BODY, "cache_salt": "z"}, headers={"x-api-key": "sk-anna"})
    salts = [add.terms.cache_salt for add in engine.seen]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3


def test_every_key_is_compared_whatever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("headrace.serve.net.keys.hmac.compare_digest", compare)
    for given in ("sk-anna", "sk-nobody", "no", ""):
        compared.clear()
        KEYS.caller(Headers({"x-api-key": given}))
        assert compared == [(32, 32)] * 3


def test_keys_of_flags_file_and_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsk-1\nben sk-2 # his\ncleo sk-3 2.5\n")
    file.chmod(0o600)
    environment = {"HEADRACE_API_KEY": "sk-4, sk-5", "PATH": "/bin"}
    keys = key_ring([Key.of("sk-0")], str(file), environment)
    assert environment == {"PATH": "/bin"}
    callers = [keys.caller(Headers({"x-api-key": f"sk-{i}"})) for i in range(6)]
    assert all(callers)
    assert [(c.name, c.weight) for c in callers[2:4] if c] == [("ben", 1.0), ("cleo", 2.5)]
    assert len({c.name for c in callers if c}) == 6
    assert not caplog.records
    file.chmod(0o644)
    key_ring([], str(file), {})
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "a b c d",
        "name key-secret zero",
        "name key-secret -1",
        "name key-secret nan",
        "ann\\é key-secret",
        "",
        "key-secret\x01",
    ],
)
def test_what_is_no_key_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingError) as refused:
        key_ring([], str(file), {})
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(Key.of("key-secret"))


def test_keys_that_contradict_each_other() -> None:
    with pytest.raises(SettingError, match="weights"):
        KeyRing([Key.of("a", "x", 1), Key.of("b", "x", 2)])
    with pytest.raises(SettingError, match="another's"):
        KeyRing([Key.of("a", "x"), Key.of("a", "y")])
    with pytest.raises(SettingError, match="nmae"):
        Key.read({"nmae": "x", "key": "y"})


PREFLIGHT = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


async def test_a_page_may_ask_and_reads_every_answer(keyed: httpx.AsyncClient) -> None:
    preflight = await keyed.options("/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    key = {"Authorization": "Bearer sk-anna"}
    for headers, body, status in (
        ({}, BODY, 401),
        (key, {"prompt": 5}, 400),
        (key, {**BODY, "stream": True}, 200),
        (key, BODY, 200),
    ):
        answer = await keyed.post("/v1/completions", json=body, headers={**headers, "Origin": "https://page.example"})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    unknown = await keyed.get("/nothing", headers={**key, "Origin": "https://page.example"})
    assert unknown.status_code == 404
    assert unknown.headers["access-control-allow-origin"] == "https://page.example"


async def test_another_page_may_not(keyed: httpx.AsyncClient) -> None:
    other = {"Origin": "https://page.example.evil"}
    assert (
        "access-control-allow-origin"
        not in (await keyed.options("/v1/completions", headers={**PREFLIGHT, **other})).headers
    )
    answer = await keyed.post("/v1/completions", json=BODY, headers={"x-api-key": "sk-anna", **other})
    assert "access-control-allow-origin" not in answer.headers


async def test_cross_origin_is_off_unless_asked_and_never_open_with_cookies(app: App) -> None:
    async with asking(front(app.routes, KEYS, Cors())) as client:
        assert (await client.options("/v1/completions", headers=PREFLIGHT)).status_code == 401
        answer = await client.get("/health", headers={"Origin": "https://page.example"})
        assert "access-control-allow-origin" not in answer.headers
    with pytest.raises(SettingError, match="name the origins"):
        ServeSettings(allowed_origins=("*",), allow_credentials=True)
    async with asking(front(app.routes, KEYS, Cors(origins=("*",)))) as client:
        answer = await client.get("/health", headers={"Origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*"


async def test_the_door_before_there_is_a_model() -> None:
    gate = Gate()

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({"caller": caller_of(Request(scope)).name})(scope, receive, send)

    async with asking(front(gate, KEYS, Cors())) as client:
        for path in ("/health", "/ready", "/ping", "/v1/health"):
            answer = await client.get(path)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "loading"
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers={"x-api-key": "sk-anna"})).status_code == 503
        gate.open(routes)
        assert (await client.get("/v1/models", headers={"x-api-key": "sk-anna"})).json() == {"caller": "anna"}
