"""What a good answer keeps to: `vllm bench serve`'s ``--goodput ttft:500 tpot:50 e2el:5000``."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.base.errors import SettingError

GOALS = ("ttft", "tpot", "e2el")  # to the first token, for each after it, to the last


def parse_goals(given: Iterable[str]) -> dict[str, float]:
    """``ttft:200`` and the like, in milliseconds, one or several a string. SettingError(param="goodput") for others."""
    goals = {}
    for text in [word for one in given for word in one.split() or [one]]:
        name, _, limit = text.partition(":")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = math.nan
        if name not in GOALS or not goals[name] > 0:
            raise SettingError(
                f"{text!r} is no goal; write {', '.join(f'{g}:MILLISECONDS' for g in GOALS)}", param="goodput"
            )
    return goals
