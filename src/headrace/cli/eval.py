"""``headrace eval``: perplexity, distance from a reference, size and speed of models, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headrace.base.errors import SettingError
from headrace.base.log import to_stderr
from headrace.bench.plot import draw
from headrace.bench.quality import Asked, Variant, evaluate
from headrace.bench.quality import save as kept
from headrace.bench.report import table, write_text
from headrace.cli.bench import JsonOption, keep
from headrace.cli.terminal import note
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
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT,...",
            help="Measure MODEL rounded to each of these as it is loaded, against itself if not --against another.",
        ),
    ] = None,
    speed: Annotated[bool, typer.Option(help="Also measure speeds.")] = _DEFAULT.speed,
    save: Annotated[
        bool,
        typer.Option("--save", help="Keep the figures beside each model; when it is served, /v1/models tells them."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw quality over size and speed.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure models on a text."""
    to_stderr()
    most = tokens * MOST_CHARACTERS
    words = of_file(text, most, "text") if text else manual()[:most]
    asked = Asked(words, tokens, context, speed)
    if formats is not None:
        models, against = _rounded(models, formats), against or models[0]
    variants = [Variant.of(model, context) for model in models]
    reference = None if against is None else Variant.of(against, context)
    if save and reference is None:
        raise SettingError("save: figures are kept beside those of a reference; say which with --against", param="save")
    with _bar(tokens * len(variants)) as done:
        found = evaluate(variants, reference, asked, done)
    named = text.name if text else MANUAL
    print(f"{found['rows'][-1]['tokens']:,} tokens of {named}, in windows of {context}\n")
    print(table(shown(found["rows"])))
    print("\n" + LEGEND)
    settings = {"models": models, "against": against, "text": named, "tokens": tokens, "context": context}
    keep(json, "eval", settings, found)
    if plot is not None:
        write_text(plot, draw(found["rows"], named), "plot")
        note(f"written: {plot}")
    if save and reference is not None:
        _save(variants, found["rows"][1:], reference, named)


def _save(variants: Sequence[Variant], rows: Sequence[dict[str, Any]], against: Variant, text: str) -> None:
    written = [kept(variant, row, against, text) for variant, row in zip(variants, rows, strict=True)]
    for path in dict.fromkeys(written):
        note(f"written: {path}")


def _rounded(models: Sequence[str], formats: str) -> list[str]:
    """Each model in each format."""
    if len(models) > 1:
        raise SettingError("formats: one model at a time; write MODEL,quantization=FORMAT for others", param="formats")
    return [f"{models[0]},quantization={name}" for name in formats.split(",")]


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
