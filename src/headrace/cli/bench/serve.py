"""``headrace bench serve``: what clients of a server see, under a load of one's own choice."""

from __future__ import annotations

import json as jsons
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from headrace.base.errors import SettingError
from headrace.base.goals import parse_goals
from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.bench.client import Target
from headrace.bench.load import ENDPOINTS, Api, measured
from headrace.bench.report import figures
from headrace.bench.served import served
from headrace.bench.work import Lengths, asks
from headrace.cli.bench import CountOption, JsonOption, PriceOption, SeedOption, keep, lengths
from headrace.cli.flags import ManyValues, ModelOption, as_arguments, with_engine

KIND = ManyValues


def _endpoint(text: str) -> str:
    if text not in ENDPOINTS:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(ENDPOINTS)}")
    return text


def _object(text: str | dict[str, Any]) -> dict[str, Any]:
    try:
        value = jsons.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter('it must be an object, such as {"top_p": 0.9}')
    return value


@with_engine
def run(
    *,
    settings: Callable[[str], EngineSettings],
    model: Annotated[
        str | None,
        typer.Argument(help="Without --base-url: the model to serve. With it: its name there, or the first it lists."),
    ] = None,
    model_option: ModelOption = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A running server (its key: OPENAI_API_KEY in the environment); without it one of our own is started.",
        ),
    ] = None,
    endpoint: Annotated[str, typer.Option(parser=_endpoint, metavar="|".join(ENDPOINTS))] = ENDPOINTS[0],
    num_prompts: CountOption = 64,
    input_len: Annotated[Lengths, lengths("a prompt")] = Lengths(128, 128),
    output_len: Annotated[Lengths, lengths("an answer")] = Lengths(64, 64),
    prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, besides.")] = 0,
    request_rate: Annotated[float, typer.Option(help="Requests a second; inf: all at once.")] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="Of arrivals: 1 is a Poisson process, less is burstier, inf is a fixed interval.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests open at most.", show_default="no limit")
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests that go before and do not count.")] = 1,
    goodput: Annotated[
        list[str], typer.Option(metavar="NAME:MS", help="What a good answer keeps to: ttft:200 tpot:50 e2el:5000.")
    ] = [],  # noqa: B006
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length, ends or not.")] = True,
    extra_body: Annotated[
        dict[str, Any], typer.Option(parser=_object, metavar="JSON", help="More fields of each request.")
    ] = {},  # noqa: B006
    price_per_hour: PriceOption = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure a server. The key of OPENAI_API_KEY is sent to --base-url."""
    name, goals = model_option or model, parse_goals(goodput)
    chosen = settings(name or DEFAULT_MODEL)
    work = asks(
        num_prompts, input_len, output_len, prefix=prefix_len, rate=request_rate, burstiness=burstiness, seed=seed
    )
    price = [] if price_per_hour is None else ["--price-per-hour", str(price_per_hour)]
    with _server(base_url, as_arguments(chosen) + price, None if base_url is None else name) as (url, served_name):
        api = Api(
            target=Target.of(url),
            endpoint=endpoint,
            model=served_name,
            api_key=os.environ.get("OPENAI_API_KEY") if base_url else None,
            ignore_eos=ignore_eos,
            extra=extra_body,
        )
        results = measured(api, work, concurrency=max_concurrency, warmups=num_warmups, goals=goals)
    print(figures(results))
    for error, count in results["errors"].items():
        typer.echo(f"{count} failed: {error}", err=True)
    asked = {
        "base_url": base_url,
        "endpoint": endpoint,
        "num_prompts": num_prompts,
        "input_len": str(input_len),
        "output_len": str(output_len),
        "prefix_len": prefix_len,
        "request_rate": str(request_rate),
        "burstiness": str(burstiness),
        "max_concurrency": max_concurrency,
        "goodput": goals,
        "extra_body": extra_body,
        "price_per_hour": price_per_hour,
        "seed": seed,
    }
    keep(json, "serve", ({"model": name} if base_url else asdict(chosen)) | asked, results)
    if not results["completed"]:
        raise typer.Exit(1)


@contextmanager
def _server(base_url: str | None, arguments: list[str], name: str | None) -> Iterator[tuple[str, str | None]]:
    """(address, the model's name there, if known)."""
    if base_url is None:
        with served(arguments) as url:
            yield url, name
        return
    if len(arguments) > 1:
        raise SettingError(f"{arguments[1]} is for a server of our own: leave it out with --base-url")
    yield base_url, name
