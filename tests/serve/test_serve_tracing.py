"""Traces of requests: what a collector gets, and that nobody waits for one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from child_server import serving
from headrace.base.errors import EngineError, SettingError
from headrace.base.settings import EngineSettings
from headrace.engine.client import EngineClient
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.serve.net.http import RequestIds
from headrace.serve.process import tracing_of
from headrace.serve.settings import ServeSettings
from headrace.serve.watch.tracing import OPERATIONS, Tracing

pytest_plugins = ["serve_fixtures"]

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASK = {"prompt": "the answer", "max_tokens": 3}
SECRET = "the answer is here"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.silent = threading.Event()  # set: it takes connections and answers nobody
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.paths.append(self.path)
                if outer.silent.is_set():
                    time.sleep(20)
                outer.bodies.append(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Span]:
        return [
            Span(span, {item.key: _value(item.value) for item in resource.resource.attributes})
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Span:
    def __init__(self, span: Any, resource: dict[str, Any]) -> None:
        self.name: str = span.name
        self.id: str = span.span_id.hex()
        self.parent: str = span.parent_span_id.hex()
        self.trace: str = span.trace_id.hex()
        self.start, self.end = span.start_time_unix_nano, span.end_time_unix_nano
        self.failed: bool = span.status.code == 2
        self.told = {item.key: _value(item.value) for item in span.attributes}
        self.events = [(e.time_unix_nano, {a.key: _value(a.value) for a in e.attributes}) for e in span.events]
        self.resource = resource


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


@asynccontextmanager
async def traced(
    collector: Collector, engine: Any, settings: AppSettings | None = None, **more: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose traces have arrived when it is closed."""
    tracing = Tracing(collector.url, more.pop("price_per_hour", None))
    app = RequestIds(tracing.over(App(engine, settings or AppSettings(names=("tiny",))).routes, "tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", **more) as client:
        yield client
    await asyncio.to_thread(tracing.close, 10)


async def test_a_request_is_a_span_with_its_phases_below(collector: Collector, tiny: Path) -> None:
    engine = await EngineClient.start(EngineSettings(model=str(tiny), max_model_len=512, max_num_batched_tokens=64))
    began = time.time_ns()
    settings = AppSettings(names=("tiny",), price_per_hour=3600.0)
    async with traced(collector, engine, settings, price_per_hour=3600.0) as client:
        body = {"prompt": SECRET + " word" * 60, "max_tokens": 5, "temperature": 0.5, "seed": 7, "timings": True}
        sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = (await client.post("/v1/completions", json=body, headers=sent)).json()
    ended = time.time_ns()
    await engine.close()
    spans = {span.name: span for span in collector.spans}
    assert collector.paths == ["/v1/traces"] and len(collector.spans) == len(spans) == 4
    root = spans["text_completion tiny"]
    assert (root.trace, root.parent, root.failed) == (TRACE, PARENT, False)
    usage, timings = answer["usage"], answer["timings"]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "headrace.request_id": "mine",
        "headrace.cost_usd": pytest.approx(usage["cost"]),
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
    }
    assert {name: root.told[name] for name in expected} == expected
    assert root.resource["service.name"] == "headrace"
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    for span in (queue, prefill, decode):
        assert span.trace == TRACE and span.parent == root.id
    assert began <= root.start <= queue.start and queue.end == prefill.start and prefill.end == decode.start
    assert decode.end <= root.end <= ended
    for span, told in ((queue, "queue_ms"), (prefill, "prefill_ms"), (decode, "decode_ms")):
        assert (span.end - span.start) / 1e6 == pytest.approx(timings[told], abs=0.01)
    assert len(prefill.events) == len(timings["prefill"]) > 1
    for (at, event), chunk in zip(prefill.events, timings["prefill"], strict=True):
        assert event["headrace.chunk.start"] == chunk["start"] and event["headrace.chunk.tokens"] == chunk["tokens"]
        assert (at - queue.start) / 1e6 == pytest.approx(chunk["at_ms"], abs=0.01)
    times = [at for at, _ in prefill.events]
    assert times == sorted(times) and prefill.start <= times[0] + 1000 and times[-1] <= prefill.end


async def test_what_a_stop_string_ends_has_its_account(collector: Collector, tiny: Path) -> None:
    engine = await EngineClient.start(EngineSettings(model=str(tiny), max_model_len=512))
    async with traced(collector, engine) as client:
        body: dict[str, Any] = {"prompt": "the answer", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        text = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        answer = (await client.post("/v1/completions", json=body | {"stop": text[4:7]})).json()["choices"][0]
    await engine.close()
    assert answer["finish_reason"] == "stop" and len(answer["text"]) < len(text)
    roots = [span for span in collector.spans if span.name.startswith("text")]
    assert len(roots) == 2 and all(root.told["headrace.machine_seconds.completion"] > 0 for root in roots)


async def test_no_text_is_in_a_trace(collector: Collector, engine: FakeEngine) -> None:
    async with traced(collector, engine) as client:
        chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "user": SECRET}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat | {"user": None}),
            ("/v1/responses", {"input": SECRET}),
            ("/v1/completions", {"prompt": SECRET, "max_tokens": 4, "stop": [SECRET]}),
        ):
            answer = await client.post(path, json={k: v for k, v in body.items() if v is not None})
            assert answer.status_code == 200, answer.text
        assert (await client.post("/v1/completions", json={"prompt": SECRET, SECRET: 1})).status_code == 400
        assert (await client.get("/v1/models")).status_code == 200
    assert collector.bodies and not any(word.encode() in b for b in collector.bodies for word in (SECRET, "answer is"))
    names = [span.name for span in collector.spans if span.name not in ("queue", "prefill", "decode")]
    assert names == [f"{OPERATIONS[path]} tiny" for path in (
        "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/completions")]  # fmt: skip
    refused = [span for span in collector.spans if span.told.get("http.response.status_code") == 400]
    assert len(refused) == 1 and not refused[0].failed and "gen_ai.response.id" not in refused[0].told


