"""``headrace eval`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import headrace

from tiny_model import FLOATS, write_tiny

SHORT = ("--tokens", "60", "--context", "30")


def test_models_side_by_side_in_a_table_and_a_file(tiny: Path, tmp_path: Path) -> None:
    floats = write_tiny(tmp_path / "floats.gguf", FLOATS)
    models = (str(tiny), f"{tiny},kv_cache_dtype=int8")
    ran = headrace("eval", *models, "--against", str(floats), *SHORT, "--json", str(tmp_path / "found.json"))
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "found.json").read_text())
    rows = told["results"]["rows"]
    assert [row["name"] for row in rows] == ["floats.gguf", "tiny.gguf", "tiny.gguf,kv_cache_dtype=int8"]
    assert told["settings"]["against"] == str(floats) and told["results"]["windows"] == 2
    head, *lines = ran.stdout.splitlines()[2:6]
    assert ran.stdout.startswith("58 tokens of pydoc_data.topics of Python 3")
    assert " ".join(head.split()) == "model MB bits nats ppl nats more KL KL 99% KL max top-1 prompt/s decode/s"
    for row, line in zip(rows, lines, strict=True):
        assert line.startswith(row["name"]) and f"{row['nll']:.4f} ± {row['nll_se']:.4f}" in line
        assert f"{row['decode_tokens_per_s']:,.1f}" in line
    assert "KL" in head and f"{rows[1]['kl_mean']:.5f} ± {rows[1]['kl_mean_se']:.5f}" in lines[1]


def test_a_text_of_ones_own(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All work and no play. " * 20)
    ran = headrace("eval", str(tiny), "--text", str(tmp_path / "text.txt"), "--no-speed", *SHORT)
    assert ran.returncode == 0 and "text.txt, in windows of 30" in ran.stdout and "KL 99%" not in ran.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("tiny,kv_cache_type=int8",), "unknown setting"),
        (("tiny", "--against", "tiny,speculative_config={}"), "has no part"),
        (("tiny", "--text", "/nowhere.txt"), "nowhere.txt"),
        (("nowhere-at-all.gguf",), "nowhere-at-all"),
    ],
)
def test_what_cannot_be_is_one_line(args: tuple[str, ...], says: str, tiny: Path) -> None:
    ran = headrace("eval", *(word.replace("tiny", str(tiny)) for word in args), *SHORT)
    assert ran.returncode == 1 and says in ran.stderr and ran.stderr.count("\n") == 1 and not ran.stdout
