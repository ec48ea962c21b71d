"""The routes of one served model.

Owes: each request answered, in OpenAI's shapes, or refused by name. Does not know: processes, signals, sockets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from headrace.base.errors import EngineError, RequestError, UnknownModel
from headrace.base.log import log
from headrace.engine.messages import Terms
from headrace.serve.answers import ChatReply, TextReply, new_id
from headrace.serve.callers import caller_of
from headrace.serve.desk import ClientGone, Desk
from headrace.serve.errors import shown
from headrace.serve.http import MAX_BODY, EventStream, RequestIds, error_response, read_json, reported
from headrace.serve.metrics import CONTENT_TYPE, Metrics
from headrace.serve.news import News
from headrace.serve.prompts import Prompts
from headrace.serve.requests import Asked, Limits, generation_defaults, parse_chat, parse_completion
from headrace.serve.shapes import ModelCard, ModelList
from headrace.serve.version import version

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient, Stream

MAX_TRACE = 100_000
Endpoint = Callable[[Request], Awaitable[Response]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AppSettings:
    """names: under which the model is served, the first is the one in answers; none: the reference it was loaded by."""

    names: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY
    prefix_caching: bool = True


class App:
    """One served model. Must be made on the event loop that serves; `asgi` is what a server runs."""

    def __init__(self, engine: EngineClient, settings: AppSettings | None = None) -> None:
        self._settings = settings or AppSettings()
        self._engine = engine
        self._created = int(time.time())
        self.names = self._settings.names or (engine.info.name,)
        self.limits = limits_of(engine, self.names)
        self.desk = Desk()
        self.metrics = Metrics(engine, self.names[0], self._settings.prefix_caching)
        self._prompts = Prompts(engine.tokenizer, engine.template, self.limits)
        self.asgi = RequestIds(self._fastapi())

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
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{id:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/version", self.version),
            ("GET", "/metrics", self.show_metrics),
            ("GET", "/trace", self.trace),
        )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        with self.desk.seat():
            asked = await self._read(request, parse_chat)
            ids = await self._prompts.of_chat(asked)
            id, news = await self._submit(request, "chatcmpl", asked.asked, [ids])
            reply = ChatReply(id, self.names[0], asked.asked, news, self._engine.tokenizer)
            return await self._answer(request, reply, news)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        with self.desk.seat():
            asked = await self._read(request, parse_completion)
            ids = await self._prompts.of_completion(asked)
            echoes = await self._prompts.echoes(asked) if asked.echo else None
            id, news = await self._submit(request, "cmpl", asked.asked, ids)
            reply = TextReply(id, self.names[0], asked.asked, news, self._engine.tokenizer, echoes)
            return await self._answer(request, reply, news)

    async def _read(self, request: Request, parse: Callable[[Any, Limits], _T]) -> _T:
        return await read_json(request, lambda body: parse(body, self.limits), self._settings.max_body_bytes)

    async def _submit(
        self, request: Request, prefix: str, asked: Asked, prompts: Sequence[list[int]]
    ) -> tuple[str, News]:
        """All prompts, or, when one is refused, none. The engine's ids are unique whatever clients choose."""
        id = new_id(prefix, request.state.request_id)
        base = new_id(id) if request.state.request_id_given else id
        caller = caller_of(request)
        terms = Terms(priority=asked.priority, cache_salt=asked.cache_salt, tenant=caller.name, weight=caller.weight)
        streams: list[Stream] = []
        try:
            for i, ids in enumerate(prompts):
                name = base if len(prompts) == 1 else f"{base}-{i}"
                params = dataclasses.replace(asked.params)
                streams.append(self._engine.submit(ids, params, request_id=name, terms=terms))
                await asyncio.sleep(0)  # many long prompts take a while, and others wait for the event loop
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return id, News(streams, self.metrics)

    async def _answer(self, request: Request, reply: ChatReply | TextReply, news: News) -> Response:
        if reply.asked.stream:
            return EventStream(reply, self.desk, news.aclose, request.state.request_id)
        try:
            body = await self.desk.attend(reply.whole(), request.receive)
        finally:
            await news.aclose()
        return _json(body)

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return _json(msgspec.json.encode(ModelList(data=[self._card(name) for name in self.names])))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        name = request.path_params["id"]
        if name not in self.names:
            raise UnknownModel(f"The model `{shown(name)}` does not exist. Valid aliases: {', '.join(self.names)}.")
        return _json(msgspec.json.encode(self._card(name)))

    def _card(self, name: str) -> ModelCard:
        info = self._engine.info
        return ModelCard(id=name, created=self._created, root=info.name, max_model_len=info.max_model_len)

    async def health(self, request: Request) -> Response:
        """GET /health: 503 when the engine is dead or the server is on its way out."""
        if not self._engine.alive:
            raise EngineError("The engine process has died.")
        if self.desk.closing:
            raise HTTPException(503, "The server is shutting down.", {"retry-after": "1"})
        return _json(b'{"status":"ok"}')

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return _json(msgspec.json.encode({"version": version()}))

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def trace(self, request: Request) -> Response:
        """GET /trace?last=N: what the engine's last steps did."""
        last = request.query_params.get("last", "100")
        if not (last.isascii() and last.isdigit()) or not 1 <= int(last[:9]) <= MAX_TRACE:
            raise RequestError(f"last must be from 1 to {MAX_TRACE}, got '{shown(last, 20)}'.", param="last")
        return _json(msgspec.json.encode({"steps": await self._engine.trace(int(last))}))


def limits_of(engine: EngineClient, names: tuple[str, ...]) -> Limits:
    """What requests are checked against, the model's own sampling defaults among it."""
    info = engine.info
    defaults, max_new_tokens, refused = generation_defaults(info.generation)
    for name in refused:
        log.warning("generation_config.json: %s is not usable and was left out", name)
    return Limits(
        names=names,
        vocab_size=min(info.vocab_size, engine.tokenizer.vocab_size),
        max_model_len=info.max_model_len,
        max_logprobs=info.max_logprobs,
        defaults=defaults,
        max_new_tokens=max_new_tokens,
    )


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


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
