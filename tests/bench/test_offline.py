"""Steps, throughput, latency and start-up of a tiny model: the figures are consistent with each other and the work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.errors import CapacityError, SettingError
from headrace.base.settings import EngineSettings
from headrace.bench import startup, step
from headrace.bench.offline import latency, throughput
from headrace.bench.work import Lengths, asks
from headrace.program.cost import Load, total
from headrace.runtime.load import prepare


@pytest.fixture
def settings(tiny: Path) -> EngineSettings:
    return EngineSettings(model=str(tiny), threads=1, max_model_len=256)


def test_a_row_for_each_batch_and_for_the_prompt(settings: EngineSettings, tiny: Path) -> None:
    found = step.measured(settings, sequences=[1, 5], context=40, steps=6, prefill=70, profile=True)
    prompt, one, five = found["rows"]
    assert [row["work"] for row in found["rows"]] == ["prefill", "decode", "decode"]
    assert [row["sequences"] for row in found["rows"]] == [1, 1, 5]
    assert prompt["context"] == 70
    assert 40 <= one["context"] <= 50
    for row in found["rows"]:
        assert 0 < 1e-3 * row["python_us"] < row["ms"]
        assert row["of_roof"] > 0  # above 1 where all weights stay in a cache
        assert row["roof_ms"] == pytest.approx(row["of_roof"] * row["ms"])
        assert row["of_memory"] == pytest.approx(row["gb_per_s"] / row["memory_gb_per_s"])
    assert prompt["tokens_per_s"] == pytest.approx(70 / (1e-3 * prompt["ms"]))
    assert five["tokens_per_s"] == pytest.approx(5 / (1e-3 * five["ms"]))
    prepared = prepare(tiny)
    cost = total(prepared.program, prepared.sizes(), Load([70], [70], 1))
    assert prompt["gmac_per_s"] * 1e6 * prompt["ms"] == pytest.approx(cost.macs)
    assert prompt["gb_per_s"] * 1e6 * prompt["ms"] == pytest.approx(cost.bytes)
    for phases in found["phases"].values():
        assert sum(phase["share"] for phase in phases) == pytest.approx(1)
        assert [phase["ms"] for phase in phases] == sorted((phase["ms"] for phase in phases), reverse=True)
        assert next(phase["count"] for phase in phases if phase["phase"] == "attend") == 2


def test_a_prompt_longer_than_a_step_counts_whole(settings: EngineSettings, tiny: Path) -> None:
    small = replace(settings, max_num_batched_tokens=16)
    (prompt,) = step.measured(small, sequences=[1], context=20, steps=1, prefill=40, profile=False)["rows"][:1]
    prepared = prepare(tiny)
    whole = sum(
        total(prepared.program, prepared.sizes(), Load([n], [at], at == 40)).macs
        for n, at in ((16, 16), (16, 32), (8, 40))
    )
    assert prompt["gmac_per_s"] * 1e6 * prompt["ms"] == pytest.approx(whole)


def test_sequences_that_begin_early_are_still_there_when_the_last_has(settings: EngineSettings) -> None:
    small = replace(settings, max_num_batched_tokens=16)
    (row,) = step.measured(small, sequences=[12], context=30, steps=2, prefill=0, profile=False)["rows"]
    assert row["sequences"] == 12


def test_layers_are_folded() -> None:
    timings = [("linear 0.attn.o", 2, 0.5), ("linear 11.attn.o", 2, 0.5), ("embed", 2, 3.0)]
    assert step.folded(timings, 2) == [
        {"phase": "embed", "count": 1, "ms": 1500.0, "share": 0.75},
        {"phase": "linear attn.o", "count": 2, "ms": 500.0, "share": 0.25},
    ]


def test_what_cannot_be_measured_is_refused(settings: EngineSettings) -> None:
    ask = {"sequences": [8], "context": 100, "steps": 2, "prefill": 0, "profile": False}
    with pytest.raises(CapacityError, match="--kv-cache-memory-bytes"):
        step.measured(replace(settings, kv_cache_memory_bytes=1 << 20), **ask)
    with pytest.raises(SettingError, match="cpu back end"):
        step.measured(replace(settings, backend="reference"), **ask)
    with pytest.raises(SettingError, match="--max-model-len"):
        step.measured(settings, **(ask | {"context": 250}))


def test_throughput_counts_all_tokens(settings: EngineSettings) -> None:
    work = asks(9, Lengths.of("5-20"), Lengths.of("2-7"))
    found = throughput(settings, work, show=False)
    assert found["completed"] == 9 and not any("usd" in name for name in found)
    assert found["total_input_tokens"] == sum(len(ask.prompt) for ask in work)
    assert found["total_output_tokens"] == sum(ask.output for ask in work)
    assert found["output_throughput"] == pytest.approx(found["total_output_tokens"] / found["duration"])


def test_throughput_has_a_price(settings: EngineSettings) -> None:
    found = throughput(settings, asks(9, Lengths.of("5-20"), Lengths.of("2-7")), price_per_hour=36.0, show=False)
    prompt, answer = (found[f"usd_per_million_{kind}_tokens"] for kind in ("prompt", "completion"))
    spent = 1e-6 * (prompt * found["total_input_tokens"] + answer * found["total_output_tokens"])
    assert prompt > 0 and answer > 0 and spent <= 0.01 * found["duration"]


def test_latency_of_batches(settings: EngineSettings) -> None:
    found = latency(settings, sequences=3, inputs=10, outputs=4, warmups=1, rounds=2)
    assert found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert 0 < found["median_tpot_ms"] < found["median_e2el_ms"]
    assert "median_tpot_ms" not in latency(settings, sequences=1, inputs=4, outputs=1, warmups=0, rounds=1)


def test_the_parts_of_a_start_are_its_whole(settings: EngineSettings) -> None:
    found = startup.measured(settings, rounds=1)
    assert all(found[part] > 0 for part in startup.PARTS)
    assert found["total"] == pytest.approx(sum(found[part] for part in startup.PARTS))
