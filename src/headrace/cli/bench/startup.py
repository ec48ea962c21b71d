"""``headrace bench startup``: seconds from a new process to its first token, and the parts of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.bench.report import figures
from headrace.bench.startup import measured
from headrace.cli.bench import JsonOption, keep
from headrace.cli.flags import ModelArgument, ModelOption, with_engine


@with_engine
def run(
    *,
    settings: Callable[[str], EngineSettings],
    model: ModelArgument = DEFAULT_MODEL,
    model_option: ModelOption = None,
    num_iters: Annotated[int, typer.Option(min=1, help="Processes whose median is taken.")] = 5,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 16,
    json: JsonOption = None,
) -> None:
    """Measure the start."""
    chosen = settings(model_option or model)
    results = measured(chosen, rounds=num_iters, prompt=input_len)
    print(figures(results))
    keep(json, "startup", asdict(chosen) | {"num_iters": num_iters, "input_len": input_len}, results)
