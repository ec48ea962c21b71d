"""``headrace bench step``: milliseconds, GB/s, GMAC/s and the share of the roof, for each batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.bench.report import table
from headrace.bench.step import measured
from headrace.cli.bench import JsonOption, keep
from headrace.cli.flags import ManyValues, ModelArgument, ModelOption, with_engine

KIND = ManyValues
LEGEND = """roof_ms: the longer of the times that the step's bytes and multiply-adds need at the machine's own rates,
measured before and after; of_roof: its share; of_memory: the bytes' share. Rates that differ from row to row, or
shares above 1, tell of other work on the machine."""


@with_engine
def run(
    *,
    settings: Callable[[str], EngineSettings],
    model: ModelArgument = DEFAULT_MODEL,
    model_option: ModelOption = None,
    sequences: Annotated[list[int], typer.Option(min=1, help="Sequences that decode together; several.")] = [1, 8, 32],  # noqa: B006
    context: Annotated[int, typer.Option(min=4, help="Tokens of each before it decodes.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps whose median is taken.")] = 32,
    prefill: Annotated[int, typer.Option(min=0, help="Also a prompt of so many tokens, alone; 0: none.")] = 512,
    profile: Annotated[bool, typer.Option("--profile", help="Also where the time goes, by kind of phase.")] = False,
    json: JsonOption = None,
) -> None:
    """Measure steps."""
    chosen = settings(model_option or model)
    asked = {"sequences": sequences, "context": context, "steps": steps, "prefill": prefill}
    found = measured(chosen, sequences=sequences, context=context, steps=steps, prefill=prefill, profile=profile)
    print(f"{found['model']}: {found['threads']} threads, {found['isa']}")
    print(table(found["rows"]))
    print(LEGEND)
    for number, phases in found["phases"].items():
        print(f"\nphases of a step of {number}, waiting for other threads included")
        print(table(phases))
    keep(json, "step", asdict(chosen) | asked, found)
