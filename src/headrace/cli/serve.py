"""``headrace serve``: the OpenAI-compatible server. `SERVE_FLAGS` is the list of its own flags."""

from __future__ import annotations

from collections.abc import Callable

import typer

from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.cli.flags import COUNT, FlagTable, ModelArgument, ModelOption, with_engine, with_flags
from headrace.serve.process import serve
from headrace.serve.settings import ServeSettings

SERVE_FLAGS: FlagTable = {  # by field of ServeSettings
    "host": (str, {}, "Address to listen on."),
    "port": (int, {"min": 0, "max": 65535}, "Port; 0: a free one."),
    "served_model_name": (list[str], {}, "Name in the API, may be given again for more; the first is echoed."),
    "shutdown_timeout": (float, {"min": 0}, "Seconds for running requests on SIGTERM."),
    "max_body_bytes": (int, COUNT, "Largest request body."),
}


@with_engine
@with_flags("http", ServeSettings, SERVE_FLAGS, "Server")
def run(
    *,
    settings: Callable[[str], EngineSettings],
    http: ServeSettings,
    model: ModelArgument = DEFAULT_MODEL,
    model_option: ModelOption = None,
) -> None:
    """Serve until told to stop."""
    raise typer.Exit(serve(settings(model_option or model), http))
