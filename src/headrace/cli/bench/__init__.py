"""`headrace bench`: what its commands share. Flags have the names of `vllm bench` where they mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.base.errors import SettingError
from headrace.bench.report import write
from headrace.bench.work import Lengths


def _lengths(text: str | Lengths) -> Lengths:
    try:
        return Lengths.of(text)
    except SettingError as error:
        raise typer.BadParameter(str(error)) from None


def lengths(what: str) -> Any:
    """An option that is a distribution of lengths."""
    return typer.Option(
        parser=_lengths, metavar="N|LOW-HIGH|MEDIAN~SIGMA", help=f"Tokens of {what}: fixed, uniform or log-normal."
    )


JsonOption = Annotated[
    Path | None, typer.Option("--json", "--output-json", metavar="FILE", help="Also write the results there.")
]
CountOption = Annotated[int, typer.Option("--num-prompts", min=1, help="Requests.")]
PriceOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="USD", help="What the machine costs: tells dollars for a million tokens."),
]
SeedOption = Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")]


def keep(path: Path | None, bench: str, settings: Mapping[str, Any], results: Any) -> None:
    """Writes the results, if that was asked for."""
    if path is not None:
        write(path, bench, settings, results)
        typer.echo(f"written: {path}", err=True)
