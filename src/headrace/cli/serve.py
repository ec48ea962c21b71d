"""``headrace serve``: the OpenAI-compatible server. `SERVE_FLAGS` is the list of its own flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import typer

from headrace.base.errors import SettingError
from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.cli.config import ConfigOption, Configured
from headrace.cli.flags import COUNT, FlagTable, ModelArgument, ModelOption, with_engine, with_flags
from headrace.serve.net.keys import Key
from headrace.serve.process import serve
from headrace.serve.settings import ServeSettings

KIND = Configured


def key_of(given: str | Mapping[str, Any] | Key) -> Key:
    """A key as a word, or as a config file's entry. Defaults come as they are."""
    try:
        return given if isinstance(given, Key) else Key.of(given) if isinstance(given, str) else Key.read(given)
    except SettingError as error:
        raise typer.BadParameter(str(error)) from None


KEY: dict[str, Any] = {"parser": key_of, "metavar": "KEY"}
SERVE_FLAGS: FlagTable = {  # by field of ServeSettings
    "host": (str, {}, "Address to listen on."),
    "port": (int, {"min": 0, "max": 65535}, "Port; 0: a free one."),
    "uds": (str | None, {}, "Path of a Unix socket to listen on, in the place of host and port."),
    "served_model_name": (list[str], {}, "Names in the API; the first is echoed."),
    "shutdown_timeout": (float, {"min": 0}, "Seconds for running requests on SIGTERM."),
    "max_body_bytes": (int, COUNT, "Largest request body."),
    "engine_restarts": (int, {"min": 0}, "Restarts of an engine process that died, within an hour."),
    "engine_timeout": (float, {"min": 0}, "Seconds without a sign of life until a busy engine is ended; 0: never."),
    "max_connections": (int, COUNT, "Connections that are held at once."),
    "log_format": (str, {"metavar": "human|json"}, "json: one object a line."),
    "enable_log_requests": (bool, {}, "A line in the log for each request, without its texts."),
    "enable_log_outputs": (bool, {}, "The same with the texts of prompt and answer."),
    "max_log_len": (int, COUNT, "Most characters of each of these texts."),
    "disable_log_stats": (bool, {}, "No line of figures every ten seconds."),
    "otlp_traces_endpoint": (
        str | None,
        {"metavar": "URL"},
        "Send a trace of each request to this OpenTelemetry collector, by OTLP over HTTP; needs headrace[otel].",
    ),
    "api_key": (
        list[Key],
        KEY,
        "Key that requests need; may be given again. Or set HEADRACE_API_KEY.",
    ),
    "api_key_file": (str | None, {}, "File of keys, a line each: `key`, or `name key weight`."),
    "metrics_without_key": (bool, {}, "Leave /metrics open when keys are needed."),
    "trust_request_chat_template": (bool, {}, "Requests may bring chat templates (they run in a sandbox)."),
    "any_model_name": (bool, {}, "Requests may call the model what they like."),
    "reasoning_field": (
        str,
        {"metavar": "reasoning|reasoning_content|both"},
        "Field of chat answers for what the model thought.",
    ),
    "disable_fastapi_docs": (bool, {}, "No /docs and no /openapi.json."),
    "prefix_cache_per_key": (bool, {}, "Callers find only their own prompts in the prefix cache."),
    "price_per_hour": (float | None, {"metavar": "USD"}, "What the machine costs: answers and metrics tell costs."),
    "goodput": (list[str], {"metavar": "NAME:MS"}, "What good answers keep to: 'ttft:500 tpot:50 e2el:5000'."),
    "allowed_origins": (list[str], {}, "Origin whose scripts may ask, or '*'; may be given again. None: CORS is off."),
    "allowed_methods": (list[str], {}, "Method that they may use; may be given again."),
    "allowed_headers": (list[str], {}, "Header that they may send; may be given again."),
    "allow_credentials": (bool, {}, "Let them send cookies; not with the origin '*'."),
    "ssl_keyfile": (str | None, {}, "Private key, PEM, for HTTPS."),
    "ssl_certfile": (str | None, {}, "Certificate, PEM, for HTTPS."),
    "ssl_ca_certs": (str | None, {}, "Certificates, PEM, that clients' own must come from."),
    "ssl_cert_reqs": (int, {"min": 0, "max": 2}, "Clients' certificates: 0 none, 1 if they have one, 2 needed."),
}


@with_engine
@with_flags("http", ServeSettings, SERVE_FLAGS, "Server")
def run(
    *,
    settings: Callable[[str], EngineSettings],
    http: ServeSettings,
    model: ModelArgument = DEFAULT_MODEL,
    model_option: ModelOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve until told to stop."""
    raise typer.Exit(serve(settings(model_option or model), http))
