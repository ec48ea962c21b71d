"""Exceptions become HTTP: status, an error in the shape that clients of the path read, and how a client should retry.

Owes: one `Problem` for whatever went wrong; its body for each API. Does not know: routes, requests.
Sources: OpenAI's and Anthropic's API references on errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.exceptions import HTTPException

from headrace.base.errors import (
    CapacityError,
    ContextTooLong,
    DeadlinePassed,
    EngineAway,
    EngineError,
    RequestError,
    UnknownModel,
)


class ErrorBody(msgspec.Struct, frozen=True):
    """What OpenAI's clients read."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The whole body of an error answer, or of an error event."""

    error: ErrorBody


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """What Anthropic's clients read."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The whole body of an error answer, or of an error event, for them."""

    error: AnthropicErrorBody
    request_id: str


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether that path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as it goes out."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> bytes:
        """The body in OpenAI's shape, UTF-8."""
        return msgspec.json.encode(ErrorAnswer(ErrorBody(clean(self.message), self.type, self.param, self.code)))

    def anthropic_json(self, request_id: str) -> bytes:
        """The body in Anthropic's shape, whose types go by status, UTF-8."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode(AnthropicError(AnthropicErrorBody(kind, clean(self.message)), request_id))

    def body(self, path: str, request_id: str) -> bytes:
        """What clients of that path read."""
        return self.anthropic_json(request_id) if is_anthropic(path) else self.json()


class Broken(EngineError):
    """One request failed inside; its neighbours are well. Said to its client as it is."""


class GoingAway(EngineError):
    """The server is shutting down."""


_RETRY_SOON = {"retry-after": "1"}
_DONT_RETRY = {"x-should-retry": "false"}

# The first class that fits decides: status, type, code, headers.
_BY_CLASS: tuple[tuple[type[Exception], int, str, str | None, Mapping[str, str]], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found", {}),
    (ContextTooLong, 400, "invalid_request_error", "context_length_exceeded", {}),
    (RequestError, 400, "invalid_request_error", None, {}),
    (CapacityError, 429, "rate_limit_error", "queue_full", {}),
    (DeadlinePassed, 408, "timeout_error", "deadline_exceeded", _DONT_RETRY),
    (GoingAway, 503, "overloaded_error", "shutting_down", _RETRY_SOON),
    (Broken, 500, "server_error", None, _DONT_RETRY),
    (EngineAway, 503, "overloaded_error", "engine_restarting", {"retry-after": "2"}),
    (EngineError, 503, "server_error", "engine_dead", _DONT_RETRY),
)

_BY_STATUS: dict[int, tuple[str, str | None]] = {
    404: ("invalid_request_error", "unknown_url"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    503: ("overloaded_error", "unavailable"),
}


def problem_of(error: Exception, request_id: str = "") -> Problem:
    """How `error` is told to the client; what we did not expect is told without its text."""
    if isinstance(error, HTTPException):
        kind, code = _BY_STATUS.get(error.status_code, ("invalid_request_error", None))
        return Problem(error.status_code, kind, error.detail, code=code, headers=error.headers or {})
    for cls, status, kind, code, headers in _BY_CLASS:
        if isinstance(error, cls):
            param, own = getattr(error, "param", None), getattr(error, "code", None)
            if isinstance(error, CapacityError):
                headers = _retry_headers(error.retry_after)
            return Problem(status, kind, str(error), param, own or code, headers)
    return Problem(500, "server_error", f"Internal error; the log has it under {request_id}.", headers=_DONT_RETRY)


def _retry_headers(seconds: float | None) -> Mapping[str, str]:
    """When to try again, in whole seconds and, for OpenAI's clients, to the millisecond."""
    if seconds is None:
        return _DONT_RETRY
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def clean(text: str) -> str:
    """Text that can be encoded: halves of surrogate pairs become U+FFFD."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
