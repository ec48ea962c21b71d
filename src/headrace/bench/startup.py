"""From a process's start to its first token, and the parts of that; a fresh process each time, its files in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from headrace.base.errors import EngineError
from headrace.base.settings import EngineSettings

SCRIPT = Path(__file__).with_name("first.py")
PARTS = ("interpreter", "import", "load", "first_token")


def measured(settings: EngineSettings, *, rounds: int, prompt: int = 16) -> dict[str, Any]:
    """Seconds, medians of `rounds` after one that warms the file cache. total: of the whole, not of the parts."""
    runs = [_once(settings, prompt) for _ in range(rounds + 1)][1:]
    return {"rounds": rounds, **{name: median(run[name] for run in runs) for name in (*PARTS, "total")}}


def _once(settings: EngineSettings, prompt: int) -> dict[str, float]:
    command = [sys.executable, "-P", str(SCRIPT), json.dumps(asdict(settings)), str(prompt)]
    started = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise EngineError(f"a fresh process ended with code {ran.returncode}: {ran.stderr.strip().splitlines()[-1:]}")
    at = json.loads(ran.stdout)
    times = [started, at["began"], at["imported"], at["loaded"], at["first"]]
    parts = {name: after - before for name, before, after in zip(PARTS, times, times[1:], strict=False)}
    return {**parts, "total": at["first"] - started}
