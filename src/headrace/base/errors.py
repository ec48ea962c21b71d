"""The exception tree. Who made the mistake decides the class; the message says what to change.

HeadraceError
├── RequestError(ValueError)     the caller's mistake: names the field at fault (`param`)
│   ├── UnknownModel             the request names a model that is not served here
│   └── ContextTooLong           prompt (and what is to be generated) exceed the context
├── SettingError(ValueError)     a setting of the engine or the command line that cannot work
├── ModelNotFound                a model reference that leads nowhere
├── DownloadError                a fetch that failed: network, disk full, hash differs
├── BadModelFile                 a file that is damaged, hostile or not supported
├── CapacityError                right, but more than fits now: memory, queue, the caller's time
├── DeadlinePassed               the caller's time is over, and nothing has been said
└── EngineError                  our bug, or the engine process died
    └── EngineAway               it died, and is being started again
"""

from __future__ import annotations

from pathlib import Path


class HeadraceError(Exception):
    """Root of all that this project raises on purpose."""


class RequestError(HeadraceError, ValueError):
    """A request that cannot be served as asked.

    param: the field at fault, as the client spelled it (``"top_p"``), or None.
    code: a slug that programs can compare (``"context_length_exceeded"``), or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModel(RequestError):
    """The request names a model that is not served here."""


class ContextTooLong(RequestError):
    """The prompt, or the prompt and what is to be generated, exceed the context."""


class SettingError(HeadraceError, ValueError):
    """An engine setting that cannot work; `param` names it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(HeadraceError):
    """A model reference that leads to no model."""


class DownloadError(HeadraceError):
    """A download that did not arrive whole; nothing half-written is left behind."""


class BadModelFile(HeadraceError):
    """A model file that is damaged, hostile, incomplete or of a kind that is not supported."""

    def __init__(self, file: str | Path, reason: str, *, tensor: str | None = None) -> None:
        self.file = str(file)
        self.tensor = tensor
        self.reason = reason
        where = f"{file}: tensor {tensor!r}" if tensor else str(file)
        super().__init__(f"{where}: {reason}")


class CapacityError(HeadraceError):
    """A right request that does not fit: memory, pages, queue.

    retry_after: seconds after which it probably will; None: it is no use to try again as things are.
    """

    def __init__(self, message: str, *, code: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class DeadlinePassed(HeadraceError):
    """The time that the caller gave is over before there was a first token."""


class EngineError(HeadraceError):
    """Our own mistake, or an engine process that died."""


class EngineAway(EngineError):
    """The engine process died and is being started again."""

    def __init__(self, message: str = "The engine is being restarted; try again soon.") -> None:
        super().__init__(message)