async def test_each_choice_has_its_phases_up_to_a_limit(collector: Collector, engine: FakeEngine) -> None:
    async with traced(collector, engine) as client:
        assert (await client.post("/v1/completions", json=ASK | {"prompt": ["a", "b"], "n": 2})).status_code == 200
    places = [(s.told["headrace.prompt"], s.told["headrace.choice"]) for s in collector.spans if s.name == "decode"]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    collector.bodies.clear()
    async with traced(collector, engine) as client:
        assert (await client.post("/v1/completions", json=ASK | {"prompt": ["a"] * 20, "n": 3})).status_code == 200
    assert sum(span.name == "decode" for span in collector.spans) == 32


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_are_told(collector: Collector, engine: FakeEngine, stream: bool) -> None:
    def die(stream: Any, number: int) -> None:
        if number == 1:
            stream.fail(EngineError("secret words"))

    async with traced(collector, engine) as client:
        engine.trouble = die
        await client.post("/v1/completions", json=ASK | {"stream": stream})
        engine.trouble = None
        assert (await client.post("/v1/completions", json=ASK | {"stream": stream})).status_code == 200
    bad, good = (span for span in collector.spans if span.name.startswith("text"))
    assert bad.failed and bad.told["error.type"] == "EngineError" and bad.told["gen_ai.usage.output_tokens"] > 0
    assert not good.failed and "error.type" not in good.told
    assert not any(b"secret words" in body for body in collector.bodies)


async def test_who_leaves_is_told(collector: Collector, engine: FakeEngine) -> None:
    engine.pace = 0.05
    async with traced(collector, engine) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.post("/v1/completions", json=ASK), 0.08)
    root = next(span for span in collector.spans if span.name.startswith("text"))
    assert root.failed and root.told["error.type"] == "cancelled"
    assert root.end >= max(span.end for span in collector.spans)


@pytest.mark.parametrize("parent", ["", "junk", "00-" + "0" * 32 + "-" + PARENT + "-01", "00-" + "f" * 9000, "ü"])
async def test_a_bad_parent_is_none(collector: Collector, engine: FakeEngine, parent: str) -> None:
    async with traced(collector, engine) as client:
        headers = [(b"traceparent", parent.encode("latin-1")), (b"tracestate", b"a=b," * 500)]
        assert (await client.post("/v1/completions", json=ASK, headers=headers)).status_code == 200
    root = next(span for span in collector.spans if span.name.startswith("text"))
    assert root.parent == "" and root.trace not in (TRACE, "0" * 32)


async def test_what_is_not_sampled_costs_nothing(
    collector: Collector, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    async with traced(collector, engine) as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert (await client.post("/v1/completions", json=ASK, headers=sampled)).status_code == 200
    assert {span.trace for span in collector.spans} == {TRACE}
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "state": {"arrived": 1.0}}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert "trace" not in scope["state"]

    await Tracing(collector.url).over(app, "tiny")(scope, None, None)  # type: ignore[arg-type]
    assert collector.spans[0].resource["service.name"] == "mine"


@pytest.mark.parametrize("where", ["nobody", "silent"])
async def test_nobody_waits_for_a_collector(collector: Collector, engine: FakeEngine, where: str) -> None:
    collector.silent.set()
    if where == "nobody":
        collector.server.shutdown()
        collector.server.server_close()
    tracing = Tracing(collector.url)
    app = RequestIds(tracing.over(App(engine, AppSettings(names=("tiny",))).routes, "tiny"))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for _ in range(20):
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    start = time.monotonic()
    await asyncio.to_thread(tracing.close, 0.3)
    assert time.monotonic() - start < 10, "exporting takes 10 s, the SDK's own end 30 s more"


@pytest.mark.parametrize("url", ["", "localhost:4318", "grpc://localhost:4317", "http://", "http://[x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SettingError) as raised:
        tracing_of(ServeSettings(otlp_traces_endpoint=url))
    assert raised.value.param == "otlp_traces_endpoint"


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headrace.serve.watch.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)  # not installed
    with pytest.raises(SettingError, match=r"pip install 'headrace\[otel\]'"):
        tracing_of(ServeSettings(otlp_traces_endpoint="http://localhost:4318"))
    assert tracing_of(ServeSettings()) is None


def test_without_the_flag_nothing_is_imported() -> None:
    code = "import sys, headrace.cli.serve; print([name for name in sys.modules if name.startswith('opentelemetry.')])"
    loaded = subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True).stdout
    assert ".sdk" not in loaded and ".exporter" not in loaded, "FastAPI loads the interfaces, nobody the rest"


def test_a_server_sends_traces_and_does_not_wait_at_the_end(collector: Collector, tiny: Path) -> None:
    with serving(tiny, "--otlp-traces-endpoint", collector.url) as server:
        answer = server.openai.completions.create(model=str(tiny), prompt="the answer", max_tokens=4)
        assert server.stop(within=30) == 0, server.log
        assert "Traceback" not in server.log
    root = next(span for span in collector.spans if span.name.startswith("text_completion"))
    assert root.told["gen_ai.response.id"] == answer.id


async def test_without_the_flag_nothing_is_told(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by FastAPI, which has traces of its own, where whoever embeds it has set a provider."""
    told, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(told))
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    assert not told.get_finished_spans()
