"""Stop strings in a stream of text.

Owes: the text before the first stop, released as early as it can be. Does not know: tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.errors import RequestError


class StopStrings:
    """Watches one stream for stop strings.

    The stop that is complete first wins (of two that end together, the longer), so the result does not depend on how
    the text was cut into pieces. Held back is only the longest end of the text that is the beginning of some stop.
    include: the stop itself is part of the text; nothing needs to be held back then.
    min_chars: stops that end within the first `min_chars` characters do not count.
    Raises RequestError for an empty stop.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, min_chars: int = 0) -> None:
        if not all(stops):
            raise RequestError("A stop string must not be empty.", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include
        self._immune = min_chars  # no stop may end within so many characters from the start of the buffer
        self._buffer = ""  # text that may begin a stop
        self._given = 0  # characters of the buffer that are out already

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit, the stop that was found or None). After a stop was found the stream is over."""
        buffer = self._buffer + text
        given = self._given
        if found := self._first(buffer):
            start, stop = found
            self._buffer, self._given = "", 0
            return buffer[given : start + len(stop) if self._include else start], stop
        keep = max((overlap(buffer, stop) for stop in self._stops), default=0)
        cut = len(buffer) - keep
        self._buffer = buffer[cut:]
        self._immune = max(0, self._immune - cut)
        self._given = keep if self._include else 0
        return buffer[given:] if self._include else buffer[given:cut], None

    def finish(self) -> str:
        """All text that is still held back."""
        rest, self._buffer, self._given = self._buffer[self._given :], "", 0
        return rest

    def _first(self, buffer: str) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, self._immune + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and best[1:]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
