"""The streams of one request's prompts, as one.

Owes: news in the order of their coming, failures as exceptions, and an abort of everything when nobody reads on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Protocol

from headrace.base.errors import DeadlinePassed, HeadraceError, RequestError
from headrace.core.sequence import DEAD_ENDS, TIMEOUT
from headrace.serve.errors import Broken, GoingAway
from headrace.serve.watch.metrics import Metrics

if TYPE_CHECKING:
    from headrace.engine.client import Stream
    from headrace.engine.output import Delta


def _bad_end(delta: Delta) -> HeadraceError | None:
    """What is said of a choice that did not end well."""
    if delta.finish_reason == "abort":
        return GoingAway(delta.error or "The request was aborted.")
    if delta.finish_reason != "error":
        return None
    if delta.error in DEAD_ENDS:
        return RequestError(f"The answer cannot go on: {delta.error}.", code="dead_end")
    return Broken(delta.error or "The request failed inside the engine; others are not affected.")


def _timed_out(delta: Delta) -> bool:
    return delta.finish_reason == "length" and delta.stop_reason == TIMEOUT


class Watcher(Protocol):
    """Keeps what it hears of a request: its line in the log, its trace. The end may come more than once."""

    def saw(self, prompt: int, deltas: Sequence[Delta]) -> None: ...

    def failed(self, error: Exception) -> None: ...

    def close(self) -> None: ...


class News:
    """What the engine brings for the prompts of a request. Closing it aborts whatever still runs.

    price_per_hour: of the machine; None: it has none. watchers: hear of all of it.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        metrics: Metrics,
        price_per_hour: float | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self._watchers = watchers
        self.streams = streams
        self.price_per_hour = price_per_hour
        self._metrics = metrics

    async def __aiter__(self) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        """(which prompt, what is new). Raises Broken, GoingAway, RequestError or EngineError when a choice did not
        end well.

        DeadlinePassed when the time was over before any choice had a token; else what there is stays.
        """
        try:
            async with aclosing(self._spoken()) as news:
                async for item in news:
                    yield item
        except Exception as error:
            for watcher in self._watchers:
                watcher.failed(error)
            raise

    async def _spoken(self) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        silent: list[tuple[int, list[Delta]]] | None = []  # ends without a word, until there is one
        async with aclosing(self._one(0) if len(self.streams) == 1 else self._several()) as news:
            async for item in news:
                for watcher in self._watchers:
                    watcher.saw(*item)
                if silent is not None:
                    if all(_timed_out(delta) and not delta.token_ids for delta in item[1]):
                        silent.append(item)
                        continue
                    for held in silent:
                        yield held
                    silent = None
                yield item
        if silent:
            raise DeadlinePassed("The request's time was over before its first token.")

    async def aclose(self) -> None:
        """Aborts what still runs."""
        for stream in self.streams:
            await stream.aclose()
        for watcher in self._watchers:
            watcher.close()

    async def _one(self, prompt: int) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        async with aclosing(self._metrics.follow(self.streams[prompt])) as news:
            async for deltas in news:
                for delta in deltas:
                    if (error := _bad_end(delta)) is not None:
                        raise error
                yield prompt, deltas

    async def _several(self) -> AsyncGenerator[tuple[int, list[Delta]], None]:
        queue: asyncio.Queue[tuple[int, list[Delta]] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._forward(i, queue)) for i in range(len(self.streams))]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, prompt: int, queue: asyncio.Queue[tuple[int, list[Delta]] | Exception | None]) -> None:
        try:
            async for item in self._one(prompt):
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
