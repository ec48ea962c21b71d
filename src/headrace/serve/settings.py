"""Settings of the server, as `headrace.base.settings` is of the engine. `cli.serve` gives each a flag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.base.errors import SettingError
from headrace.base.goals import parse_goals
from headrace.base.log import FORMATS
from headrace.serve.net.http import MAX_BODY
from headrace.serve.net.keys import Key

REASONING_FIELDS = {
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
    "both": ("reasoning", "reasoning_content"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Where and how to serve.

    port: 0 takes a free one. uds: the path of a Unix socket, in the place of host and port.
    served_model_name: names in the API, the first is echoed; none: the reference that the model was loaded by.
    max_connections: that are held at once; what comes beyond is answered 503.
    shutdown_timeout: seconds that running requests get on SIGTERM.
    engine_restarts: times within an hour that an engine process which died is started again; then the server ends.
    engine_timeout: seconds without a sign of life after which an engine that has work counts as dead; 0: never.
    api_key, api_key_file: keys that requests need, beside those of the environment (`serve.keys`); none: all may ask.
    metrics_without_key: /metrics is open all the same.
    trust_request_chat_template: requests may bring their own chat templates, which run in the sandbox.
    any_model_name: requests may call the model what they like.
    reasoning_field: under which name chat tells what the model thought, of `REASONING_FIELDS`.
    disable_fastapi_docs: no /docs, no /openapi.json.
    prefix_cache_per_key: callers find only their own prompts in the prefix cache, so that its speed tells them nothing.
    allowed_origins and the next three: what scripts of other origins may do (CORS); no origins: nothing.
    price_per_hour: what the machine costs, in US dollars; answers and metrics then tell what requests cost.
    goodput: what good answers keep to, such as ttft:500 (milliseconds); metrics then count those that did.
    ssl_keyfile, ssl_certfile: PEM; with them only HTTPS is spoken. ssl_ca_certs: whose certificates clients may show;
        ssl_cert_reqs: 0 they need none, 1 they may show one, 2 they must.
    log_format: "human" or "json", one object a line. disable_log_stats: no line of figures every ten seconds.
    enable_log_requests: a line for each request, without texts. enable_log_outputs: with its prompt and its answer, at
        most max_log_len characters of each.
    otlp_traces_endpoint: URL of a collector that gets a trace of each request (`serve.tracing`); None: nobody does.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_name: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    max_body_bytes: int = MAX_BODY
    max_connections: int = 4096
    engine_restarts: int = 1
    engine_timeout: float = 30.0
    api_key: tuple[Key, ...] = ()
    api_key_file: str | None = None
    metrics_without_key: bool = False
    reasoning_field: str = "reasoning"
    disable_fastapi_docs: bool = False
    any_model_name: bool = False
    trust_request_chat_template: bool = False
    prefix_cache_per_key: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    price_per_hour: float | None = None
    goodput: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    log_format: Literal["human", "json"] = "human"
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    max_log_len: int = 1000
    disable_log_stats: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.reasoning_field not in REASONING_FIELDS:
            known = ", ".join(REASONING_FIELDS)
            raise SettingError(f"reasoning_field must be one of {known}", param="reasoning_field")
        if not all(name and name.isprintable() for name in self.served_model_name):
            raise SettingError("served_model_name must be names of printable characters", param="served_model_name")
        if self.max_body_bytes < 1:
            raise SettingError("max_body_bytes must be 1 or more", param="max_body_bytes")
        parse_goals(self.goodput)
        price = self.price_per_hour
        if price is not None and not 0 <= price < math.inf:
            raise SettingError(f"price_per_hour must be dollars from 0 on, got {price}", param="price_per_hour")
        if self.max_connections < 1:
            raise SettingError("max_connections must be 1 or more", param="max_connections")
        if 0 < self.engine_timeout < 1:
            raise SettingError("engine_timeout must be 0 (never) or at least a second", param="engine_timeout")
        if self.log_format not in FORMATS:
            raise SettingError(f"log_format must be one of {', '.join(FORMATS)}", param="log_format")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise SettingError(
                "allow_credentials with the origin '*' would let every page act for the user: name the origins",
                param="allow_credentials",
            )
        if "" in self.allowed_origins:
            raise SettingError("allowed_origins: '*', or such as https://example.org", param="allowed_origins")
