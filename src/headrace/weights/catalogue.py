"""The short list of models that have a name of their own, pinned by sha256."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

DEFAULT = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Entry:
    """file: its name in the cache. hub: a reference, or empty. packages, members: parts of that file in order.

    bytes, sha256: of the file.
    """

    name: str
    about: str
    file: str
    hub: str
    packages: tuple[str, ...]
    members: tuple[str, ...]
    bytes: int
    sha256: str


def catalogue() -> dict[str, Entry]:
    table = tomllib.loads(resources.files(__package__).joinpath("catalogue.toml").read_text("utf-8"))
    return {
        name: Entry(
            name,
            entry["about"],
            entry["file"],
            entry["hub"],
            tuple(entry["packages"]),
            tuple(entry["members"]),
            entry["bytes"],
            entry["sha256"],
        )
        for name, entry in table.items()
    }
