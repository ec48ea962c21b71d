"""/metrics: a page that Prometheus reads, vLLM's names, numbers that are right, and docs/metrics.md as its list."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.base.errors import SettingError
from headrace.base.settings import EngineSettings
from headrace.engine.client import Care, EngineClient
from headrace.engine.messages import STEP_TOKENS, Stats
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.serve.settings import ServeSettings

pytest_plugins = ["serve_fixtures"]

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
PRICE = 3.6  # a thousandth of a dollar a second
ASK = {"prompt": "the answer", "max_tokens": 3}
Page = dict[str, Metric]


async def page(client: httpx.AsyncClient) -> Page:
    response = await client.get("/metrics")
    assert response.status_code == 200
    families = list(text_string_to_metric_families(response.text))
    assert len({family.name for family in families}) == len(families), "a name twice"
    return {family.name: family for family in families}


def value(page: Page, sample: str, **labels: str) -> float:
    """The sum of a sample's series with such labels."""
    name = next(n for n in (sample, *(sample.removesuffix(s) for s in ("_total", "_count", "_sum"))) if n in page)
    found = [s.value for s in page[name].samples if s.name == sample and labels.items() <= s.labels.items()]
    assert found, (sample, labels)
    return sum(found)


async def ask(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=ASK | more)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def client_of(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app.asgi), base_url="http://test")


