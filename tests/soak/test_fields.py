"""Every documented field of every request with every kind of wrong value, against a real engine.

Each is answered or refused, never an internal error, and the next right request gets its right answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from child_server import Server, serving

pytestmark = pytest.mark.slow
HOSTILE: tuple[str, ...] = (  # as JSON, or nearly
    "null", "true", "false", "0", "-0.0", "1", "-1", "2.5", "1e400", "1e308", "5e-324", "-1e18", "1000000000000000000",
    "9223372036854775808", "NaN", "-Infinity", '""', '"x"', '"\\u0000"', '"\\ud83d"', '"\\n\\u001b[31mERROR"',
    json.dumps("y" * 100_000), "[]", "[null]", "[[]]", "[1e30]", "[-1]", '["", ""]', json.dumps(["z"] * 5000),
    "[" * 400 + "]" * 400, "{}", '{"": null}', '{"a": {"b": [1]}}', '{"-1": 1e99}', '{"type": "object"}',
    '{"type": []}', json.dumps({str(number): 1 for number in range(10_000)}), "\xff",
)  # fmt: skip
HI = [{"role": "user", "content": "hi"}]
SOUND: dict[str, dict[str, Any]] = {  # by path: a request that is right but for the field that is tried
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2, "model": "tiny"},
    "/v1/messages/count_tokens": {"messages": HI, "model": "tiny"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
GOOD = {"prompt": "abc", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    flags = ("--served-model-name", "tiny", "--max-model-len", "128", "--backend", "cpu", "--threads", "1")
    with serving(tiny, *flags) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SOUND)
def test_no_value_of_a_field_hurts(server: Server, path: str, stream: bool) -> None:
    with httpx.Client(base_url=server.url, timeout=60, headers={"content-type": "application/json"}) as client:
        schema = client.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]["content"]
        fields = schema["application/json"]["schema"]["properties"]
        if stream and "stream" not in fields:
            pytest.skip("this path has no streams")
        expected = good(client)
        for field in fields:
            for value in HOSTILE:
                tried = {**SOUND[path], **({"stream": True} if stream and field != "stream" else {})}
                tried.pop(field, None)
                body = json.dumps(tried).encode()[:-1] + f', "{field}": {value}}}'.encode("latin-1")
                response = client.post(path, content=body)
                settled(response, field, value)
            assert good(client) == expected, field
    assert "Traceback" not in server.log


def settled(response: httpx.Response, field: str, value: str) -> None:
    """Done, or refused by name."""
    told = (field, value[:80], response.status_code, response.text[:500])
    assert response.status_code in (200, 400, 404, 408, 413, 429), told
    assert len(response.content) < 2_000_000, told
    if response.status_code == 200:  # an event of a stream may still say that its time is over
        broken = "server_error" in response.text or "api_error" in response.text
        assert not broken or "time was over" in response.text, told
    elif response.status_code == 400:
        error = response.json()["error"]
        assert error["message"], told
        assert "param" not in error or error["param"] or error["code"] == "invalid_json", told


def good(client: httpx.Client) -> Any:
    return client.post("/v1/completions", json=GOOD).json()["choices"][0]["text"]
