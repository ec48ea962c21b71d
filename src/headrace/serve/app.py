"""The routes of one served model.

Owes: each request answered by its endpoint, or refused in the shape that its API's clients read. Does not know:
processes, signals, sockets.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace.base.errors import EngineAway, EngineError, RequestError, UnknownModel
from headrace.base.log import shown
from headrace.base.rules import integer, text
from headrace.serve.api import chat, completions, messages, responses, tokenizing
from headrace.serve.api.chat import Chat
from headrace.serve.api.completions import Completions
from headrace.serve.api.messages import Messages
from headrace.serve.api.openapi import Operation, document, page, page_policy
from headrace.serve.api.responses import Responses
from headrace.serve.api.service import AppSettings, Service
from headrace.serve.api.shapes import (
    Health,
    Load,
    ModelCard,
    ModelList,
    ModelMeta,
    Permission,
    TraceAnswer,
    VersionAnswer,
)
from headrace.serve.api.tokenizing import Tokenizing
from headrace.serve.net.desk import ClientGone
from headrace.serve.net.http import LIVE, RequestIds, error_response, json_response, reported
from headrace.serve.version import version
from headrace.serve.watch.metrics import CONTENT_TYPE
from headrace.serve.watch.traffic import Counted

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient

MAX_TRACE = 100_000
Endpoint = Callable[[Request], Awaitable[Response]]

# Newer FastAPI would send traces, metrics and logs of its own where the environment has a collector.
_SILENT: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}

_HEALTH = Operation("Whether requests can be served.", answer=Health)
_MODEL = Operation("One of the names that are served.", answer=ModelCard, path={"id": text()}, errors=(404,))
_TRACE = Operation(
    "What the engine's last steps did.",
    answer=TraceAnswer,
    query={"last": integer(1, MAX_TRACE, says=f"how many steps, from 1 to {MAX_TRACE}; 100 if absent")},
    errors=(400,),
)


class App:
    """One served model. Must be made on the event loop that serves; `asgi` answers.

    routes: the same without request ids, for `serve.front` to stand before them.
    """

    def __init__(self, engine: EngineClient, settings: AppSettings | None = None) -> None:
        self.service = Service(engine, settings or AppSettings())
        self.names, self.limits = self.service.names, self.service.limits
        self.desk, self.metrics = self.service.desk, self.service.metrics
        self._created = int(time.time())
        paths: dict[Any, str] = {}
        self.routes: ASGIApp = Counted(self._fastapi(paths), self.metrics.http, paths)
        self.asgi = RequestIds(self.routes)

    def _fastapi(self, paths: dict[Any, str]) -> FastAPI:
        """paths: filled with the path of each endpoint."""
        routes: list[BaseRoute] = []
        for method, path, handler, _ in self.table:
            endpoint = _guarded(handler)
            paths[endpoint] = path.replace(":path}", "}")
            routes.append(Route(path, endpoint, methods=[method]))
        handlers: Any = {HTTPException: self._refuse}
        return FastAPI(
            routes=routes,
            exception_handlers=handlers,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            telemetry=_SILENT,
        )

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Unknown routes and methods, in OpenAI's shape."""
        assert isinstance(error, HTTPException)
        where = f"{request.method} {shown(request.url.path)}"
        hint = " GET /docs lists the known ones." if self.service.settings.docs else ""
        told = {404: f"Unknown URL: {where}.{hint}", 405: f"{where} is not allowed."}
        refusal = HTTPException(error.status_code, told.get(error.status_code, error.detail), error.headers)
        return error_response(reported(refusal, request.state.request_id))

    @functools.cached_property
    def table(self) -> Sequence[tuple[str, str, Endpoint, Operation]]:
        """Every route: method, path, what answers it, what it does."""
        other, anthropic = Responses(self.service), Messages(self.service)
        tokens = Tokenizing(self.service)
        docs = (
            ("GET", "/openapi.json", self.openapi, Operation("This documentation, as OpenAPI 3.1.", answer=dict)),
            ("GET", "/docs", self.docs, Operation("This documentation, for people.", media="text/html")),
        )
        return (
            ("POST", "/v1/chat/completions", Chat(self.service).create, chat.OPERATION),
            ("POST", "/v1/completions", Completions(self.service).create, completions.OPERATION),
            ("POST", "/v1/responses", other.create, responses.OPERATION),
            ("GET", "/v1/responses/{id:path}", other.missing, responses.MISSING),
            ("DELETE", "/v1/responses/{id:path}", other.missing, responses.MISSING),
            ("POST", "/v1/messages", anthropic.create, messages.CREATE),
            ("POST", "/v1/messages/count_tokens", anthropic.count, messages.COUNT),
            ("POST", "/tokenize", tokens.tokenize, tokenizing.TOKENIZING),
            ("POST", "/v1/tokenize", tokens.tokenize, tokenizing.TOKENIZING),
            ("POST", "/detokenize", tokens.detokenize, tokenizing.DETOKENIZING),
            ("POST", "/v1/detokenize", tokens.detokenize, tokenizing.DETOKENIZING),
            ("GET", "/tokenizer_info", tokens.info, tokenizing.INFO),
            ("GET", "/v1/models", self.models, Operation("The names that are served.", answer=ModelList)),
            ("GET", "/v1/models/{id:path}", self.model, _MODEL),
            ("GET", "/health", self.health, _HEALTH),
            ("GET", "/v1/health", self.health, _HEALTH),
            ("GET", "/ready", self.health, _HEALTH),
            ("GET", "/ping", self.health, _HEALTH),
            ("POST", "/ping", self.health, _HEALTH),
            ("GET", "/live", self.live, Operation("That there is a process.", answer=Health)),
            ("GET", "/load", self.load, Operation("How many requests are open.", answer=Load)),
            ("GET", "/version", self.version, Operation("Which Headrace this is.", answer=VersionAnswer)),
            ("GET", "/metrics", self.show_metrics, Operation("Metrics, for Prometheus.", media="text/plain")),
            ("GET", "/trace", self.trace, _TRACE),
            *(docs if self.service.settings.docs else ()),
        )

    @functools.cached_property
    def _document(self) -> dict[str, Any]:
        rows = [(method, path.replace(":path}", "}"), operation) for method, path, _, operation in self.table]
        return document(rows, self.limits.bounds)

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json"""
        return json_response(msgspec.json.encode(self._document))

    async def docs(self, request: Request) -> Response:
        """GET /docs"""
        return HTMLResponse(page(self._document), headers={"content-security-policy": page_policy()})

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
        return ModelCard(
            id=name,
            created=self._created,
            root=Path(info.name).name if Path(info.name).is_absolute() else info.name,
            max_model_len=info.max_model_len,
            permission=[Permission(id=f"modelperm-{self.names.index(name)}", created=self._created)],
            meta=ModelMeta(
                n_vocab=info.vocab_size,
                n_ctx_train=info.trained_len,
                n_embd=info.dim,
                n_params=info.parameters,
                size=info.weight_bytes,
            ),
            quality=info.quality or UNSET,
        )

    async def health(self, request: Request) -> Response:
        """GET /health, /ready, /ping: 503 when the engine is dead or the server is on its way out."""
        engine = self.service.engine
        if not engine.alive:
            raise EngineError("The engine process has died.") if engine.stopped.is_set() else EngineAway()
        if self.desk.closing:
            raise HTTPException(503, "The server is shutting down.", {"retry-after": "1"})
        return json_response(LIVE)

    async def live(self, request: Request) -> Response:
        """GET /live: that there is a process, whatever state it is in."""
        return json_response(LIVE)

    async def load(self, request: Request) -> Response:
        """GET /load"""
        return json_response(msgspec.json.encode(Load(self.desk.open)))

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return json_response(msgspec.json.encode(VersionAnswer(version())))

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def trace(self, request: Request) -> Response:
        """GET /trace?last=N: what the engine's last steps did."""
        last = request.query_params.get("last", "100")
        if not (last.isascii() and last.isdigit()) or not 1 <= int(last[:9]) <= MAX_TRACE:
            raise RequestError(f"last must be from 1 to {MAX_TRACE}, got '{shown(last, 20)}'.", param="last")
        return json_response(msgspec.json.encode(TraceAnswer(await self.service.engine.trace(int(last)))))


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
