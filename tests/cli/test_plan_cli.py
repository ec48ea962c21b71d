"""``headrace plan`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.cpu import CpuBackend
from headrace.cli import main
from headrace.runtime.plan import of_path

NUMBERS = ["--layers", "80", "--kv-heads", "8", "--head-size", "128"]


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *args])
    assert not ended.value.code
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, *args, "--json"))
    return found


def test_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    shown = plan(capsys, *NUMBERS, "--bits", "16", "--context", "32K", "--memory", "24G")
    for figure in ("327,680 bytes", "10.7 GB", "85.9 GB"):
        assert figure in shown
    kv = told(capsys, *NUMBERS, "--context", "32K", "--memory", "24G")["kv_cache"]
    assert (kv["bytes_a_token"], kv["context"], kv["requests"]) == (327_680, 32_768, 8)
    assert (kv["bytes_a_request"], kv["bytes"]) == (10_737_418_240, 85_899_345_920)
    assert kv["requests_that_fit"] == 2
    assert told(capsys, *NUMBERS, "--bits", "8")["kv_cache"]["bytes_a_token"] == 163_840


def test_weights_of_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*NUMBERS, "--parameters", "70g", "--context", "32K", "--memory", "100g", "--bandwidth", "200g"]
    rows = {row["format"]: row for row in told(capsys, *args)["weights"]}
    assert rows["bf16"]["bytes"] == 140_000_000_000
    assert rows["bf16"]["requests_that_fit"] == 0
    assert rows["q4_0"]["requests_that_fit"] == (100 * 10**9 - 39_375_000_000) // 10_737_418_240 == 5
    assert rows["q4_0"]["least_ms"]["1"] == pytest.approx((39.375 + 10.737418240) / 200 * 1000)


def test_a_model(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    found = told(capsys, str(tiny), "--memory", "10m", "--context", "1000", "--requests", "3", "--bandwidth", "1g")
    assert found["model"]["architecture"] == "llama"
    assert found["kv_cache"]["bytes_a_token"] == 2 * 2 * 2 * 64 * 2  # 2 layers, K and V, 2 heads of 64, 2 bytes
    assert found["kv_cache"]["bytes"] == 3 * 32 * found["kv_cache"]["page_bytes"]
    own = of_path(tiny, CpuBackend()).weights[0]
    row = found["weights"][0]
    assert (row["format"], row["bytes"]) == ("as served", own.bytes)
    assert row["bytes_with_requests"] == own.bytes + found["kv_cache"]["bytes"]
    assert row["requests_that_fit"] == (10**7 - own.bytes) // found["kv_cache"]["bytes_a_request"]
    assert row["least_ms"] == {str(n): own.step_bytes(n, 1000) / 1e6 for n in (1, 8, 32)}
    shown = plan(capsys, str(tiny), "--context", "1000", "--bandwidth", "1g").splitlines()
    (line,) = (line for line in shown if line.startswith("as served"))
    assert f"{own.bytes:,}" in line
    assert f"{own.step_bytes(8, 1000) / 1e6:,.2f}" in line


def test_int8_keys_and_values(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    kept = told(capsys, str(tiny), "--kv-cache-dtype", "int8")["kv_cache"]
    assert kept["bytes_a_token"] == 2 * 2 * 2 * (64 + 2)  # a byte an element, and a scale of two


def test_the_context_is_the_servers_unless_said(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    assert told(capsys, str(tiny))["kv_cache"]["context"] == 2048
    assert told(capsys, *NUMBERS)["kv_cache"]["context"] == 8192


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--layers", "0", "--kv-heads", "8", "--head-size", "128"], 2, "--layers"),
        (["--layers", "-3", "--kv-heads", "8", "--head-size", "128"], 2, "--layers"),
        (["--layers", "9" * 400, "--kv-heads", "8", "--head-size", "128"], 2, "--layers"),
        ([*NUMBERS, "--bits", "nan"], 2, "--bits"),
        ([*NUMBERS, "--memory", "24Q"], 2, "24Q"),
        ([*NUMBERS, "--memory", "0"], 1, "memory must be at least 1"),
        ([*NUMBERS, "--requests", "0"], 1, "requests must be at least 1"),
        ([*NUMBERS, "--bandwidth", "0"], 1, "bandwidth must be at least 1"),
        (["--layers", "8", "--bits", "8"], 1, "--kv-heads, --head-size must be given"),
        (["--parameters", "7g"], 1, "--layers, --kv-heads, --head-size must be given"),
        (["MODEL", "--layers", "8"], 1, "--layers: the model says these"),
        ([*NUMBERS, "--revision", "main"], 1, "a model or numbers, not both"),
        (["MODEL", "--bits", "8"], 1, "--bits: the model says these"),
        (["MODEL", "--kv-cache-dtype", "int3"], 1, "kv_cache_dtype must be"),
        (["MODEL", "--context", "4096"], 1, "trained for 2048"),
        (["/no/such/folder"], 1, "no such file"),
    ],
    ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "",
)
def test_what_cannot_be_is_said(
    args: list[str], code: int, says: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *(str(tiny) if arg == "MODEL" else arg for arg in args)])
    assert ended.value.code == code
    assert says in capsys.readouterr().err
    assert told(capsys, *NUMBERS)["kv_cache"]["bytes_a_token"] == 327_680


def test_who_drafts_is_counted(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    alone = told(capsys, str(tiny), "--memory", "200m")
    drafted = told(capsys, str(tiny), "--memory", "200m", "-sc", json.dumps({"model": str(tiny)}))
    assert drafted["kv_cache"]["page_bytes"] == 2 * alone["kv_cache"]["page_bytes"]
    one, two = alone["weights"][0], drafted["weights"][0]
    assert (two["bytes"], two["drafter_bytes"]) == (one["bytes"], one["bytes"])
    assert two["requests_that_fit"] <= one["requests_that_fit"] // 2
    assert "who drafts" in plan(capsys, str(tiny), "--speculative-config", '{"method": "self"}')
