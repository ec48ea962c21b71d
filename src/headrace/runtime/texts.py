"""Texts to run a model on: Python's own documentation, which is everywhere, or a file."""

from __future__ import annotations

import platform
import pydoc_data.topics
from pathlib import Path

from headrace.base.errors import SettingError

MANUAL = f"pydoc_data.topics of Python {platform.python_version()}"


def manual(*, last_first: bool = False) -> str:
    """The chapters of Python's documentation, by their names. Whoever calibrates takes the last ones, others begin
    at the front."""
    chapters = list(pydoc_data.topics.topics.values())
    return "\n\n".join(reversed(chapters) if last_first else chapters)


def of_file(path: Path, characters: int, param: str) -> str:
    """The beginning of a text file in UTF-8. SettingError, with `param`, for one that cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(characters)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingError(f"{param} {str(path)!r} cannot be read: {reason}", param=param) from None
