"""``headrace quantize``: a smaller copy of a model, as a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from headrace.base.log import to_stderr
from headrace.cli.terminal import note
from headrace.quant.encode import CODINGS
from headrace.quant.recipes import RECIPES
from headrace.runtime.load import prepare
from headrace.runtime.quantize import METHODS, Plan, QuantizeSettings, quantize_model
from headrace.weights import resolve

_DEFAULT = QuantizeSettings()


class _Bars:
    """A bar for the text that is run (again for each group of weights), one for what is written."""

    def __init__(self, progress: Progress, tokens: int) -> None:
        self._progress = progress
        self._text = progress.add_task("calibrating", total=tokens, visible=False)
        self._file = progress.add_task("writing", total=None)

    def calibrated(self, tokens: int) -> None:
        if self._progress.tasks[0].finished:
            self._progress.reset(self._text)
        self._progress.update(self._text, advance=tokens, visible=True)

    def written(self, nbytes: int, total: int) -> None:
        self._progress.update(self._file, advance=nbytes, total=total)


@contextmanager
def _bars(tokens: int) -> Iterator[_Bars]:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bars(progress, tokens)


def run(
    src: Annotated[str, typer.Argument(help="The model, named as for `serve`; its weights should be floats.")],
    dst: Annotated[Path, typer.Argument(help="The .gguf file to write.")],
    to: Annotated[str, typer.Option(metavar="|".join(CODINGS), help="The format of most matrices.")] = _DEFAULT.to,
    recipe: Annotated[
        str, typer.Option(metavar="|".join((*RECIPES, "FILE.json")), help="Which tensors get another format.")
    ] = _DEFAULT.recipe,
    method: Annotated[
        str,
        typer.Option(metavar="|".join(METHODS), help="plain: round; others: fitted to what the model reads."),
    ] = _DEFAULT.method,
    calibration: Annotated[
        Path | None, typer.Option(help="A text like those that the model will read.", show_default="Python's manual")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="How much of it is run.")] = _DEFAULT.calibration_tokens,
    calibration_mib: Annotated[int, typer.Option(help="Memory for what is learnt from it at a time.")] = 1024,
    smoothing: Annotated[
        float | None,
        typer.Option(
            help="How much large and small inputs of linears are made alike, 0 to 1; not by `plain`.",
            show_default="0.5 for q8_0, else 0",
        ),
    ] = _DEFAULT.smoothing,
    threads: Annotated[int, typer.Option(help="0: what the machine allows.")] = 0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub repository.")] = None,
    allow_requantize: Annotated[bool, typer.Option("--allow-requantize", help="Take quantised weights, too.")] = False,
) -> None:
    """Write a quantised copy of a model, and say what it holds."""
    to_stderr()
    settings = QuantizeSettings(
        to=to,
        recipe=recipe,
        method=method,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        calibration_bytes=calibration_mib << 20,
        smoothing=smoothing,
        threads=threads,
        allow_requantize=allow_requantize,
    )
    prepared = prepare(resolve(src, revision=revision))
    with _bars(settings.calibration_tokens) as bars:
        made = quantize_model(prepared, dst, settings, bars)
    _tell(dst, made)


def _tell(dst: Path, made: Plan) -> None:
    for wanted, taken in sorted({(p.wanted.name, p.head.format.name) for p in made.replaced}):
        names = [p.head.name for p in made.replaced if (p.wanted.name, p.head.format.name) == (wanted, taken)]
        note(f"{len(names)} tensors are {taken}: their rows are no whole blocks of {wanted} ({names[0]}, ...)")
    print(f"{dst}: {dst.stat().st_size:,} bytes, {made.bits:.2f} bits a weight")
