"""What a model says, taken apart as it comes: reasoning, content, calls of tools.

Owes: the pieces that every API shows in its own shape, and the reader that makes them from text. Does not know: how
they are shown, tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Call:
    """What pieces say of one call. name: "" if it began before them."""

    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Spoken:
    """Pieces put together. calls: by their index."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)


def gathered(pieces: Sequence[Piece]) -> Spoken:
    """All that these pieces say, in time linear in them."""
    calls: dict[int, Call] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls[piece.index] = Call(piece.name)
        elif isinstance(piece, CallArguments):
            calls.setdefault(piece.index, Call())
            arguments.setdefault(piece.index, []).append(piece.text)
    for index, texts in arguments.items():
        calls[index].arguments = "".join(texts)
    return Spoken(_joined(pieces, Content), _joined(pieces, Reasoning), calls)


def _joined(pieces: Sequence[Piece], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


class Reader(Protocol):
    """Takes one choice's text apart. Whatever is pushed comes out once, in order.

    reasoned: characters of the text up to the end of its reasoning. broken: a call was told whose arguments broke off.
    """

    reasoned: int

    @property
    def broken(self) -> bool:
        """See the class."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""

    def finish(self) -> list[Piece]:
        """What was held back; the text is over."""


class Plain:
    """A reader to which everything is content."""

    reasoned = 0
    broken = False

    def push(self, text: str) -> list[Piece]:
        """See `Reader`."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """See `Reader`."""
        return []
