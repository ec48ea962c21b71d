"""What a model's quality was measured to be, in a file beside it: ``model.gguf.eval.json``.

Owes: a figure is told only for the very bits it was measured on (`measured` is keyed by what decides them), and a file
that is damaged, huge or somebody's joke is ignored with a line in the log. Does not know how quality is measured.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from headrace.base.errors import SettingError
from headrace.base.log import log, shown

MOST_BYTES, MOST_NAME, _MOST_MEASURED = 1 << 18, 200, 64
_FINGERPRINT = 64  # digits of a checkpoint's, with which an identity begins
_Positive = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_Name = Annotated[str, msgspec.Meta(max_length=MOST_NAME)]


class Quality(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On `tokens` predicted tokens of `text`, beside the model `against`.

    kl_mean, kl_p99: nats, of a token's distribution from that model's: the mean, the 99th percentile. top1: how often
    the most likely token is that model's.
    """

    perplexity: _Positive
    kl_mean: _Positive
    kl_p99: _Positive
    top1: Annotated[float, msgspec.Meta(ge=0, le=1)]
    against: _Name
    text: _Name
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


class _Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    headrace_eval: Annotated[int, msgspec.Meta(ge=1, le=1)]
    measured: Annotated[dict[str, Quality], msgspec.Meta(max_length=_MOST_MEASURED)]


def beside(model: Path) -> Path:
    """Where the report of a model's file or folder lies."""
    given = Path(os.path.abspath(model))
    return given.parent / f"{given.name}.eval.json"


def quality_of(model: Path, identity: str) -> Quality | None:
    """What was measured of the model when `identity` decided its bits; None if nothing was, or nobody can read it."""
    report = _read(beside(model))
    if report is None:
        return None
    if not any(key.startswith(identity[:_FINGERPRINT]) for key in report.measured):
        log.warning("%s: is of another file and is ignored; `headrace eval --save` measures this one", beside(model))
    elif identity not in report.measured:
        log.info("%s: has no figures for these settings; `headrace eval --save` with them adds some", beside(model))
    return report.measured.get(identity)


def save_quality(model: Path, identity: str, quality: Quality) -> Path:
    """Adds a measurement to the model's report, and says where it lies; those of another file under its name go.

    SettingError if it cannot be written.
    """
    path = beside(model)
    report, file = _read(path), identity[:_FINGERPRINT]
    others = () if report is None else report.measured.items()
    kept = [(key, found) for key, found in others if key.startswith(file) and key != identity]
    made = _Report(1, {**dict(kept[1 - _MOST_MEASURED :]), identity: quality})
    half = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        half.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise SettingError(f"{path} cannot be written: {error.strerror}", param="save") from None
    return path


def _read(path: Path) -> _Report | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return msgspec.json.decode(data, type=_Report)
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s: is no report of `headrace eval` and is ignored: %s", path, shown(str(error)))
        return None
