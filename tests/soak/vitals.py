"""What a process holds, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Vitals:
    """Of one process. memory: bytes of its own, in RAM or swapped out, which RSS would hide."""

    memory: int
    files: int
    threads: int


def vitals(pid: int) -> Vitals:
    """As they are now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    own = 1024 * (int(told["RssAnon"][0]) + int(told["VmSwap"][0]))
    return Vitals(own, len(os.listdir(f"/proc/{pid}/fd")), int(told["Threads"][0]))


def middle(values: Iterable[int]) -> int:
    """The median."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def now() -> float:
    return time.monotonic()
