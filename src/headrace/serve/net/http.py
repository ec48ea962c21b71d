"""HTTP's edges: bodies read within limits, event streams that end well, request ids, and errors in one shape.

Owes: nothing that a client sends can take more memory or time than the limits here. Does not know: what is asked.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.errors import HeadraceError, RequestError
from headrace.base.log import log
from headrace.serve.api.fields import REQUEST_ID
from headrace.serve.errors import Problem, is_anthropic, problem_of
from headrace.serve.net.desk import ClientGone, Desk

MAX_BODY = 32 << 20  # bytes
BODY_SECONDS = 60.0  # for a body to arrive whole
LAST_SECONDS = 0.3  # for the last event to go out when the server is going
LONG_BODY = 64 << 10  # bytes from which on JSON is decoded and checked off the event loop
_T = TypeVar("_T")

LIVE = b'{"status":"ok"}'  # the body of every answer that says no more
_REQUEST_ID = re.compile(REQUEST_ID)
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class RequestIds:
    """ASGI middleware: takes ``x-request-id`` if it is harmless, else draws one; says it in every response.

    ``request.state`` has `request_id`, whether it was given, and when the request arrived, time.monotonic seconds.
    The body's ``request_id`` goes before it: see `rename`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        named = bool(_REQUEST_ID.fullmatch(given))
        request_id = given if named else secrets.token_hex(16)
        scope.setdefault("state", {}).update(request_id=request_id, request_id_given=named, arrived=time.monotonic())
        names = ("x-request-id", "request-id") if is_anthropic(scope["path"]) else ("x-request-id",)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in names:
                    headers[name] = scope["state"]["request_id"]
            await send(message)

        await self._app(scope, receive, send_with_id)


def rename(request: Request, request_id: str) -> None:
    """The client has given this request another id, in its body."""
    request.state.request_id, request.state.request_id_given = request_id, True


async def read_json(request: Request, parse: Callable[[Any], _T], most: int = MAX_BODY) -> _T:
    """What `parse` makes of the decoded body. HTTPException 408, 413 or 415, or RequestError for what is no JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "Unsupported Media Type: only 'application/json' is allowed as content-type.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Compressed bodies are not supported: send the JSON as it is.")
    body = await _body(request, most)
    if len(body) > LONG_BODY:
        return await asyncio.to_thread(lambda: parse(_decode(body)))
    return parse(_decode(body))


async def _body(request: Request, most: int) -> bytes:
    too_large = HTTPException(413, f"The body is larger than {most} bytes, the most that this server reads.")
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"The body did not arrive within {BODY_SECONDS:.0f} seconds.") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"The body is not valid JSON in UTF-8: {reason}", code="invalid_json") from None


class Closing(Protocol):
    async def aclose(self) -> None: ...


class Events(Protocol):
    """What an event stream is made from: see `answers.Reply`. news: closed at the end, whatever the end is."""

    @property
    def news(self) -> Closing: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...

    def failed(self, problem: Problem) -> bytes: ...


class EventStream(Response):
    """Server-sent events. When they fail, an error event is the last thing sent, and no ``[DONE]``."""

    def __init__(self, source: Events, desk: Desk, request_id: str) -> None:
        super().__init__(headers=_SSE_HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._desk = desk
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The response."""
        try:
            with self._desk.held():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                last = await self._run(receive, send)
                if last is not None:
                    await self._end(send, last)
        finally:
            await self._source.news.aclose()

    async def _run(self, receive: Receive, send: Send) -> bytes | None:
        """The last bytes to send; None when nobody is there to read them."""
        try:
            await self._desk.attend(self._pump(send), receive)
        except ClientGone:
            return None
        except Exception as error:
            return self._source.failed(reported(error, self._request_id))
        return b""

    async def _end(self, send: Send, last: bytes) -> None:
        """A server that is going does not wait for a client that has stopped to read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS if self._desk.closing else None):
                await send({"type": "http.response.body", "body": last})

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._source.events()) as events:
            async for piece in events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})


def json_response(body: bytes) -> Response:
    """A body of JSON."""
    return Response(body, media_type="application/json")


class ErrorResponse(Response):
    """An error answer, in the shape that clients of the path it is sent from read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(status_code=problem.status)
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The response."""
        problem = self._problem
        body = problem.body(scope["path"], scope.get("state", {}).get("request_id", ""))
        response = Response(body, problem.status, headers=dict(problem.headers), media_type="application/json")
        await response(scope, receive, send)


def error_response(problem: Problem) -> Response:
    """An error answer."""
    return ErrorResponse(problem)


def reported(error: Exception, request_id: str) -> Problem:
    """The problem to tell the client of; what is our fault also goes to the log, under the request's id."""
    problem = problem_of(error, request_id)
    if not isinstance(error, HeadraceError | HTTPException):
        log.error("request %s failed", request_id, exc_info=error)
    elif problem.status == 500:
        log.error("request %s failed: %s", request_id, problem.message[:500])
    return problem
