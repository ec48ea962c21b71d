"""Writing to people: text as it comes, without what would drive their terminal."""

from __future__ import annotations

import sys
from typing import TextIO

_KEPT = "\n\t"


def prepare(stream: TextIO) -> TextIO:
    """A stream on which any text can be written: what its encoding lacks shows as ``?``."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return stream


def write(text: str, stream: TextIO) -> None:
    """At once. On a terminal, control characters (escape sequences) are shown, not obeyed."""
    stream.write(visible(text) if stream.isatty() else text)
    stream.flush()


def visible(text: str) -> str:
    """Control characters, other than newline and tab, as their escapes."""
    return "".join(c if c.isprintable() or c in _KEPT else c.encode("unicode_escape").decode("ascii") for c in text)


def note(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)
