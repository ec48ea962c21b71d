"""A model's measured quality is told for the very bits it was measured on, and nothing else is believed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM
from headrace.base.errors import SettingError
from headrace.weights import report
from headrace.weights.report import Quality, beside, quality_of, save_quality
from tiny_model import FLOATS, write_tiny

FILE, OTHER = "a" * 64, "b" * 64
GOOD = Quality(perplexity=9.5, kl_mean=0.1, kl_p99=0.5, top1=0.9, against="x.gguf", text="y", tokens=10)


def told(caplog: pytest.LogCaptureFixture, least: int = logging.WARNING) -> str:
    return " ".join(record.getMessage() for record in caplog.records if record.levelno >= least)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("headrace").addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "headrace")
    return caplog


def test_what_was_saved_is_read_by_what_decided_it(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    assert quality_of(model, f"{FILE}:cpu") is None
    int8 = msgspec.structs.replace(GOOD, kl_mean=0.2)
    assert save_quality(model, f"{FILE}:cpu", GOOD) == save_quality(model, f"{FILE}:int8", int8) == beside(model)
    assert (quality_of(model, f"{FILE}:cpu"), quality_of(model, f"{FILE}:int8")) == (GOOD, int8)
    assert quality_of(model, f"{OTHER}:cpu") is None
    save_quality(model, f"{FILE}:int8", GOOD)
    assert quality_of(model, f"{FILE}:int8") == GOOD
    save_quality(model, f"{OTHER}:cpu", int8)  # another file has come under this name
    assert quality_of(model, f"{FILE}:cpu") is None and quality_of(model, f"{OTHER}:cpu") == int8
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf.eval.json"]


def test_a_report_never_grows_beyond_what_is_read(tmp_path: Path) -> None:
    long = msgspec.structs.replace(GOOD, against="\x01" * 200, text="\U00010000" * 200)
    for number in range(report._MOST_MEASURED + 3):
        save_quality(tmp_path / "m", f"{FILE}:{number}", long)
    measured = json.loads(beside(tmp_path / "m").read_text())["measured"]
    assert list(measured) == [f"{FILE}:{number}" for number in range(3, report._MOST_MEASURED + 3)]
    assert quality_of(tmp_path / "m", f"{FILE}:{report._MOST_MEASURED + 2}") == long


@pytest.mark.parametrize("name", [".", "./", "m/../", "../m"])
def test_a_folder_has_its_report_beside_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "m")
    assert beside(Path(name)) == tmp_path / "m.eval.json"
    save_quality(Path(name), FILE, GOOD)
    assert quality_of(tmp_path / "m", FILE) == GOOD
    assert beside(Path("/")).parent == Path("/")


DAMAGED: list[Any] = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b" " * (report.MOST_BYTES + 1),
    {},
    {"headrace_eval": 2, "measured": {}},
    {"headrace_eval": 1, "measured": {FILE: {}}},
    {"headrace_eval": 1, "measured": {str(n): msgspec.to_builtins(GOOD) for n in range(65)}},
    *(
        {"headrace_eval": 1, "measured": {FILE: msgspec.to_builtins(GOOD) | change}}
        for change in (
            {"perplexity": -1}, {"perplexity": "9"}, {"top1": 1.1}, {"kl_mean": None}, {"tokens": 0}, {"tokens": 1.5},
            {"against": "x" * 201}, {"extra": 1}, {"text": ["y"]},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_no_report_is_ignored_with_a_line(data: Any, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "m.gguf"
    beside(model).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    assert quality_of(model, FILE) is None
    assert "m.gguf.eval.json: is no report of `headrace eval`" in told(log) and "\n" not in told(log)
    save_quality(model, FILE, GOOD)
    assert quality_of(model, FILE) == GOOD


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 300))
def test_no_bytes_stop_a_model(tmp_path_factory: pytest.TempPathFactory, rubbish: bytes, at: int) -> None:
    model = tmp_path_factory.mktemp("report") / "m"
    data = save_quality(model, FILE, GOOD).read_bytes()
    beside(model).write_bytes(data[:at] + rubbish + data[at + len(rubbish) :])
    found = quality_of(model, FILE)
    assert found is None or isinstance(found, Quality)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(beside(tmp_path / "m"))
    assert quality_of(tmp_path / "m", FILE) is None
    beside(tmp_path / "n").mkdir()
    assert quality_of(tmp_path / "n", FILE) is None
    with pytest.raises(SettingError, match=r"n\.eval\.json cannot be written"):
        save_quality(tmp_path / "n", FILE, GOOD)
    assert {path.name for path in tmp_path.iterdir()} == {"m.eval.json", "n.eval.json"}


def test_a_model_knows_what_was_measured_of_it(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    path = write_tiny(tmp_path / "m.gguf", FLOATS)

    def found(**settings: Any) -> Quality | None:
        with LLM(str(path), threads=1, max_model_len=64, **settings) as llm:
            return llm.info.quality

    with LLM(str(path), threads=1, max_model_len=64) as llm:
        assert llm.info.quality is None
        save_quality(path, llm.engine.identity, GOOD)
    assert found() == GOOD and not told(log)
    for others in ({"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}, {"quantization": "q8_0"}):
        log.clear()
        assert found(**others) is None
        assert not told(log)
        assert "no figures for these settings" in told(log, logging.INFO)
    write_tiny(path, FLOATS, seed=1)
    assert found() is None
