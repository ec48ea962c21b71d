"""``headrace eval`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from test_cli import headrace

from child_server import serving
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


def test_a_model_rounded_to_formats_and_drawn(tmp_path: Path) -> None:
    floats, plot = write_tiny(tmp_path / "floats.gguf", FLOATS), tmp_path / "out" / "found.svg"
    ran = headrace("eval", str(floats), "--formats", "q8_0,q4_0", "--no-speed", *SHORT, "--plot", str(plot))
    assert ran.returncode == 0, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()[3:6]]
    assert [row[0] for row in rows] == [f"floats.gguf{f}" for f in ("", ",quantization=q8_0", ",quantization=q4_0")]
    assert [float(row[2]) for row in rows] == pytest.approx([32, 8.5, 4.5], abs=0.3)
    drawn = plot.read_text()
    assert all(f">{row[0]}<" in drawn for row in rows[1:]) and drawn.count("<circle") == 4


@pytest.mark.slow
def test_a_served_model_tells_what_was_measured(tmp_path: Path) -> None:
    small, floats = write_tiny(tmp_path / "small.gguf"), write_tiny(tmp_path / "floats.gguf", FLOATS)
    args = (str(small), "--against", str(floats), "--no-speed", "--save", *SHORT)
    ran = headrace("eval", *args, "--json", str(tmp_path / "found.json"))
    assert ran.returncode == 0 and "small.gguf.eval.json" in ran.stderr
    row = json.loads((tmp_path / "found.json").read_text())["results"]["rows"][1]
    with serving(small, "--backend", "cpu") as server:
        quality = httpx.get(f"{server.url}/v1/models").json()["data"][0]["quality"]
    same = ("perplexity", "kl_mean", "kl_p99", "top1", "tokens")
    assert {name: quality[name] for name in same} == {name: row[name] for name in same}
    assert quality["against"] == "floats.gguf" and quality["text"].startswith("pydoc_data.topics of Python")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("tiny,kv_cache_type=int8",), "did you mean 'kv_cache_dtype'"),
        (("tiny", "--against", "tiny,speculative_config={}"), "has no part"),
        (("tiny", "--text", "/nowhere.txt"), "nowhere.txt"),
        (("nowhere-at-all.gguf",), "nowhere-at-all"),
        (("tiny", "--save"), "--against"),
        (("tiny", "tiny", "--formats", "q8_0"), "one model at a time"),
        (("tiny", "--formats", "q9"), "quantization must be"),
        (("tiny", "--no-speed", "--plot", "/proc/found.svg"), "/proc/found.svg"),
    ],
)
def test_what_cannot_be_is_one_line(args: tuple[str, ...], says: str, tiny: Path) -> None:
    ran = headrace("eval", *(word.replace("tiny", str(tiny)) for word in args), *SHORT)
    assert ran.returncode == 1 and says in ran.stderr and ran.stderr.count("\n") == 1
