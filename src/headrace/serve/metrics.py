"""Prometheus metrics: vLLM's names where the meaning is the same, ``headrace:`` for our own.

Gauges and counters are read from the engine's latest snapshot when somebody asks; only times are noted as they pass.
Buckets: vLLM's (vllm/v1/metrics), with finer ones below 0.3 s, where small models live.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.queue import REASONS

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient, Stream
    from headrace.engine.output import Delta

# fmt: off
_TTFT = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
_GAP = (
    .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
_LATENCY = (
    .01, .03, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
# fmt: on
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

# name, help, buckets
_HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", _TTFT),
    ("inter_token_latency_seconds", "Between tokens of one choice.", _GAP),
    ("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY),
    ("request_queue_time_seconds", "From arrival to the first step that ran the request.", _LATENCY),
    ("request_prompt_tokens", "Tokens of the prompt.", _TOKENS),
    ("request_generation_tokens", "Tokens of all choices.", _TOKENS),
)

# name, help, field of Stats
_GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch.", "running"),
    ("vllm:num_requests_waiting", "Requests waiting to be run.", "waiting"),
    ("headrace:kv_pages_used", "KV pages that sequences hold.", "pages_used"),
    ("headrace:kv_pages_cached", "KV pages kept for their prefixes only.", "pages_cached"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("vllm:num_preemptions", "Sequences that lost their pages and began again.", "preemptions"),
    ("headrace:steps", "Steps of the engine.", "steps"),
)
_LABELS = ("model_name", "engine")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one served model."""

    def __init__(self, engine: EngineClient, model_name: str, prefix_caching: bool = True) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        made = {
            name: Histogram("vllm:" + name, text, _LABELS, buckets=buckets, registry=self._registry)
            for name, text, buckets in _HISTOGRAMS
        }
        self._times = {name: histogram.labels(*self._labels) for name, histogram in made.items()}
        labels = (*_LABELS, "finished_reason")
        self._success = Counter("vllm:request_success", "Choices that ended.", labels, registry=self._registry)
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._labels, reason)
        self._registry.register(_Snapshot(engine, self._labels, prefix_caching))

    def text(self) -> bytes:
        """The Prometheus text format, 0.0.4."""
        return bytes(generate_latest(self._registry))

    async def follow(self, stream: Stream) -> AsyncGenerator[list[Delta], None]:
        """The news of a request, with their times noted; what is left when it is closed counts as aborted."""
        watch = _Watch(self, stream)
        try:
            async for deltas in stream:
                watch.saw(deltas)
                yield deltas
        finally:
            watch.ended()

    def observe(self, name: str, value: float) -> None:
        """Adds to a histogram of the table above."""
        self._times[name].observe(value)

    def finished(self, reason: str) -> None:
        """A choice has ended so."""
        self._success.labels(*self._labels, reason).inc()


class _Watch:
    """Times of one request."""

    def __init__(self, metrics: Metrics, stream: Stream) -> None:
        self._metrics = metrics
        self._stream = stream
        self._last: dict[int, float] = {}
        self._tokens = 0
        self._finished: set[int] = set()

    def saw(self, deltas: Sequence[Delta]) -> None:
        now = time.monotonic()
        if not self._last and any(d.token_ids for d in deltas):
            self._metrics.observe("time_to_first_token_seconds", max(now - self._stream.metrics.arrival, 0.0))
        for delta in deltas:
            self._tokens += len(delta.token_ids)
            if delta.token_ids:
                self._gap(delta.index, len(delta.token_ids), now)
            if delta.finish_reason is not None:
                self._finished.add(delta.index)
                self._metrics.finished(delta.finish_reason)

    def _gap(self, choice: int, tokens: int, now: float) -> None:
        if choice in self._last:
            self._metrics.observe("inter_token_latency_seconds", (now - self._last[choice]) / tokens)
        self._last[choice] = now

    def ended(self) -> None:
        times, metrics = self._stream.metrics, self._metrics
        for _ in range(self._stream.choices - len(self._finished)):
            metrics.finished("abort")
        if times.scheduled:
            metrics.observe("request_queue_time_seconds", max(times.scheduled - times.arrival, 0.0))
        metrics.observe("e2e_request_latency_seconds", max(time.monotonic() - times.arrival, 0.0))
        metrics.observe("request_prompt_tokens", len(self._stream.prompt_token_ids))
        metrics.observe("request_generation_tokens", self._tokens)


class _Snapshot(Collector):
    """The engine's own numbers at the moment of the scrape."""

    def __init__(self, engine: EngineClient, labels: tuple[str, ...], prefix_caching: bool) -> None:
        self._engine = engine
        self._labels = labels
        self._prefix_caching = prefix_caching

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, attribute in _GAUGES:
            yield self._gauge(name, text, getattr(stats, attribute))
        used = stats.pages_used / stats.pages if stats.pages else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", used)
        for name, text, attribute in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, getattr(stats, attribute))
            yield counter
        yield from self._admission(stats.waiting)
        yield self._config()

    def _admission(self, waiting: int) -> Iterator[Metric]:
        labels = (*_LABELS, "reason")
        text = "Requests waiting to be run, by what they wait for."
        gauge = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=labels)
        gauge.add_metric((*self._labels, "capacity"), waiting)
        yield gauge
        refused = CounterMetricFamily("vllm:admission_rejections", "Requests refused, by the limit.", labels=labels)
        for reason in REASONS:
            refused.add_metric((*self._labels, reason), self._engine.queue.refused[reason])
        yield refused

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _config(self) -> Metric:
        info = self._engine.info
        config: dict[str, Any] = {
            "engine": "0",
            "block_size": info.page_tokens,
            "num_gpu_blocks": info.pages,
            "num_cpu_blocks": info.pages,
            "page_bytes": info.page_bytes,
            "max_model_len": info.max_model_len,
            "enable_prefix_caching": self._prefix_caching,
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, as labels.", labels=list(config))
        gauge.add_metric([str(value) for value in config.values()], 1)
        return gauge
