"""The project's logger. Nobody configures it on import: programs call `to_stderr` once.

Owes: one line a record, for people or as JSON, that nobody's text can forge. Does not know: what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("headrace")


def note(message: str, **fields: object) -> None:
    """An information line with fields: ``message key=value ...``, or members of the line's JSON object."""
    log.info(message, extra={"fields": fields})


class _Line(logging.Formatter):
    """One line a record, whatever a client sent: control characters are escaped, so that lines cannot be forged."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        head, *rest = text.split("\n")
        lines = [head, *rest] if record.exc_info else [text.replace("\n", "\\n")]
        lines[0] += "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        return "\n".join("".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line) for line in lines)


def _plain(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


class _Json(logging.Formatter):
    """One JSON object a line, in ASCII: time (RFC 3339, UTC), level, message, the fields, and a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


FORMATS: Mapping[str, Callable[[], logging.Formatter]] = {"human": _Line, "json": _Json}


def to_stderr(level: int = logging.INFO, form: str = "human", *, others: bool = False) -> None:
    """Write the project's records to standard error, once however often it is called.

    form: of FORMATS. others: also what libraries warn of, and Python itself, in the same form.
    """
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(FORMATS[form]())
        log.addHandler(handler)
        if others:
            logging.getLogger().addHandler(handler)
            logging.captureWarnings(True)
    log.setLevel(level)
    log.propagate = False


def shown(value: object, most: int = 200) -> str:
    """A caller's value for a message or a log line: escaped and cut, whatever it holds; of what is no text its type."""
    text = value if isinstance(value, str) else type(value).__name__
    cut = text if len(text) <= most else text[:most] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
