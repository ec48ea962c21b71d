"""``headrace bench latency``: one batch after another, in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.bench.offline import latency
from headrace.bench.report import figures
from headrace.cli.bench import JsonOption, keep
from headrace.cli.flags import ModelArgument, ModelOption, with_engine


@with_engine
def run(
    *,
    settings: Callable[[str], EngineSettings],
    model: ModelArgument = DEFAULT_MODEL,
    model_option: ModelOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of a batch.")] = 1,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches that do not count.")] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Batches that do.")] = 8,
    json: JsonOption = None,
) -> None:
    """Measure latency."""
    chosen = settings(model_option or model)
    asked = {
        "sequences": batch_size,
        "inputs": input_len,
        "outputs": output_len,
        "warmups": num_iters_warmup,
        "rounds": num_iters,
    }
    results = latency(chosen, **asked)
    print(figures(results))
    keep(json, "latency", asdict(chosen) | asked, results)
