"""``headrace serve``: the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.cli.flags import ModelArgument, ModelOption, whole, with_engine
from headrace.serve.http import MAX_BODY
from headrace.serve.process import ServeSettings, serve

_PANEL = "Server"


@with_engine
def run(
    *,
    settings: Callable[[str], EngineSettings],
    model: ModelArgument = DEFAULT_MODEL,
    model_option: ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_PANEL)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: a free one.", min=0, max=65535, rich_help_panel=_PANEL)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name in the API, may be given again for more; the first is echoed.", rich_help_panel=_PANEL),
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds for running requests on SIGTERM.", min=0, rich_help_panel=_PANEL)
    ] = 30.0,
    max_body_bytes: Annotated[
        int, typer.Option(parser=whole, metavar="N", help="Largest request body.", rich_help_panel=_PANEL)
    ] = MAX_BODY,
) -> None:
    """Serve until told to stop."""
    http = ServeSettings(
        host=host,
        port=port,
        served_model_name=tuple(served_model_name or ()),
        shutdown_timeout=shutdown_timeout,
        max_body_bytes=max_body_bytes,
    )
    raise typer.Exit(serve(settings(model_option or model), http))