@pytest.fixture
async def full(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Everything that can be on the page."""
    settings = AppSettings(names=("tiny",), price_per_hour=PRICE, goodput=("ttft:100000 tpot:100000", "e2el:0.001"))
    engine.counts = Stats(generation_tokens=5, step_tokens=[1, 2, *[0] * 12], all_tokens=9, prompt_machine=2.0,
                          drafts=3, drafted_tokens=6, accepted_tokens=4, accepted_at=[3, 1], file_pages=8,
                          prefix_queries=90, prefix_hits=64, file_traffic=[2, 9, 1], loaded_tokens=32)  # fmt: skip
    async with client_of(App(engine, settings)) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture
async def real(tiny: Path) -> AsyncIterator[tuple[EngineClient, httpx.AsyncClient]]:
    settings = EngineSettings(model=str(tiny), max_model_len=512, max_num_batched_tokens=64, measure_roof=True)
    engine = await EngineClient.start(settings, Care(restarts=1))
    async with client_of(App(engine, AppSettings(names=("tiny",), price_per_hour=PRICE))) as made:
        yield engine, made
    await engine.close()


async def test_the_page_is_well_formed(full: httpx.AsyncClient) -> None:
    await ask(full, n=2)
    for family in (await page(full)).values():
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name == family.name + "_total"
            if family.type == "gauge":
                assert sample.name == family.name
        if family.type == "histogram":
            buckets = [s for s in family.samples if s.name.endswith("_bucket")]
            counts = sum(s.value for s in family.samples if s.name.endswith("_count"))
            assert sum(s.value for s in buckets if s.labels["le"] == "+Inf") == counts


async def test_slots_of_layers_with_windows(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    """The fuller of pages and slots is what limits."""
    assert (await page(client))["headrace:kv_slots"].samples == []
    for pages_used, usage in ((2, 0.6), (12, 0.75)):  # of 16
        engine.counts = Stats(pages_used=pages_used, slots=5, slots_used=3, slots_cached=1)
        found = await page(client)
        assert {s.labels["state"]: s.value for s in found["headrace:kv_slots"].samples} == {
            "used": 3, "cached": 1, "free": 1,
        }  # fmt: skip
        assert value(found, "vllm:kv_cache_usage_perc") == pytest.approx(usage)


async def test_vllms_names_are_there(client: httpx.AsyncClient) -> None:
    names = {
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "engine_sleep_state"),
        *("kv_cache_usage_perc", "cache_config_info", "prompt_tokens", "generation_tokens", "prompt_tokens_by_source"),
        *("prompt_tokens_cached", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success"),
        *("admission_rejections", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
        *("request_params_n", "request_params_max_tokens", "iteration_tokens_total", "request_num_preemptions"),
        "request_prefill_kv_computed_tokens",
    }
    found = await page(client)
    assert {"vllm:" + name for name in names} <= found.keys()
    assert {"process_cpu_seconds", "python_info", "headrace_engine_process_resident_memory_bytes"} <= found.keys()
    assert not any("usd" in name or "goal" in name for name in found), "nobody said what it costs, or what is good"


async def test_the_documentation_lists_the_page(full: httpx.AsyncClient) -> None:
    await ask(full)
    rows = [
        f"| `{family.name}{'_total' if family.type == 'counter' else ''}` | {family.type} | {family.documentation} |"
        for name, family in (await page(full)).items()
        if not name.endswith("_created") and not name.startswith(("process_", "python_", "headrace_engine_"))
    ]
    told = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert sorted(told) == sorted(rows), "\n".join(rows)


async def test_guesses_are_counted_where_there_are_any(full: httpx.AsyncClient, real: Any) -> None:
    found = await page(full)
    counts = {name: value(found, f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens")}
    assert counts == {"drafts": 3, "draft_tokens": 6}
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(found, name, position=str(place)) for place in range(2)] == [3, 1]
    assert value(found, "vllm:spec_decode_num_accepted_tokens_total") == 4
    assert not any("spec_decode" in name for name in await page(real[1]))


async def test_the_file_of_pages_is_counted_where_there_is_one(full: httpx.AsyncClient, real: Any) -> None:
    found = await page(full)
    assert value(found, "headrace:kv_file_pages") == 8
    ways = ("loaded", "stored", "damaged")
    assert [value(found, "headrace:kv_file_traffic_pages_total", way=way) for way in ways] == [2, 9, 1]
    tokens = [value(found, f"vllm:external_prefix_cache_{name}_total") for name in ("queries", "hits")]
    assert tokens == [90 - 64 + 32, 32]
    assert not any("kv_file" in name or "external" in name for name in await page(real[1]))


async def test_requests_are_measured(full: httpx.AsyncClient) -> None:
    await ask(full, n=2)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await full.post("/v1/chat/completions", json=chat)).status_code == 200
    found = await page(full)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time", "request_inference_time"):  # fmt: skip
        assert value(found, f"vllm:{name}_seconds_count") == 2
    assert value(found, "vllm:request_time_per_output_token_seconds_count") == 3, "one a choice"
    assert value(found, "vllm:request_params_n_sum") == 3 and value(found, "vllm:request_params_max_tokens_sum") == 3
    assert value(found, "vllm:request_max_num_generation_tokens_sum") < value(
        found, "vllm:request_generation_tokens_sum"
    )
    assert value(found, "vllm:request_success_total", finished_reason="length") == 2
    assert value(found, "vllm:request_prefill_kv_computed_tokens_sum") == value(found, "vllm:prompt_tokens_total") - 2
    decode, inference = (value(found, f"vllm:request_{name}_time_seconds_sum") for name in ("decode", "inference"))
    assert 0 < decode <= inference


async def test_goals_are_counted(full: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(full)
    engine.trouble = lambda stream, number: stream.cancel() if number else None
    assert (await full.post("/v1/completions", json=ASK)).status_code == 503, "given up: not judged"
    found = await page(full)
    for goal, met in (("ttft", 1), ("tpot", 1), ("e2el", 0), ("all", 0)):
        assert value(found, "headrace:goal_requests_total", goal=goal, met="true") == met
        assert value(found, "headrace:goal_requests_total", goal=goal, met="false") == 1 - met


@pytest.mark.parametrize("goal", ["ttft", "ttft:0", "speed:5", ""])
def test_what_is_no_goal_is_refused(goal: str) -> None:
    with pytest.raises(SettingError) as raised:
        ServeSettings(goodput=(goal,))
    assert raised.value.param == "goodput"


async def test_http_requests_are_counted_by_route(client: httpx.AsyncClient) -> None:
    await ask(client)
    await client.post("/v1/completions", json={"nonsense": 1})
    for i in range(5):
        await client.get(f"/v1/models/nobody-{i}")
        await client.get(f"/no/such/path/{i}")
        await client.request(f"ODD{i}", f"/no/such/path/{i}")
    await client.get("/health")
    found = await page(client)
    assert value(found, "http_requests_total", handler="/v1/completions", method="POST", status="2xx") == 1
    assert value(found, "http_requests_total", handler="/v1/completions", method="POST", status="4xx") == 1
    assert value(found, "http_requests_total", handler="/v1/models/{id}", status="4xx") == 5
    assert value(found, "http_requests_total", handler="none", method="GET") == 5
    assert value(found, "http_requests_total", handler="none", method="other") == 5
    assert value(found, "http_request_duration_seconds_count") == 17
    assert {s.labels["handler"] for s in found["http_requests"].samples} == {
        *("/v1/completions", "/v1/models/{id}", "none"),
    }


async def test_the_engines_counts_and_costs_add_up(real: tuple[EngineClient, httpx.AsyncClient]) -> None:
    engine, client = real
    answers = await asyncio.gather(*(ask(client, prompt="word " * 20 * i, max_tokens=9) for i in range(1, 5)))
    answers.append(await ask(client, prompt="word " * 80, max_tokens=9))
    usages = [answer["usage"] for answer in answers]
    found = await page(client)
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert value(found, "vllm:prompt_tokens_total") == prompts and cached > 0
    assert value(found, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached
    assert value(found, "vllm:prompt_tokens_by_source_total", source="local_compute") == prompts - cached
    decoded = sum(usage["completion_tokens"] - 1 for usage in usages)
    assert value(found, "vllm:iteration_tokens_total_sum") == prompts - cached + decoded
    assert value(found, "vllm:iteration_tokens_total_count") == value(found, "headrace:steps_total")
    busy, machine = value(found, "headrace:step_seconds_total"), value(found, "headrace:machine_seconds_total")
    assert 0 < machine <= busy + 1e-9 and busy - machine < 0.5 * busy, "all but the last commit"
    cost = sum(usage["cost"] for usage in usages)
    assert value(found, "headrace:cost_usd_total") == pytest.approx(cost) == pytest.approx(PRICE / 3600 * machine)
    million = value(found, "headrace:usd_per_million_tokens", kind="prompt")
    assert million == pytest.approx(1e6 * sum(usage["cost_details"]["prompt"] for usage in usages) / prompts)
    assert value(found, "headrace:roof_seconds_total") > 0
    assert value(found, "vllm:estimated_read_bytes_per_gpu_total") > value(found, "headrace:steps_total") * 1000
    assert value(found, "vllm:estimated_flops_per_gpu_total") > value(found, "vllm:iteration_tokens_total_sum") * 1000
    pages = {s.labels["state"]: s.value for s in found["headrace:kv_pages"].samples}
    assert sum(pages.values()) == engine.info.pages and pages["used"] == 0 and pages["cached"] > 0


async def test_counters_go_on_when_the_engine_is_started_again(real: tuple[EngineClient, httpx.AsyncClient]) -> None:
    engine, client = real
    await ask(client)
    before = await page(client)
    os.kill(engine.pid, signal.SIGKILL)
    while engine.alive:
        await asyncio.sleep(0.01)
    during = await page(client)
    while not engine.alive:
        await asyncio.sleep(0.05)
    await ask(client)
    after = await page(client)
    for then, now in ((before, during), (during, after)):
        for name, family in then.items():
            if family.type == "counter" and not name.startswith("headrace_engine_process"):
                assert value(now, f"{name}_total") >= value(then, f"{name}_total"), name
    for name in ("headrace:steps", "headrace:machine_seconds", "headrace:cost_usd", "vllm:generation_tokens"):
        assert value(after, f"{name}_total") > value(before, f"{name}_total"), name


def test_the_buckets_of_steps_are_vllms() -> None:
    assert STEP_TOKENS[:4] == (1, 8, 16, 32) and STEP_TOKENS[-1] == 16384
