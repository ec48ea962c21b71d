"""What `compare.py` found, as a chart and a table: `python bench/chart.py RESULTS.json` writes .svg and .md beside it.

Each kind of work is a group of bars, as long as their share of the fastest; the figures are tokens a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

WIDTH, BAR, GAP, TITLE, LEFT, RIGHT = 720, 16, 14, 24, 130, 70
OURS, OTHERS = "#0b7285", "#adb5bd"


def wanted(rows: Sequence[Row]) -> list[Row]:
    """Prefill of the prompt of 512 tokens, or of the longest that is alone; decoding of everything."""
    alone = [row for row in rows if row["kind"] == "prefill" and row["sequences"] == 1]
    alone.sort(key=lambda row: (row["prompt"] != 512, -row["prompt"]))
    return alone[:1] + [row for row in rows if row["kind"] == "decode"]


def named(row: Row) -> str:
    """A row's work in words."""
    if row["kind"] == "prefill":
        return f"Reading a prompt of {row['prompt']:,} tokens"
    sequences = f"{row['sequences']} sequences" if row["sequences"] > 1 else "1 sequence"
    return f"Writing {sequences} after {row['prompt']:,} tokens"


def draw(title: str, rows: Sequence[Row]) -> str:
    """An SVG."""
    parts, y = [f'<text x="0" y="18" class="title">{escape(title)}: tokens a second</text>'], 34
    for row in wanted(rows):
        rates = row["tokens_per_s"]
        parts.append(f'<text x="0" y="{y + 15}" class="work">{named(row)}</text>')
        y += TITLE
        for number, (label, rate) in enumerate(rates.items()):
            parts.append(_bar(y, label, rate, rate / max(rates.values()), ours=number == 0))
            y += BAR + 3
        y += GAP
    style = (
        "text{font:12px system-ui,sans-serif;fill:#343a40}.title{font-weight:700;font-size:15px}"
        ".work{font-weight:600}.ours{font-weight:700}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 0 {WIDTH + 20} {y}" width="{WIDTH + 20}" height="{y}">'
        f'<style>{style}</style><rect x="-10" width="100%" height="100%" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


def _bar(y: float, label: str, rate: float, share: float, *, ours: bool) -> str:
    length = max(1.0, share * (WIDTH - LEFT - RIGHT))
    emphasis = ' class="ours"' if ours else ""
    return (
        f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end"{emphasis}>{escape(label)}</text>'
        f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{OURS if ours else OTHERS}"/>'
        f'<text x="{LEFT + length + 6:.1f}" y="{y + 12}"{emphasis}>{rate:,.0f}</text>'
    )


def table(results: Mapping[str, Any]) -> str:
    """Markdown: tokens a second of each engine, ours over the best of the others, and start-up."""
    startup = results["startup_s"]
    labels = list(startup)
    lines = [f"| tokens/s | {' | '.join(labels)} | over the best |", "|---" * (len(labels) + 2) + "|"]
    for row in wanted(results["rows"]):
        cells = [f"{row['tokens_per_s'][label]:,.0f}" for label in labels]
        lines.append(f"| {named(row)} | {' | '.join(cells)} | {row['over_best']:.1f}x |")
    best = min([seconds for label, seconds in startup.items() if label != labels[0]], default=startup[labels[0]])
    cells = [f"{startup[label]:.1f}" for label in labels]
    lines.append(f"| Start-up, s | {' | '.join(cells)} | {best / startup[labels[0]]:.1f}x |")
    return "\n".join(lines) + "\n"


def main() -> None:
    path = Path(sys.argv[1])
    told = json.loads(path.read_text())
    path.with_suffix(".svg").write_text(draw(Path(told["settings"]["model"]).stem, told["results"]["rows"]))
    path.with_suffix(".md").write_text(table(told["results"]))
    print(path.with_suffix(".md").read_text(), end="")


if __name__ == "__main__":
    main()
