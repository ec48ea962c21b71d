"""A plot holds every point where its figures say."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.plot import draw

SVG = "{http://www.w3.org/2000/svg}"
ROWS: list[dict[str, Any]] = [
    {"name": "reference", "bits": 16.0, "perplexity": 10.0, "decode_tokens_per_s": 30.0},
    {"name": "<b>&\"q8'", "bits": 8.5, "perplexity": 10.1, "kl_mean": 0.001, "decode_tokens_per_s": 60.0},
    {"name": "q4", "bits": 4.5, "perplexity": 12.0, "kl_mean": 0.1, "decode_tokens_per_s": 90.0},
    {"name": "same", "bits": 16.0, "perplexity": 10.0, "kl_mean": 0.0},
]


def points(svg: str) -> list[tuple[float, float]]:
    """Of the panels, in turn; those of the legend come after them."""
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in ElementTree.fromstring(svg).iter(f"{SVG}circle")]
    return [(x, y) for x, y in circles if x > 10]


def test_smaller_is_left_and_worse_is_up() -> None:
    svg = draw(ROWS, "some <text>")
    eight, four, same, fast, faster = points(svg)
    assert four[0] < eight[0] < same[0] and four[1] < eight[1] < same[1]
    assert fast[0] < faster[0] and (fast[1], faster[1]) == (eight[1], four[1])
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "On some <text>" in texts and "<b>&\"q8'" in texts and "reference" not in texts


def test_without_a_reference_it_is_perplexity() -> None:
    rows = [{key: value for key, value in row.items() if key != "kl_mean"} for row in ROWS]
    svg = draw(rows, "text")
    assert "perplexity" in svg and "KL" not in svg and len(points(svg)) == 7


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 64), st.floats(0, 100), st.floats(1e-2, 1e6)), min_size=1, max_size=12))
def test_whatever_the_figures_all_is_within_the_drawing(given: list[tuple[float, float, float]]) -> None:
    rows = [{"name": "m", "bits": b, "kl_mean": kl, "decode_tokens_per_s": s} for b, kl, s in given]
    svg = ElementTree.fromstring(draw(rows, "text"))
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    assert len(points(ElementTree.tostring(svg, "unicode"))) == 2 * len(rows)
    for x, y in points(ElementTree.tostring(svg, "unicode")):
        assert 10 < x < width and 0 < y < height
    ticks = [float(t.get("y", 0)) for t in svg.iter(f"{SVG}text") if t.get("text-anchor") == "end"]
    assert ticks and all(0 < y < height for y in ticks)


@pytest.mark.parametrize("most", [1e-9, 1e9])
def test_extremes_are_drawn(most: float) -> None:
    assert len(points(draw([{"name": "m", "bits": most, "kl_mean": most}], "text"))) == 1
