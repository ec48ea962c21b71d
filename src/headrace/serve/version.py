"""Which Headrace this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed version, or one that says that nothing is installed."""
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "0+source"
