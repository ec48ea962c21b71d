"""What the engine counts, as Prometheus families: tables over the fields of `engine.messages.Stats`.

Owes: nothing is computed unless somebody asks; counters never go back, also when the engine was started again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.messages import STEP_TOKENS, Stats
from headrace.engine.queue import REASONS

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient

LABELS = ("model_name", "engine")

Values = Callable[[Stats], Mapping[str, float]]


class Row(NamedTuple):
    """A metric of the engine's snapshot. label: "" for none. values: by the label's values."""

    name: str
    text: str
    values: Values
    label: str = ""


def _one(field: str) -> Values:
    return lambda stats: {"": getattr(stats, field)}


def _pages(stats: Stats) -> dict[str, float]:
    used, cached = stats.pages_used, stats.pages_cached
    return {"used": used, "cached": cached, "free": stats.pages - used - cached}


def _slots(stats: Stats) -> dict[str, float]:
    used, cached = stats.slots_used, stats.slots_cached
    return {"used": used, "cached": cached, "free": stats.slots - used - cached} if stats.slots else {}


def _usage(stats: Stats) -> float:
    pages = stats.pages_used / stats.pages if stats.pages else 0.0
    return max(pages, stats.slots_used / stats.slots) if stats.slots else pages


def _sources(stats: Stats) -> dict[str, float]:
    return {"local_compute": stats.prompt_tokens - stats.cached_tokens, "local_cache_hit": stats.cached_tokens}


def _parts(stats: Stats) -> dict[str, float]:
    return {"schedule": stats.schedule_seconds, "run": stats.run_seconds, "commit": stats.commit_seconds}


def _traffic(stats: Stats) -> dict[str, float]:
    return dict(zip(("loaded", "stored", "damaged"), stats.file_traffic, strict=True))


def _measured(stats: Stats) -> dict[str, float]:
    return {"": stats.roof_seconds} if stats.roof_seconds else {}


def _places(stats: Stats) -> dict[str, float]:
    return {str(place): count for place, count in enumerate(stats.accepted_at)}


def _machine(stats: Stats) -> dict[str, float]:
    return {"prompt": stats.prompt_machine, "completion": stats.completion_machine}


_GAUGES = (
    Row("vllm:num_requests_running", "Requests in the running batch.", _one("running")),
    Row("vllm:num_requests_waiting", "Requests waiting to be run.", _one("waiting")),
    Row(
        "vllm:num_requests_waiting_by_reason",
        "Requests waiting to be run, by what they wait for.",
        lambda stats: {"capacity": stats.waiting},
        "reason",
    ),
    Row(
        "vllm:kv_cache_usage_perc",
        "Share of the KV pages in use, or of the slots if that is more, 0 to 1.",
        lambda stats: {"": _usage(stats)},
    ),
    Row(
        "vllm:engine_sleep_state",
        "Always awake.",
        lambda _: {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        "sleep_state",
    ),
    Row("headrace:kv_pages", "KV pages: held by sequences, kept for their prefixes only, free.", _pages, "state"),
    Row(
        "headrace:kv_slots", "Of layers with windows: seen by sequences, kept for prefixes only, free.", _slots, "state"
    ),
)
_COUNTERS = (
    Row("vllm:prompt_tokens", "Prompt tokens processed.", _one("prompt_tokens")),
    Row("vllm:prompt_tokens_by_source", "Prompt tokens, by where their keys and values are from.", _sources, "source"),
    Row("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", _one("cached_tokens")),
    Row("vllm:generation_tokens", "Tokens generated.", _one("generation_tokens")),
    Row("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", _one("prefix_queries")),
    Row("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", _one("prefix_hits")),
    Row("vllm:num_preemptions", "Sequences that lost their pages and began again.", _one("preemptions")),
    Row("headrace:recomputed_tokens", "Tokens computed again after preemptions.", _one("recomputed")),
    Row("headrace:steps", "Steps of the engine.", _one("steps")),
    Row(
        "headrace:step_seconds",
        "Time of all steps, by part; the sum is how long it was busy.",
        _parts,
        "part",
    ),
    Row(
        "headrace:machine_seconds",
        "Time of all steps, divided among tokens of either kind.",
        _machine,
        "kind",
    ),
    Row("vllm:estimated_read_bytes_per_gpu", "Bytes of weights and KV cache that steps read.", _one("read_bytes")),
    Row("vllm:estimated_flops_per_gpu", "Twice the multiply-adds of all steps.", lambda s: {"": 2 * s.macs}),
    Row("headrace:roof_seconds", "The least that all steps could take, with --measure-roof.", _measured),
    Row("headrace:aborted_machine_seconds", "What of it went to requests that were given up.", _one("aborted_machine")),
)

_DRAFTS = (  # with speculation only
    Row("vllm:spec_decode_num_drafts", "Chains of guessed tokens that were verified.", _one("drafts")),
    Row("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed.", _one("drafted_tokens")),
    Row("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right.", _one("accepted_tokens")),
    Row(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Guessed tokens that were right, by their place in the chain.",
        _places,
        "position",
    ),
)

_FILE_PAGES = Row("headrace:kv_file_pages", "KV pages in the file of --kv-cache-dir.", _one("file_pages"))
_FILE = (  # with --kv-cache-dir only
    Row("headrace:kv_file_traffic_pages", "KV pages that came from that file, and went there.", _traffic, "way"),
    Row("vllm:external_prefix_cache_hits", "Prompt tokens found in --kv-cache-dir.", _one("loaded_tokens")),
    Row(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens looked up in --kv-cache-dir: those that memory has not.",
        lambda stats: {"": stats.prefix_queries - stats.prefix_hits + stats.loaded_tokens},
    ),
)


def _costs(per_hour: float) -> tuple[Sequence[Row], Sequence[Row]]:
    """Gauges and counters of a machine that has a price."""
    each = per_hour / 3600

    def million(stats: Stats) -> dict[str, float]:
        tokens = {"prompt": stats.prompt_tokens, "completion": stats.generation_tokens}
        return {kind: 1e6 * each * s / tokens[kind] for kind, s in _machine(stats).items() if tokens[kind]}

    def spent(stats: Stats) -> dict[str, float]:
        return {kind: each * seconds for kind, seconds in _machine(stats).items()}

    gauges = (
        Row("headrace:price_usd_per_hour", "--price-per-hour.", lambda _: {"": per_hour}),
        Row("headrace:usd_per_million_tokens", "What a million tokens have cost since the start.", million, "kind"),
    )
    return gauges, (Row("headrace:cost_usd", "Machine time times its price.", spent, "kind"),)


class Snapshot(Collector):
    """The engine's numbers at the moment of the scrape. labels: values of `LABELS`. price_per_hour: dollars."""

    def __init__(
        self, engine: EngineClient, labels: tuple[str, ...], prefix_caching: bool, price_per_hour: float | None
    ) -> None:
        self._engine = engine
        self._labels = labels
        self._prefix_caching = prefix_caching
        gauges, counters = ((), ()) if price_per_hour is None else _costs(price_per_hour)
        self._gauges, self._counters = (*_GAUGES, *gauges), (*_COUNTERS, *counters)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for row in self._gauges:
            yield self._family(GaugeMetricFamily, row, stats)
        for row in self._counters:
            yield self._family(CounterMetricFamily, row, stats)
        for row in _DRAFTS if stats.accepted_at else ():
            yield self._family(CounterMetricFamily, row, stats)
        if stats.file_traffic:
            yield self._family(GaugeMetricFamily, _FILE_PAGES, stats)
        for row in _FILE if stats.file_traffic else ():
            yield self._family(CounterMetricFamily, row, stats)
        refused = self._engine.queue.refused
        reasons = Row(
            "vllm:admission_rejections",
            "Requests refused, by the limit.",
            lambda _: {reason: refused[reason] for reason in REASONS},
            "reason",
        )
        yield self._family(CounterMetricFamily, reasons, stats)
        restarts = Row("headrace:engine_restarts", "Engines started in the place of one that died.", self._restarts)
        yield self._family(CounterMetricFamily, restarts, stats)
        yield self._step_tokens(stats)
        yield self._config()

    def _restarts(self, stats: Stats) -> dict[str, float]:
        return {"": self._engine.restarts}

    def _family(self, kind: type[Any], row: Row, stats: Stats) -> Metric:
        family: Metric = kind(row.name, row.text, labels=(*LABELS, row.label) if row.label else LABELS)
        for label, value in row.values(stats).items():
            family.add_metric((*self._labels, label) if row.label else self._labels, value)  # type: ignore[attr-defined]
        return family

    def _step_tokens(self, stats: Stats) -> Metric:
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=LABELS)
        buckets, count = [], 0
        for limit, steps in zip((*STEP_TOKENS, "+Inf"), stats.step_tokens, strict=False):
            count += steps
            buckets.append((str(limit), count))
        if buckets:
            family.add_metric(self._labels, buckets, stats.all_tokens)
        return family

    def _config(self) -> Metric:
        info = self._engine.info
        config: dict[str, Any] = {
            "engine": "0",
            "block_size": info.page_tokens,
            "num_gpu_blocks": info.pages,
            "num_cpu_blocks": info.pages,
            "page_bytes": info.page_bytes,
            "cache_dtype": info.kv_cache_dtype,
            "max_model_len": info.max_model_len,
            "enable_prefix_caching": self._prefix_caching,
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, as labels.", labels=list(config))
        gauge.add_metric([str(value) for value in config.values()], 1)
        return gauge
