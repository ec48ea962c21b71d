"""What a model thinks before it answers, told apart from the answer.

Owes: reasoning and content without the marks and the white space between them, whatever way the text was cut.
Does not know: calls, tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.text.speech import Piece, Reader, Reasoning
from headrace.text.stops import overlap

SPACE = " \t\n\r"


class Thinking(NamedTuple):
    """The marks around reasoning."""

    open: str
    close: str


class ThinkReader:
    """A `Reader` of reasoning at the start; what comes after is for the reader `then`.

    opened: the prompt ends with the mark that opens it.
    reasoned: characters of the text up to the end of the reasoning.
    """

    def __init__(self, marks: Thinking, opened: bool, then: Reader) -> None:
        self._marks, self._opened, self._then = marks, opened, then
        self._text = ""  # not told yet
        self._step: Callable[[], list[Piece]] = self._before
        self._told = False
        self.reasoned = 0

    @property
    def broken(self) -> bool:
        """See `Reader`."""
        return self._then.broken

    def push(self, text: str) -> list[Piece]:
        """See `Reader`."""
        self._text += text
        return self._step()

    def finish(self) -> list[Piece]:
        """See `Reader`."""
        pieces: list[Piece] = []
        if self._step == self._before and not self._opened:
            pieces += self._answer()
        elif self._step in (self._before, self._inside):
            text = self._text if self._told else self._text.lstrip(SPACE)
            self.reasoned += len(self._text)
            pieces += [Reasoning(text)] if text else []
        return pieces + self._then.finish()

    def _before(self) -> list[Piece]:
        """Whether it thinks at all."""
        text, mark = self._text.lstrip(SPACE), self._marks.open
        if mark.startswith(text) and text != mark:
            return []
        if text.startswith(mark):
            self._take(len(self._text) - len(text) + len(mark))
        elif not self._opened:
            return self._answer()
        self._step = self._inside
        return self._inside()

    def _inside(self) -> list[Piece]:
        end = self._text.find(self._marks.close)
        sure = end if end >= 0 else len(self._text) - overlap(self._text, self._marks.close)
        told = self._text[:sure].rstrip(SPACE)
        self._take(len(told))
        told = told if self._told else told.lstrip(SPACE)
        self._told = self._told or bool(told)
        pieces: list[Piece] = [Reasoning(told)] if told else []
        if end < 0:
            return pieces
        self._take(self._text.find(self._marks.close) + len(self._marks.close))
        self._step = self._between
        return pieces + self._between()

    def _between(self) -> list[Piece]:
        """White space before the answer."""
        self._text = self._text.lstrip(SPACE)
        return self._answer() if self._text else []

    def _answer(self) -> list[Piece]:
        self._step = self._answer
        text, self._text = self._text, ""
        return self._then.push(text) if text else []

    def _take(self, size: int) -> None:
        self._text = self._text[size:]
        self.reasoned += size
