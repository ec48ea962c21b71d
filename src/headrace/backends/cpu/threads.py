"""How many threads this process should run: what its affinity and its control group's quota allow."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path

from headrace._native import allowed_processors

CGROUP = Path("/sys/fs/cgroup")
MOST = 256  # that a plan takes


def _quota_v2(text: str) -> float | None:
    """Processors that a `cpu.max` allows ("max 100000": no limit); Linux, Documentation/admin-guide/cgroup-v2.rst."""
    match text.split():
        case [quota, period] if quota.isdigit() and period.isdigit() and int(period) > 0:
            return int(quota) / int(period)
    return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None


def _own_groups(root: Path, listing: Path) -> Iterator[Path]:
    """This process's group and its parents, of the unified hierarchy; the root last."""
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("0::/"):
            inner = Path(line[len("0::/") :])
            yield from (root / p for p in (inner, *inner.parents) if p != Path("."))
    yield root


def quota(root: Path = CGROUP, listing: Path = Path("/proc/self/cgroup")) -> float | None:
    """Processors' worth of time that the control groups allow; None without a limit."""
    limits = [_quota_v1(root / "cpu")]
    for group in _own_groups(root, listing):
        try:
            limits.append(_quota_v2((group / "cpu.max").read_text()))
        except OSError:
            continue
    return min((x for x in limits if x is not None), default=None)


def default_threads() -> int:
    """From 1 to 256. A quota of 1.5 processors gives 2: a little waiting costs less than an idle half."""
    limit = quota()
    return max(1, min(MOST, allowed_processors(), ceil(limit) if limit is not None else MOST))
