"""Quantiles, tables, files of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import SettingError
from headrace.bench.report import figures, quantiles, table, write


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_quantiles_are_ordered_and_within_the_values(seconds: list[float]) -> None:
    q = quantiles("x", seconds)
    slack = 1e-9 * max(seconds) * 1e3
    ordered = [1e3 * min(seconds), q["p50_x_ms"], q["p90_x_ms"], q["p99_x_ms"], 1e3 * max(seconds)]
    assert all(a <= b + slack for a, b in zip(ordered, ordered[1:], strict=False))  # noqa: RUF007
    assert q["median_x_ms"] == pytest.approx(q["p50_x_ms"])
    assert 1e3 * min(seconds) - slack <= q["mean_x_ms"] <= 1e3 * max(seconds) + slack


def test_quantiles_by_hand_and_of_nothing() -> None:
    q = quantiles("x", [0.001 * i for i in range(101)])
    assert [round(q[f"p{p}_x_ms"], 6) for p in (50, 90, 99)] == [50, 90, 99]
    assert round(q["std_x_ms"], 3) == 29.155
    assert quantiles("x", []) == {}


def test_a_table_lines_up() -> None:
    lines = table([{"name": "a", "n": 1.23456}, {"name": "longer", "n": 12345.6}]).splitlines()
    assert lines == ["name         n", "a        1.235", "longer  12,346"]
    assert table([]) == ""


def test_figures_put_quantiles_of_a_kind_on_one_line() -> None:
    shown = figures({"completed": 3, "errors": {"x": 1}, **quantiles("ttft", [0.1]), **quantiles("tpot", [0.2])})
    plain, families = shown.split("\n\n")
    assert plain.split() == ["figure", "value", "completed", "3"]
    assert [line.split()[0] for line in families.splitlines()] == ["ms", "ttft", "tpot"]
    assert families.splitlines()[0].split() == ["ms", "mean", "median", "std", "p50", "p90", "p99"]


def test_results_are_written_with_the_machine(tmp_path: Path) -> None:
    write(tmp_path / "new" / "x.json", "step", {"a": 1}, [2])
    told = json.loads((tmp_path / "new" / "x.json").read_text())
    assert (told["bench"], told["settings"], told["results"]) == ("step", {"a": 1}, [2])
    assert told["machine"]["cores"] >= 1
    assert told["machine"]["processor"]
    with pytest.raises(SettingError, match="cannot be written"):
        write(tmp_path, "step", {}, [])
