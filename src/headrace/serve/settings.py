"""Settings of the server, as `headrace.base.settings` is of the engine. `cli.serve` gives each a flag."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.serve.http import MAX_BODY


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Where and how to serve.

    port: 0 takes a free one.
    served_model_name: names in the API, the first is echoed; none: the reference that the model was loaded by.
    shutdown_timeout: seconds that running requests get on SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    max_body_bytes: int = MAX_BODY
