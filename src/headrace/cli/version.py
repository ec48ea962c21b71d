"""``headrace version``."""

from __future__ import annotations

from importlib import metadata


def run() -> None:
    """The installed version."""
    try:
        print(metadata.version("headrace"))
    except metadata.PackageNotFoundError:
        print("0+source")
