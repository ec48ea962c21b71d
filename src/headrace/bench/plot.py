"""What `headrace eval` found, drawn: quality over size, and over speed where it was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Row = Mapping[str, Any]
_Point = tuple[float, float, int]  # across, up, the row's number

_SIDE, _LEFT, _TOP, _GAP, _LINE = 300, 64, 56, 84, 18
_LEAST = 1e-5  # of the worst: what is better is drawn there, zero too
_COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#1864ab", "#5c940d", "#495057")
_QUALITY = {"kl_mean": "KL divergence, nats (log scale)", "perplexity": "perplexity (log scale)"}
_OVER = {"bits": "bits a weight", "decode_tokens_per_s": "tokens a second, one sequence"}
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#343a40}.title{font-weight:700;font-size:15px}"
    ".name{font-weight:600}line{stroke:#dee2e6}"
)


def draw(rows: Sequence[Row], text: str) -> str:
    """An SVG: a point for each row that has the figures. Of models with a reference, KL; otherwise perplexity."""
    quality = "kl_mean" if any("kl_mean" in row for row in rows) else "perplexity"
    drawn = [row for row in rows if quality in row]
    over = [key for key in _OVER if any(key in row for row in drawn)]
    width = _LEFT + len(over) * (_SIDE + _GAP)
    height = _TOP + _SIDE + 48 + _LINE * len(drawn)
    parts = [f'<text x="0" y="16" class="title">On {escape(text)}</text>']
    for number, key in enumerate(over):
        parts.append(_panel(_LEFT + number * (_SIDE + _GAP), drawn, key, quality))
    for number, row in enumerate(drawn):
        y = _TOP + _SIDE + 52 + _LINE * number
        parts.append(f'<circle cx="8" cy="{y - 4}" r="5" fill="{_colour(number)}"/>')
        parts.append(f'<text x="20" y="{y}">{escape(row["name"])}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {width + 10} {height}" width="{width + 10}" '
        f'height="{height}"><style>{_STYLE}</style><rect x="-10" width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _panel(left: float, rows: Sequence[Row], over: str, quality: str) -> str:
    points: list[tuple[float, float, int]] = [
        (row[over], row[quality], number) for number, row in enumerate(rows) if over in row
    ]
    worst = max(y for _, y, _ in points) or 1.0
    floor = max(min((y for _, y, _ in points if y > 0), default=worst) / 2, worst * _LEAST)
    low, high = math.log(floor), math.log(worst) + 0.1
    most = 1.1 * max(x for x, _, _ in points)
    bottom = _TOP + _SIDE

    def across(x: float) -> float:
        return left + _SIDE * x / most

    def up(y: float) -> float:
        return bottom - _SIDE * (math.log(max(y, floor)) - low) / (high - low)

    parts = [f'<text x="{left}" y="{_TOP - 16}" class="name">{_QUALITY[quality]}</text>']
    for x in _ticks(most):
        parts.append(f'<line x1="{across(x):.1f}" y1="{_TOP}" x2="{across(x):.1f}" y2="{bottom}"/>')
        parts.append(f'<text x="{across(x):.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    for y in _decades(math.exp(low), math.exp(high)):
        parts.append(f'<line x1="{left}" y1="{up(y):.1f}" x2="{left + _SIDE}" y2="{up(y):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    parts.append(f'<text x="{left + _SIDE}" y="{bottom + 32}" text-anchor="end">{_OVER[over]}</text>')
    parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="5" fill="{_colour(n)}"/>' for x, y, n in points]
    return "".join(parts)


def _ticks(most: float) -> list[float]:
    """From 0 on, four to eight round numbers."""
    unit = 10.0 ** math.floor(math.log10(most))
    step = next(unit * part for part in (0.2, 0.5, 1, 2) if most / (unit * part) <= 8)
    return [float(f"{step * i:.6g}") for i in range(int(most / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [float(f"{m}e{p}") for p in powers for m in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high]
