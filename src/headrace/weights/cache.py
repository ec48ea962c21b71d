"""Where fetched models lie, how they get there whole or not at all, and what a reference led to the last time.

Owes: temporary names until a file is complete and checked, and plain words for a full disk. Does not know where files
come from.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.base.errors import DownloadError

VARIABLE = "HEADRACE_CACHE"
_FULL = {errno.ENOSPC: "there is no space left on the disk", errno.EDQUOT: "the disk quota is used up"}


def cache_folder() -> Path:
    """The folder ``models`` in $HEADRACE_CACHE or ~/.cache/headrace."""
    chosen = os.environ.get(VARIABLE)
    return (Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "headrace") / "models"


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A temporary folder on the disk of `target`, gone afterwards whatever happens; OSError becomes DownloadError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".arriving-", dir=target.parent, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        raise failed(target.name, target.parent, error) from error


def failed(what: str, folder: Path, error: OSError) -> DownloadError:
    full = _FULL.get(error.errno or 0)
    cause = f"{full}. Make room, or" if full else f"{error.strerror or error}. Let this user write there, or"
    return DownloadError(f"{what}: cannot be stored in {folder}: {cause} choose another folder with {VARIABLE}")


def digest_of(path: Path) -> str:
    """The file's sha256 as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link(target: Path, path: Path) -> Path:
    """Make `target` another name of `path`, and return it."""
    with staging(target) as folder:
        draft = folder / target.name
        draft.symlink_to(path.absolute())
        draft.replace(target)
    return target


def recall(reference: str) -> Path | None:
    """What `reference` led to, if all files that belonged to it are still there."""
    try:
        record = json.loads(_record(reference).read_text())
        path = Path(record["path"])
        return path if all(Path(file).is_file() for file in record["files"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none, or one that somebody else wrote: as if it had never been fetched


def remember(reference: str, path: Path, files: Sequence[Path]) -> None:
    record = _record(reference)
    with staging(record) as folder:
        draft = folder / record.name
        draft.write_text(json.dumps({"reference": reference, "path": str(path), "files": [str(f) for f in files]}))
        draft.replace(record)


def _record(reference: str) -> Path:
    return cache_folder() / "hub" / f"{hashlib.sha256(reference.encode()).hexdigest()[:32]}.json"
