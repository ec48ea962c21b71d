"""The project's logger. Nobody configures it on import: programs call `to_stderr` once."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("headrace")


class _Line(logging.Formatter):
    """One line a record, whatever a client sent: control characters are escaped, so that lines cannot be forged."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        head, *rest = text.split("\n")
        lines = [head, *rest] if record.exc_info else [text.replace("\n", "\\n")]
        return "\n".join("".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line) for line in lines)


def to_stderr(level: int = logging.INFO) -> None:
    """Write the project's records to standard error, once however often it is called."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Line("%(levelname)s %(asctime)s %(message)s", datefmt="%H:%M:%S"))
        log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False


def shown(value: object, limit: int = 200) -> str:
    """A value for a log line or a message: escaped and cut."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
