"""Who is being served, and how that ends early: the client leaves, the server goes, or the engine dies.

Owes: every piece of work given to `attend` ends with its result or with an exception, and is cancelled when it does not
matter any more. Does not know: what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from headrace.base.errors import HeadraceError
from headrace.serve.errors import GoingAway

_T = TypeVar("_T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Desk:
    """Counts the open requests. Must be made on the event loop that serves."""

    def __init__(self) -> None:
        self.open = 0
        self.closing = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._cut: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()

    @contextmanager
    def seat(self) -> Iterator[None]:
        """A request is open inside. Raises GoingAway when the desk is closing, its reason when it was cut."""
        if self._cut.done():
            raise self._cut.result()
        if self.closing:
            raise GoingAway("The server is shutting down; try another one, or later.")
        with self.held():
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """A request that was let in goes on inside."""
        self.open += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self.idle.set()

    def cut(self, reason: HeadraceError) -> None:
        """End all open requests with that error, and refuse new ones with it."""
        self.closing = True
        if not self._cut.done():
            self._cut.set_result(reason)

    async def attend(self, work: Coroutine[Any, Any, _T], receive: Receive) -> _T:
        """The result of `work`, unless the client leaves first (ClientGone) or the desk is cut (its reason)."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((task, gone, self._cut), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self._cut.result() if self._cut.done() else ClientGone
        finally:
            await _end(task)
            await _end(gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancels and waits; what the task has to say then interests nobody."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
