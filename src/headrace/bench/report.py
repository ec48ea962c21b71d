"""What measurements have in common: quantiles, tables for people, JSON with the machine described."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace import __version__
from headrace.base.errors import SettingError

PERCENTILES = (50, 90, 99)
_QUANTILE = re.compile(r"(mean|median|std|p\d+)_(\w+)_ms")


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds: ``mean_NAME_ms``, ``median_NAME_ms``, ``std_NAME_ms``, ``p50_NAME_ms`` ...; {} of nothing."""
    if not seconds:
        return {}
    ms = 1e3 * np.asarray(seconds)
    told = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
    told |= {f"p{p}": np.percentile(ms, p) for p in PERCENTILES}
    return {f"{key}_{name}_ms": float(value) for key, value in told.items()}


def per_million(prompt: float, completion: float, prompt_tokens: int, completion_tokens: int) -> dict[str, float]:
    """Dollars for a million tokens of either kind, from what all of them cost."""
    return {
        "usd_per_million_prompt_tokens": 1e6 * prompt / max(prompt_tokens, 1),
        "usd_per_million_completion_tokens": 1e6 * completion / max(completion_tokens, 1),
    }


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, load, versions and the time."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "headrace": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(path: Path, bench: str, settings: Mapping[str, Any], results: Any) -> None:
    """A JSON file: the bench, the machine, the settings and the results. SettingError if it cannot be written."""
    told = {"bench": bench, "machine": machine(), "settings": dict(settings), "results": results}
    write_text(path, json.dumps(told, indent=1) + "\n", "json")


def write_text(path: Path, text: str, param: str) -> None:
    """A file, and its folder if need be. SettingError, with `param`, if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingError(f"results cannot be written to {path}: {error.strerror}", param=param) from None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys, under their keys; numbers with four digits."""
    if not rows:
        return ""
    cells = [list(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = [isinstance(value, str) for value in rows[0].values()]
    return "\n".join(
        "  ".join(c.ljust(w) if t else c.rjust(w) for c, w, t in zip(line, widths, text, strict=True)).rstrip()
        for line in cells
    )


def figures(results: Mapping[str, Any]) -> str:
    """Plain figures a line each, then `quantiles` as a table in milliseconds."""
    plain, families = [], dict[str, dict[str, Any]]()
    for name, value in results.items():
        if match := _QUANTILE.fullmatch(name):
            families.setdefault(match[2], {"ms": match[2]})[match[1]] = value
        elif not isinstance(value, Mapping):
            plain.append({"figure": name, "value": value})
    return "\n\n".join(filter(None, (table(plain), table(list(families.values())))))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
        return f"{value:,.{digits}f}"
    return "" if value is None else str(value)
