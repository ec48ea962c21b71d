"""A progress bar on standard error, if somebody is looking at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bar(what: str, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes done so far. Nothing is drawn unless `shown` and on a terminal."""
    console = Console(stderr=True)
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
