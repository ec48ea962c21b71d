"""HTTP requests by route: counts and durations, under the names of prometheus-fastapi-instrumentator.

Owes: few series, whatever clients ask for. Does not know: what is asked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.01, 0.1, 0.5, 1, 5, 30, 120, 600)


class HttpMetrics:
    """The two metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("handler", "method")
        self._requests = Counter("http_requests", "Requests answered.", (*labels, "status"), registry=registry)
        self._seconds = Histogram(
            "http_request_duration_seconds", "To the end of the answer.", labels, buckets=_SECONDS, registry=registry
        )

    def noted(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An answer is over."""
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)


_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})
_UNCOUNTED = frozenset({"/metrics", "/health", "/v1/health", "/ready", "/live", "/ping", "/version"})


class Counted:
    """ASGI middleware: notes each request. paths: of routes, by their endpoints; unknown ones are all "none"."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: Mapping[Any, str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED:
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            handler = self._paths.get(scope.get("endpoint"), "none")
            self._metrics.noted(handler, method, status, time.monotonic() - start)
