"""``headrace quantize`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import headrace

from tiny_model import FLOATS, write_tiny


def test_a_model_is_made_smaller_and_still_answers(tmp_path: Path) -> None:
    source, small = write_tiny(tmp_path / "tiny.gguf", FLOATS), tmp_path / "small.gguf"
    ran = headrace("quantize", str(source), str(small), "--to", "q4_k", "--calibration-tokens", "256")
    assert ran.returncode == 0, ran.stderr
    assert f"{small}: {small.stat().st_size:,} bytes" in ran.stdout
    told = json.loads(headrace("inspect", str(small), "--json").stdout)
    assert set(told["groups"]["attention"]["formats"]) == {"q4_k"}
    assert set(told["groups"]["embedding"]["formats"]) == {"q6_k"}
    assert headrace("generate", "-m", str(small), "--max-tokens", "4", "--raw", "hello").returncode == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--to", "q3_k"), "q4_k"),
        (("--recipe", "best"), "even, mixed"),
        (("--method", "magic"), "plain, scale"),
        (("--calibration", "/nowhere.txt"), "nowhere.txt"),
    ],
)
def test_what_cannot_be_is_one_line_and_no_file(args: tuple[str, ...], says: str, tmp_path: Path) -> None:
    source, small = write_tiny(tmp_path / "tiny.gguf", FLOATS), tmp_path / "small.gguf"
    ran = headrace("quantize", str(source), str(small), *args)
    assert ran.returncode == 1 and says in ran.stderr and ran.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_model_is_never_written_over_itself(tmp_path: Path) -> None:
    source, link = write_tiny(tmp_path / "tiny.gguf", FLOATS), tmp_path / "link.gguf"
    link.symlink_to(source)
    before = source.read_bytes()
    for same in (source, link):
        ran = headrace("quantize", str(source), str(same), "--method", "plain")
        assert ran.returncode == 1 and "another file" in ran.stderr and ran.stderr.count("\n") == 1
        assert source.read_bytes() == before and link.is_symlink()
