"""/v1/messages: Anthropic's shapes, whole and streamed, from a scripted engine."""

from __future__ import annotations

import httpx

pytest_plugins = ["serve_fixtures"]


async def test_errors_have_the_shape_of_the_paths_api(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/messages/none", headers={"x-request-id": "mine"})
    assert response.status_code == 404
    error = response.json()
    assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "not_found_error", "mine")
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    response = await client.get("/v1/messagesnone")
    assert response.json()["error"]["code"] == "unknown_url"
    assert "request-id" not in response.headers
