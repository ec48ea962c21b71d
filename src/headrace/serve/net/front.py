"""What stands before the routes: request ids, cross-origin answers, keys, and the answer while there is no model yet.

Owes: nothing behind it is reached without a key where keys are asked for. Does not know: what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.serve.errors import Problem
from headrace.serve.net.http import LIVE, RequestIds, error_response, json_response
from headrace.serve.net.keys import KeyRing

OPEN = frozenset({"/health", "/v1/health", "/ready", "/live", "/ping", "/version"})  # to everybody
EXPOSED = ("x-request-id", "request-id", "retry-after", "x-should-retry")  # to scripts of other origins

_LOADING = Problem(503, "overloaded_error", "The model is being loaded.", code="loading", headers={"retry-after": "1"})
_NO_KEY = Problem(
    401,
    "authentication_error",
    "A valid key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)


@dataclass(frozen=True, slots=True)
class Cors:
    """What scripts of other origins may do; no origins: nothing."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


class Gate:
    """ASGI: says that the model is being loaded, until `open` gives the routes."""

    def __init__(self) -> None:
        self._routes: ASGIApp | None = None

    def open(self, routes: ASGIApp) -> None:
        """There is a model."""
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if self._routes is not None:
            await self._routes(scope, receive, send)
        elif scope["path"] == "/live":
            await json_response(LIVE)(scope, receive, send)
        else:
            await error_response(_LOADING)(scope, receive, send)


class KeyGuard:
    """ASGI middleware: lets requests with a key in, as their caller, and those to open paths. 401 for the rest."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str] = OPEN) -> None:
        self._app = app
        self._keys = keys
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        caller = self._keys.caller(Headers(scope=scope))
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
        elif scope["path"] not in self._open:
            await error_response(_NO_KEY)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def front(app: ASGIApp, keys: KeyRing, cors: Cors, *, metrics_open: bool = False) -> ASGIApp:
    """`app` behind all of it. Cross-origin headers are outermost, so that refusals carry them too.

    metrics_open: /metrics needs no key.
    """
    if len(keys):
        app = KeyGuard(app, keys, OPEN | {"/metrics"} if metrics_open else OPEN)
    app = RequestIds(app)
    if not cors.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=cors.origins,
        allow_methods=cors.methods,
        allow_headers=cors.headers,
        allow_credentials=cors.credentials,
        expose_headers=EXPOSED,
    )
