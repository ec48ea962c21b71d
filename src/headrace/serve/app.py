"""The routes of one served model.

Owes: each request answered by its endpoint, or refused in the shape that its API's clients read. Does not know:
processes, signals, sockets.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace.base.errors import EngineError, RequestError, UnknownModel
from headrace.serve.chat import Chat
from headrace.serve.completions import Completions
from headrace.serve.desk import ClientGone
from headrace.serve.errors import shown
from headrace.serve.http import LIVE, RequestIds, error_response, json_response, reported
from headrace.serve.metrics import CONTENT_TYPE
from headrace.serve.service import AppSettings, Service
from headrace.serve.shapes import ModelCard, ModelList
from headrace.serve.version import version

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient

MAX_TRACE = 100_000
Endpoint = Callable[[Request], Awaitable[Response]]


class App:
    """One served model. Must be made on the event loop that serves; `asgi` answers.

    routes: the same without request ids, for `serve.front` to stand before them.
    """

    def __init__(self, engine: EngineClient, settings: AppSettings | None = None) -> None:
        self.service = Service(engine, settings or AppSettings())
        self.names, self.limits = self.service.names, self.service.limits
        self.desk, self.metrics = self.service.desk, self.service.metrics
        self._created = int(time.time())
        self.routes: ASGIApp = self._fastapi()
        self.asgi = RequestIds(self.routes)

    def _fastapi(self) -> FastAPI:
        routes: list[BaseRoute] = [
            Route(path, _guarded(handler), methods=[method]) for method, path, handler in self._table()
        ]
        handlers: Any = {HTTPException: _refuse}
        return FastAPI(
            routes=routes,
            exception_handlers=handlers,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )

    def _table(self) -> Sequence[tuple[str, str, Endpoint]]:
        return (
            ("POST", "/v1/chat/completions", Chat(self.service).create),
            ("POST", "/v1/completions", Completions(self.service).create),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{id:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/v1/health", self.health),
            ("GET", "/ready", self.health),
            ("GET", "/ping", self.health),
            ("POST", "/ping", self.health),
            ("GET", "/live", self.live),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.show_metrics),
            ("GET", "/trace", self.trace),
        )

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return json_response(msgspec.json.encode(ModelList(data=[self._card(name) for name in self.names])))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        name = request.path_params["id"]
        if name not in self.names:
            raise UnknownModel(f"The model `{shown(name)}` does not exist. Valid aliases: {', '.join(self.names)}.")
        return json_response(msgspec.json.encode(self._card(name)))

    def _card(self, name: str) -> ModelCard:
        info = self.service.engine.info
        return ModelCard(id=name, created=self._created, root=info.name, max_model_len=info.max_model_len)

    async def health(self, request: Request) -> Response:
        """GET /health, /ready, /ping: 503 when the engine is dead or the server is on its way out."""
        if not self.service.engine.alive:
            raise EngineError("The engine process has died.")
        if self.desk.closing:
            raise HTTPException(503, "The server is shutting down.", {"retry-after": "1"})
        return json_response(LIVE)

    async def live(self, request: Request) -> Response:
        """GET /live: that there is a process, whatever state it is in."""
        return json_response(LIVE)

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return json_response(msgspec.json.encode({"version": version()}))

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def trace(self, request: Request) -> Response:
        """GET /trace?last=N: what the engine's last steps did."""
        last = request.query_params.get("last", "100")
        if not (last.isascii() and last.isdigit()) or not 1 <= int(last[:9]) <= MAX_TRACE:
            raise RequestError(f"last must be from 1 to {MAX_TRACE}, got '{shown(last, 20)}'.", param="last")
        return json_response(msgspec.json.encode({"steps": await self.service.engine.trace(int(last))}))


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Exceptions become answers; a client that left gets none."""

    @functools.wraps(endpoint)
    async def run(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientGone:
            return Response(status_code=499)
        except Exception as error:
            return error_response(reported(error, request.state.request_id))

    return run


async def _refuse(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {shown(request.url.path)}"
    told = {404: f"Unknown URL: {where}.", 405: f"{where} is not allowed."}.get(error.status_code, error.detail)
    return error_response(reported(HTTPException(error.status_code, told, error.headers), request.state.request_id))
