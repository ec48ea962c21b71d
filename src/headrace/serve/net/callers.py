"""On whose behalf a request runs.

Owes: a `Caller` for each request. Does not know: keys, or what a caller's weight does (`core.scheduler`).
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. name: "" for nobody in particular. weight: the caller's share against others', above 0."""

    name: str = ""
    weight: float = 1.0


ANONYMOUS = Caller()


def caller_of(request: Request) -> Caller:
    """Who was found out by the middleware that checks keys (``request.state.caller``); `ANONYMOUS` without one."""
    state: dict[str, object] = request.scope.get("state", {})
    caller = state.get("caller", ANONYMOUS)
    assert isinstance(caller, Caller)
    return caller
