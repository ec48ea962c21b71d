"""``headrace bench throughput``: many requests at once, in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.bench.offline import throughput
from headrace.bench.report import figures
from headrace.bench.work import Lengths, asks
from headrace.cli.bench import CountOption, JsonOption, PriceOption, SeedOption, keep, lengths
from headrace.cli.flags import ModelArgument, ModelOption, with_engine


@with_engine
def run(
    *,
    settings: Callable[[str], EngineSettings],
    model: ModelArgument = DEFAULT_MODEL,
    model_option: ModelOption = None,
    num_prompts: CountOption = 64,
    input_len: Annotated[Lengths, lengths("a prompt")] = Lengths(128, 128),
    output_len: Annotated[Lengths, lengths("an answer")] = Lengths(64, 64),
    price_per_hour: PriceOption = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure throughput."""
    chosen = settings(model_option or model)
    work = asks(num_prompts, input_len, output_len, seed=seed)
    results = throughput(chosen, work, price_per_hour=price_per_hour)
    print(figures(results))
    asked = {
        "num_prompts": num_prompts,
        "input_len": str(input_len),
        "output_len": str(output_len),
        "price_per_hour": price_per_hour,
        "seed": seed,
    }
    keep(json, "throughput", asdict(chosen) | asked, results)
