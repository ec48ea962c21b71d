"""`headrace bench` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.settings import EngineSettings
from headrace.cli.flags import as_arguments

ENV = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", "bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=ENV)


def test_help_lists_what_can_be_measured() -> None:
    shown = bench("--help").stdout
    for name in ("step", "throughput", "latency", "startup", "serve"):
        assert f"\n  {name} " in shown


@pytest.mark.parametrize(
    ("args", "figure"),
    [
        (("step", "TINY", "--sequences", "1", "3", "--prefill", "9", "--context", "9", "--steps", "2"), "rows"),
        (("throughput", "TINY", "--num-prompts", "3", "--input-len", "4-9", "--output-len", "5"), "output_throughput"),
        (("latency", "TINY", "--num-iters", "2", "--output-len", "3"), "p99_ttft_ms"),
        (("startup", "TINY", "--num-iters", "1"), "total"),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else "",
)
def test_results_are_shown_and_written(tiny: Path, tmp_path: Path, args: tuple[str, ...], figure: str) -> None:
    file = tmp_path / "out.json"
    ran = bench(*(str(tiny) if arg == "TINY" else arg for arg in args), "--json", str(file), "--threads", "1")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    told = json.loads(file.read_text())
    assert told["bench"] == args[0]
    assert told["settings"]["model"] == str(tiny)
    assert told["settings"]["threads"] == 1
    assert told["results"][figure]
    if figure == "rows":
        assert [row["sequences"] for row in told["results"]["rows"]] == [1, 1, 3]


def test_serve_starts_a_server_of_its_own_and_ends_it(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ["--num-prompts", "5", "--input-len", "9", "--output-len", "6", "--max-concurrency", "2", "--threads", "1"]
    ran = bench(
        "serve", str(tiny), *flags, "--goodput", "ttft:1e6", "e2el:1e6", "--json", str(file), "--price-per-hour", "7"
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(file.read_text())["results"]
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (5, 0, 30)
    assert found["total_input_tokens"] >= 45
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    prompt, answer = (found[f"usd_per_million_{kind}_tokens"] for kind in ("prompt", "completion"))
    spent = 1e-6 * (prompt * found["total_input_tokens"] + answer * found["total_output_tokens"])
    assert prompt > 0 and answer > 0 and spent < 7 / 3600 * found["duration"]
    assert found["median_ttft_ms"] <= found["median_e2el_ms"]
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"headrace.cli serve {tiny}" not in listing


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("step", "--sequences", "1", "x"), 2, "--sequences"),
        (("throughput", "--input-len", "9-3"), 2, "64-1024"),
        (("serve", "--goodput", "tfft:3"), 1, "tfft:3"),
        (("serve", "--request-rate", "0"), 1, "above zero"),
        (("serve", "--extra-body", "[]"), 2, "object"),
        (("serve", "--endpoint", "/v2"), 2, "/v1/completions"),
        (("serve", "--base-url", "127.0.0.1:9"), 1, "127.0.0.1:9"),
        (("serve", "--base-url", "127.0.0.1:9", "--threads", "2"), 1, "--threads"),
        (("serve", "--base-url", "127.0.0.1:9", "--price-per-hour", "2"), 1, "--price-per-hour"),
        (("serve", "/no/such.gguf"), 1, "/no/such.gguf"),
        (("stepp",), 2, "step"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_what_cannot_work_says_what_to_change(args: tuple[str, ...], code: int, says: str) -> None:
    ran = bench(*args)
    assert ran.returncode == code, ran.stderr
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


def test_settings_become_the_arguments_that_give_them() -> None:
    assert as_arguments(EngineSettings(model="m")) == ["m"]
    chosen = EngineSettings(model="m", threads=3, enable_prefix_caching=False, isa="avx2")
    assert as_arguments(chosen) == ["m", "--no-enable-prefix-caching", "--threads", "3", "--isa", "avx2"]
