"""OpenTelemetry traces: a span for each request that may generate, with what it waited for and what it took below it.

Owes: no request waits for a trace, or fails by one; no text of a client's or a model's in it. Does not know: bodies of
requests and answers. Imported only where traces are asked for: the libraries are an extra.

Names: HTTP's and the GenAI semantic conventions (opentelemetry.io/docs/specs/semconv), ``headrace.`` for our own. The
environment variables of OpenTelemetry's SDK are heeded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.errors import SettingError
from headrace.serve.version import version
from headrace.serve.watch.accounts import cost_of

if TYPE_CHECKING:
    from headrace.core.sampling import SamplingParams
    from headrace.engine.client import Stream
    from headrace.engine.output import Delta

OPERATIONS = {  # by path: gen_ai.operation.name
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
MOST_CHOICES = 32  # of a request whose phases are told
_PATH = "/v1/traces"
_PARAMS = {  # attribute: field of SamplingParams
    "gen_ai.request.choice.count": "n",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.top_p": "top_p",
}
_PHASES = ("queue", "prefill", "decode")


class Tracing:
    """Makes spans and sends them, in the background. endpoint: where a collector takes OTLP over HTTP.

    price_per_hour: of the machine; None: it has none.
    """

    def __init__(self, endpoint: str, price_per_hour: float | None = None) -> None:
        named = Resource({"service.name": "headrace", "service.version": version()})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=_whole(endpoint))))
        self._tracer = self._provider.get_tracer("headrace", version())
        self._parents = TraceContextTextMapPropagator()
        self._price = price_per_hour

    def over(self, app: ASGIApp, model: str) -> ASGIApp:
        """`app`, whose requests are traced. They must have `RequestIds` before them. model: its name in answers."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            trace = self._begun(scope, model) if scope["type"] == "http" and scope["method"] == "POST" else None
            if trace is None:
                await app(scope, receive, send)
                return
            scope["state"]["trace"] = trace

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    trace.status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noting)
            finally:
                trace.end()

        return run

    def _begun(self, scope: Scope, model: str) -> Trace | None:
        """None where there is nothing to tell, or the sampler has decided against it."""
        operation = OPERATIONS.get(scope["path"])
        if operation is None:
            return None
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        clock = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{operation} {model}",
            self._parents.extract(carrier),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "headrace",
                "gen_ai.request.model": model,
                "http.request.method": "POST",
                "http.route": scope["path"],
            },
            start_time=clock + int(1e9 * scope["state"]["arrived"]),
        )
        return Trace(span, self._tracer, clock, self._price) if span.is_recording() else None

    def close(self, seconds: float) -> None:
        """Sends what is left, for so long at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(seconds)


class Trace:
    """One request's. status: of the answer; 0: there was none.

    clock: nanoseconds from time.monotonic's beginning to the epoch's.
    """

    def __init__(self, span: Span, tracer: Tracer, clock: int, price_per_hour: float | None) -> None:
        self.status = 0
        self._span = span
        self._tracer = tracer
        self._clock = clock
        self._price = price_per_hour
        self._streams: Sequence[Stream] = ()
        self._tokens = 0
        self._ends: dict[tuple[int, int], str] = {}
        self._error = ""
        self._closed = False

    def submitted(
        self, id: str, request_id: str, caller: str, params: SamplingParams, streams: Sequence[Stream]
    ) -> None:
        """The engine has it, as these streams. id: of the answer."""
        self._streams = streams
        told = {name: getattr(params, field) for name, field in _PARAMS.items()}
        told |= {"gen_ai.response.id": id, "headrace.request_id": request_id, "headrace.caller": caller or None}
        self._span.set_attributes({name: value for name, value in told.items() if value is not None})

    def saw(self, prompt: int, deltas: Sequence[Delta]) -> None:
        """News of a prompt."""
        for delta in deltas:
            self._tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._ends[prompt, delta.index] = delta.finish_reason

    def failed(self, error: Exception) -> None:
        """It did not end well."""
        self._error = type(error).__name__

    def close(self) -> None:
        """No more news: tells what the engine did; once."""
        if self._streams and not self._closed:
            self._closed = True
            self._tell_phases(time.monotonic())
            self._tell_usage()

    def end(self) -> None:
        """The answer is over, or nobody waits for it any more."""
        self.close()
        choices = sum(stream.choices for stream in self._streams)
        if not self._error and (self.status >= 500 or not self.status):
            self._error = str(self.status or "cancelled")
        if not self._error and self.status < 400 and len(self._ends) < choices:
            self._error = "cancelled"
        if self.status:
            self._span.set_attribute("http.response.status_code", self.status)
        if self._error:
            self._span.set_attribute("error.type", self._error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._at(time.monotonic()))

    def _at(self, monotonic: float) -> int:
        return self._clock + int(1e9 * monotonic)

    def _tell_usage(self) -> None:
        streams, accounts = self._streams, [a for stream in self._streams for a in stream.metrics.accounts.values()]
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [reason for _, reason in sorted(self._ends.items())],
                "gen_ai.usage.input_tokens": sum(len(stream.prompt_token_ids) for stream in streams),
                "gen_ai.usage.output_tokens": self._tokens,
                "gen_ai.usage.cache_read.input_tokens": sum(stream.cached_tokens for stream in streams),
                "headrace.preemptions": sum(account.preemptions for account in accounts),
                "headrace.machine_seconds.prompt": sum(account.prompt_machine for account in accounts),
                "headrace.machine_seconds.completion": sum(account.completion_machine for account in accounts),
            }
        )
        first = [
            stream.metrics.first_token - stream.metrics.arrival for stream in streams if stream.metrics.first_token
        ]
        if first:
            self._span.set_attribute("headrace.seconds_to_first_token", min(first))
        if self._price is not None:
            cost = cost_of(streams, self._price)
            self._span.set_attribute("headrace.cost_usd", cost.prompt + cost.completion)

    def _tell_phases(self, now: float) -> None:
        context = set_span_in_context(self._span)
        choices = ((i, stream, choice) for i, stream in enumerate(self._streams) for choice in range(stream.choices))
        for _, (prompt, stream, choice) in zip(range(MOST_CHOICES), choices, strict=False):
            account = stream.metrics.accounts.get(choice)
            for name, start, end in _phases(stream, choice, now):
                place = {"headrace.prompt": prompt, "headrace.choice": choice}
                span = self._tracer.start_span(name, context, attributes=place, start_time=self._at(start))
                if account is not None and name == "prefill":
                    for first, tokens, seconds, share, mates, began in account.chunks:
                        chunk = {"start": first, "tokens": tokens, "seconds": seconds, "share": share, "mates": mates}
                        told = {f"headrace.chunk.{key}": value for key, value in chunk.items()}
                        span.add_event("chunk", told, self._at(stream.metrics.arrival + began))
                if account is not None and name == "decode":
                    span.set_attribute("headrace.steps", account.decode_steps)
                    span.set_attribute("headrace.batch_mates.mean", account.mean_mates)
                    span.set_attribute("headrace.batch_mates.max", account.most_mates)
                span.end(self._at(end))


def _phases(stream: Stream, choice: int, now: float) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of each that was reached, time.monotonic seconds; the last of a choice given up ends now."""
    account, times = stream.metrics.accounts.get(choice), stream.metrics
    ends = [times.scheduled, times.first_token, now]
    if account is not None:
        ends = [account.queue, account.queue + account.prefill, account.queue + account.prefill + account.decode]
        ends = [times.arrival + end for end in ends]
    start = times.arrival
    for name, end in zip(_PHASES, ends, strict=True):
        yield name, start, end or now
        if not end:
            return
        start = end


def _whole(endpoint: str) -> str:
    """The URL with OTLP's path if it has none. SettingError when it is none."""
    wrong = f"otlp_traces_endpoint must be a URL such as http://localhost:4318{_PATH}, got {endpoint!r}"
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        raise SettingError(wrong, param="otlp_traces_endpoint") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingError(wrong, param="otlp_traces_endpoint")
    return endpoint if parts.path not in ("", "/") else parts._replace(path=_PATH).geturl()
