"""What a model says, taken apart as it comes: reasoning, content, calls of tools.

Owes: the pieces that every API shows in its own shape, and the reader that makes them from text. Does not know: how
they are shown, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. index: 0, 1, ... within the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call: JSON text, whole only when all pieces are put together."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    """Takes one choice's text apart. Whatever is pushed comes out once, in order."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""

    def finish(self) -> list[Piece]:
        """What was held back; the text is over."""


class Plain:
    """A reader to which everything is content."""

    def push(self, text: str) -> list[Piece]:
        """See `Reader`."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """See `Reader`."""
        return []
