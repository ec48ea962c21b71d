"""Prometheus metrics: vLLM's names where the meaning is the same, ``headrace:`` for our own. docs/metrics.md lists all.

What the engine counts is read when somebody asks (`serve.snapshot`); here the times of requests are noted as they pass.
Buckets: vLLM's (vllm/v1/metrics), with finer ones below 0.3 s, where small models live.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from headrace.serve.watch.snapshot import LABELS, Snapshot
from headrace.serve.watch.traffic import HttpMetrics

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
_COUNTS = (1, 2, 5, 10, 20)

# name, help, buckets
_HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", _TTFT),
    ("inter_token_latency_seconds", "Between tokens of one choice.", _GAP),
    ("request_time_per_output_token_seconds", "Mean time of a choice's tokens after its first.", _GAP),
    ("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY),
    ("request_queue_time_seconds", "From arrival to the first step that ran the request.", _LATENCY),
    ("request_prefill_time_seconds", "From the first step to the first token.", _LATENCY),
    ("request_decode_time_seconds", "From the first token to the last.", _LATENCY),
    ("request_inference_time_seconds", "From the first step to the last token.", _LATENCY),
    ("request_prompt_tokens", "Tokens of the prompt.", _TOKENS),
    ("request_prefill_kv_computed_tokens", "Tokens of the prompt that were not found in the prefix cache.", _TOKENS),
    ("request_generation_tokens", "Tokens of all choices.", _TOKENS),
    ("request_max_num_generation_tokens", "Tokens of the longest choice.", _TOKENS),
    ("request_params_n", "n of requests.", _COUNTS),
    ("request_params_max_tokens", "max_tokens of requests that named one.", _TOKENS),
    ("request_num_preemptions", "How often a request's choices lost their pages.", (0, *_COUNTS)),
)

_REASONS = ("stop", "length", "abort", "error", "repetition")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one served model.

    price_per_hour: dollars; None: nothing is said of costs. goals: of `base.goals`; requests are counted by them.
    """

    def __init__(
        self,
        engine: EngineClient,
        model_name: str,
        prefix_caching: bool = True,
        *,
        price_per_hour: float | None = None,
        goals: Mapping[str, float] | None = None,
    ) -> None:
        self.goals = dict(goals or {})
        self._registry = registry = CollectorRegistry()
        self._labels = (model_name, "0")
        made = {
            name: Histogram("vllm:" + name, text, LABELS, buckets=buckets, registry=registry)
            for name, text, buckets in _HISTOGRAMS
        }
        self._times = {name: histogram.labels(*self._labels) for name, histogram in made.items()}
        self._success = self._counter("vllm:request_success", "Choices that ended.", ["finished_reason"])
        for reason in _REASONS:
            self._success.labels(*self._labels, reason)
        if self.goals:
            text = "Requests that kept to a goal of --goodput, or to all of them, or did not."
            self._good = self._counter("headrace:goal_requests", text, ["goal", "met"])
            for goal, met in ((g, m) for g in (*self.goals, "all") for m in ("true", "false")):
                self._good.labels(*self._labels, goal, met)
        self.http = HttpMetrics(registry)
        registry.register(Snapshot(engine, self._labels, prefix_caching, price_per_hour))
        for collector in (PlatformCollector, GCCollector, ProcessCollector):
            collector(registry=registry)
        ProcessCollector("headrace_engine", lambda: engine.pid, registry=registry)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(name, text, (*LABELS, *labels), registry=self._registry)

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

    def judged(self, seconds: Mapping[str, float]) -> None:
        """A request has ended, with these times by goal; those it lacks were missed."""
        met = {goal: goal in seconds and 1e3 * seconds[goal] <= limit for goal, limit in self.goals.items()}
        for goal, kept in (met | {"all": all(met.values())}).items():
            self._good.labels(*self._labels, goal, str(kept).lower()).inc()


class _Watch:
    """Times of one request. By choice: when its first and last token came, and how many there were."""

    def __init__(self, metrics: Metrics, stream: Stream) -> None:
        self._metrics = metrics
        self._stream = stream
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._reasons: dict[int, str] = {}

    def saw(self, deltas: Sequence[Delta]) -> None:
        now = time.monotonic()
        for delta in deltas:
            if delta.token_ids:
                self._came(delta.index, len(delta.token_ids), now)
            if delta.finish_reason is not None:
                self._reasons[delta.index] = delta.finish_reason
                self._metrics.finished(delta.finish_reason)

    def _came(self, choice: int, tokens: int, now: float) -> None:
        if choice in self._last:
            self._metrics.observe("inter_token_latency_seconds", (now - self._last[choice]) / tokens)
            self._tokens[choice] += tokens
        else:
            if not self._first:
                self._metrics.observe("time_to_first_token_seconds", max(now - self._stream.metrics.arrival, 0.0))
            self._first[choice], self._tokens[choice] = now, tokens
        self._last[choice] = now

    def ended(self) -> None:
        for _ in range(self._stream.choices - len(self._reasons)):
            self._metrics.finished("abort")
        each = [(self._last[c] - self._first[c]) / (count - 1) for c, count in self._tokens.items() if count > 1]
        seconds = self._seconds()
        for name, value in (seconds | self._sizes()).items():
            self._metrics.observe(name, max(value, 0.0))
        for mean in each:
            self._metrics.observe("request_time_per_output_token_seconds", mean)
        if self._metrics.goals and len(self._reasons) == self._stream.choices and "abort" not in self._reasons.values():
            self._judge(max(each, default=0.0))

    def _seconds(self) -> dict[str, float]:
        times = self._stream.metrics
        known = {"e2e_request_latency_seconds": time.monotonic() - times.arrival}
        if times.scheduled:
            known["request_queue_time_seconds"] = times.scheduled - times.arrival
        if times.scheduled and self._first:
            first, last = min(self._first.values()), max(self._last.values())
            known["request_prefill_time_seconds"] = first - times.scheduled
            known["request_decode_time_seconds"] = last - first
            known["request_inference_time_seconds"] = last - times.scheduled
        return known

    def _sizes(self) -> dict[str, float]:
        stream, counts = self._stream, self._tokens.values()
        known: dict[str, float] = {
            "request_prompt_tokens": len(stream.prompt_token_ids),
            "request_generation_tokens": sum(counts),
            "request_max_num_generation_tokens": max(counts, default=0),
            "request_params_n": stream.choices,
        }
        if stream.max_tokens is not None:
            known["request_params_max_tokens"] = stream.max_tokens
        if stream.metrics.scheduled:
            known["request_num_preemptions"] = stream.metrics.preemptions
            known["request_prefill_kv_computed_tokens"] = len(stream.prompt_token_ids) - stream.cached_tokens
        return known

    def _judge(self, each: float) -> None:
        arrival = self._stream.metrics.arrival
        if not self._first or "error" in self._reasons.values():
            self._metrics.judged({})
            return
        first, last = min(self._first.values()), max(self._last.values())
        self._metrics.judged({"ttft": first - arrival, "tpot": each, "e2el": last - arrival})
