"""Model references: what a user may call a model, and the path that it leads to.

    smollm2-135m                       a name of the catalogue
    path/to/model.gguf                 a file (the first of a split set), or
    path/to/folder                     a folder; what exists is meant before anything else of that name
    org/name                           a repository of the hub; GGUF by preference of quantisation, or safetensors
    org/name:Q4_K_M                    ... that quantisation
    org/name:file.gguf                 ... that file
    org/name@revision                  ... a branch, tag or commit; combines with both
    hf.co/org/name                     the same; so does https://huggingface.co/org/name
    pypi:package[==version][,...]      wheels of the package index that hold the parts of a GGUF file

Owes: a path on this machine, at once if it was fetched before. Does not know what is in the files.
"""

from __future__ import annotations

import re
from pathlib import Path

from headrace.base.errors import DownloadError, HeadraceError, ModelNotFound, SettingError
from headrace.weights.cache import cache_folder, link
from headrace.weights.catalogue import Entry, catalogue
from headrace.weights.hub import PROBE, HubModel, fetch_model
from headrace.weights.pypi import Wheels, default_target, fetch_wheels, parse_packages

_HUB = re.compile(
    r"(https?://)?((www\.)?(hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)/?"
    r"(@(?P<before>[^:@\s]+))?(:(?P<pick>[^:@\s]+))?(@(?P<after>[^:@\s]+))?"
)
_PYPI = "pypi:"

Source = Path | HubModel | Wheels | Entry


def parse_reference(reference: str, revision: str | None = None) -> Source:
    """Where `reference` points; never asks the network. ModelNotFound if it can be nothing."""
    text = reference.strip()
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    if text.startswith(_PYPI):
        return parse_packages(text.removeprefix(_PYPI))
    entry = catalogue().get(text)
    if entry is not None:
        return entry
    match = _HUB.fullmatch(text)
    if match is None or _is_path(text):
        raise ModelNotFound(_unknown(text))
    return HubModel(match["repo"], _one_revision(reference, match["before"], match["after"], revision), match["pick"])


def resolve(reference: str, *, revision: str | None = None, progress: bool = True) -> Path:
    """The file or folder that `reference` leads to, fetched if it is not here yet.

    revision: of a hub repository, as if written behind ``@``. progress: draw bars on a terminal.
    ModelNotFound if there is no such model, DownloadError if it could not be fetched.
    """
    source = parse_reference(reference, revision)
    if isinstance(source, Path):
        return source
    if isinstance(source, Entry):
        return _fetch_entry(source, progress)
    if isinstance(source, Wheels):
        return fetch_wheels(source, default_target(source), progress)
    return fetch_model(source, progress)


def pull(reference: str, *, revision: str | None = None) -> Path:
    """`resolve`, with bars: for who waits at a terminal."""
    return resolve(reference, revision=revision, progress=True)


def _is_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or (text.lower().endswith(".gguf") and ":" not in text)


def _unknown(text: str) -> str:
    if _is_path(text):
        return f"{text}: no such file or folder"
    names = ", ".join(catalogue())
    return f"{text!r}: no such model; give a .gguf file, a folder, org/name of the hub, pypi:package, or one of {names}"


def _one_revision(reference: str, *given: str | None) -> str | None:
    revisions = {revision for revision in given if revision}
    if len(revisions) > 1:
        named = " and ".join(sorted(revisions))
        raise SettingError(f"{reference}: two revisions are asked for, {named}; give one", param="revision")
    return revisions.pop() if revisions else None


def _fetch_entry(entry: Entry, shown: bool) -> Path:
    """From the hub if it has the very file, else from the package index; both reasons if neither works."""
    target = cache_folder() / entry.file
    if target.is_file() and target.stat().st_size == entry.bytes:
        return target
    refused = "the hub does not have it"
    if entry.hub:
        try:
            return link(target, _fetch_hub(entry, shown))
        except HeadraceError as error:
            refused = str(error)
    wheels = Wheels(entry.packages, entry.members, entry.bytes, entry.sha256)
    try:
        return fetch_wheels(wheels, target, shown)
    except DownloadError as error:
        raise DownloadError(f"{entry.name}: {error} (before that: {refused})") from error


def _fetch_hub(entry: Entry, shown: bool) -> Path:
    source = parse_reference(entry.hub)
    assert isinstance(source, HubModel), entry.hub
    return fetch_model(source, shown, patience=PROBE, sha256=entry.sha256)
