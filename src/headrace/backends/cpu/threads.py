"""How many threads this process should run: the cores that its affinity and its control group's quota allow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import zip_longest
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


def _own_groups(root: Path, listing: Path) -> Iterator[tuple[Path, Path]]:
    """This process's groups and all above them, down to the roots: (of the unified hierarchy, of v1's cpu controller).

    A container sees its own group as the root, and in the listing a path that it has not got.
    """
    own = {"": Path("/"), "cpu": Path("/")}
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        match line.split(":", 2):
            case [_, controllers, path] if path.startswith("/"):
                own |= {name: Path(path) for name in controllers.split(",") if name in own}
    folders = ((p, *p.parents) for p in own.values())
    for unified, v1 in zip_longest(*folders, fillvalue=Path("/")):
        yield root / unified.relative_to("/"), root / "cpu" / v1.relative_to("/")


def quota(root: Path = CGROUP, listing: Path = Path("/proc/self/cgroup")) -> float | None:
    """Processors' worth of time that the control groups allow; None without a limit."""
    limits: list[float | None] = []
    for unified, v1 in _own_groups(root, listing):
        limits.append(_quota_v1(v1))
        try:
            limits.append(_quota_v2((unified / "cpu.max").read_text()))
        except OSError:
            continue
    return min((x for x in limits if x is not None), default=None)


def cores(processors: Iterable[int], system: Path = Path("/sys/devices/system/cpu")) -> int:
    """How many cores these processors belong to: the two of a core share what kernels are short of."""

    def siblings(processor: int) -> str:
        try:
            return (system / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            return str(processor)

    return len({siblings(p) for p in processors})


def default_threads() -> int:
    """From 1 to 256: one for each core that is allowed. A quota of 1.5 processors gives 2, which is the faster."""
    limit = quota()
    there = cores(os.sched_getaffinity(0)) if sys.platform == "linux" else allowed_processors()
    return max(1, min(MOST, there, ceil(limit) if limit is not None else MOST))
