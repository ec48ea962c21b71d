"""``headrace pull``: fetch a model now."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.base.log import to_stderr
from headrace.base.settings import DEFAULT_MODEL
from headrace.cli.flags import ModelArgument
from headrace.weights import pull


def run(
    model: ModelArgument = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
) -> None:
    """Fetch a model and say where it is."""
    to_stderr()
    print(pull(model, revision=revision))
