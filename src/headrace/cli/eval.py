"""``headrace eval``: perplexity, distance from a reference, size and speed of models, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headrace.base.log import to_stderr
from headrace.bench.quality import Asked, Variant, evaluate
from headrace.bench.report import table
from headrace.cli.bench import JsonOption, keep
from headrace.runtime.quantize import MOST_CHARACTERS, MOST_TOKENS
from headrace.runtime.texts import MANUAL, manual, of_file

_DEFAULT = Asked("")

LEGEND = """nats: mean negative log-likelihood of a token; ppl: its exponential; KL: of a token's distribution from the
reference's, in nats; top-1: how often the most likely token is the reference's. Standard errors take tokens as
independent. Each model runs as it is served: the inputs of quantised weights are int8 on the cpu back end; with
",backend=reference" they are floats, so only the weights differ. bits: of memory, for a number in the file."""


def run(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL[,SETTING=VALUE]...",
            help="Models as for `serve`, each with any settings: smollm2-135m,kv_cache_dtype=int8",
        ),
    ],
    against: Annotated[
        str | None, typer.Option(metavar="MODEL[,SETTING=VALUE]", help="The reference that they are compared with.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text file.", show_default="Python's manual")] = None,
    tokens: Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="How much of it is read.")] = _DEFAULT.tokens,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = _DEFAULT.context,
    speed: Annotated[bool, typer.Option(help="Also measure speeds.")] = _DEFAULT.speed,
    json: JsonOption = None,
) -> None:
    """Measure models on a text."""
    to_stderr()
    most = tokens * MOST_CHARACTERS
    words = of_file(text, most, "text") if text else manual()[:most]
    asked = Asked(words, tokens, context, speed)
    variants = [Variant.of(model, context) for model in models]
    reference = None if against is None else Variant.of(against, context)
    with _bar(tokens * len(variants)) as done:
        found = evaluate(variants, reference, asked, done)
    named = str(text) if text else MANUAL
    print(f"{found['rows'][-1]['tokens']:,} tokens of {named}, in windows of {context}\n")
    print(table(shown(found["rows"])))
    print("\n" + LEGEND)
    settings = {"models": models, "against": against, "text": named, "tokens": tokens, "context": context}
    keep(json, "eval", settings, found)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str, int], None]]:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda name, tokens: progress.update(task, advance=tokens, description=name)


def shown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for people: the same columns in each, numbers with their errors."""
    columns = {name: column for name, column in _COLUMNS.items() if any(column(row) for row in rows)}
    return [{name: column(row) for name, column in columns.items()} for row in rows]


def _plain(key: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: format(row[key], form) if row.get(key) is not None else ""


def _with_error(key: str, form: str) -> Callable[[dict[str, Any]], str]:
    value, error = _plain(key, form), _plain(f"{key}_se", form.lstrip("+"))
    return lambda row: " ± ".join(filter(None, (value(row), error(row))))


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda row: row["name"],
    "MB": lambda row: f"{row['bytes'] / 1e6:,.1f}",
    "bits": _plain("bits", ".2f"),
    "nats": _with_error("nll", ".4f"),
    "ppl": _with_error("perplexity", ".3f"),
    "nats more": _with_error("nll_delta", "+.4f"),
    "KL": _with_error("kl_mean", ".5f"),
    "KL 99%": _plain("kl_p99", ".4f"),
    "KL max": _plain("kl_max", ".3f"),
    "top-1": _with_error("top1", ".2%"),
    "prompt/s": _plain("prefill_tokens_per_s", ",.0f"),
    "decode/s": _plain("decode_tokens_per_s", ",.1f"),
}
