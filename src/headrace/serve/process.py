"""The server process: bind, start the engine, serve, drain, go.

Owes: a port in use is said before a model is loaded; every open stream hears of an end; no process is left behind; the
exit code is 0 when asked to go, 1 when the engine died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Coroutine
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import uvicorn

from headrace.base.errors import EngineError, HeadraceError, SettingError
from headrace.base.log import log, to_stderr
from headrace.base.settings import EngineSettings
from headrace.engine.client import Care, EngineClient
from headrace.engine.messages import Stats
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.serve.errors import GoingAway
from headrace.serve.net.front import Cors, Gate, front
from headrace.serve.net.keys import KeyRing, key_ring
from headrace.serve.net.listening import (
    Listening,
    address,
    bound_to,
    cannot_listen,
    connections_allowed,
    is_loopback,
    tls_context,
)
from headrace.serve.settings import REASONING_FIELDS, ServeSettings
from headrace.weights import resolve

if TYPE_CHECKING:
    from headrace.serve.watch.tracing import Tracing

STATS_SECONDS = 10.0
TRACE_SECONDS = 2.0  # at most, at the end, for the last traces to be sent
LINGER_SECONDS = 0.5  # after the engine's death, for clients and health checks to hear of it


def serve(engine: EngineSettings, settings: ServeSettings) -> int:
    """Serve until told to stop; the exit code. HeadraceError when it cannot start; a log in JSON has that instead."""
    to_stderr(form=settings.log_format, others=True)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each bad request that it answers
    try:
        return _serve(engine, settings)
    except HeadraceError as error:
        if settings.log_format == "human":
            raise
        log.error("%s", error)
        return 1


def _serve(engine: EngineSettings, settings: ServeSettings) -> int:
    keys = key_ring(settings.api_key, settings.api_key_file, os.environ)
    tls = tls_context(settings)
    loop_factory = uvicorn.Config(_run, log_config=None).get_loop_factory()
    with bound_to(settings) as sock:
        if not len(keys) and settings.uds is None and not is_loopback(settings.host):
            log.warning("everybody who reaches %s may use this server: --api-key asks for a key", settings.host)
        # Fetched out here, where Ctrl-C still ends a download; the engine then finds it at once.
        resolve(engine.model, revision=engine.revision)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_run(engine, settings, keys, tls, sock))


async def _run(
    engine: EngineSettings, settings: ServeSettings, keys: KeyRing, tls: ssl.SSLContext | None, sock: socket.socket
) -> int:
    return await _Process(engine, settings, keys, tls).run(sock)


class _Process:
    """From the start to the exit code."""

    def __init__(
        self, engine: EngineSettings, settings: ServeSettings, keys: KeyRing, tls: ssl.SSLContext | None
    ) -> None:
        self._engine_settings = engine
        self._settings = settings
        self._gate = Gate()
        cors = Cors(
            settings.allowed_origins, settings.allowed_methods, settings.allowed_headers, settings.allow_credentials
        )
        self._app = front(self._gate, keys, cors, metrics_open=settings.metrics_without_key)
        self._tls = tls
        self._tracing = tracing_of(settings)
        self._asked = asyncio.Event()  # to go
        self._hurry = asyncio.Event()  # to go at once

    async def run(self, sock: socket.socket) -> int:
        """Serve until told to stop, or until the engine dies."""
        loop = asyncio.get_running_loop()
        for number, handler in ((signal.SIGTERM, self._terminate), (signal.SIGINT, self._interrupt)):
            loop.add_signal_handler(number, handler)
        server = Listening(self._app, self._tls, connections_allowed(self._settings.max_connections))
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        try:
            await _first(serving, server.ready.wait())
            if serving.done():
                host, port = self._settings.host, self._settings.port
                raise cannot_listen(host, port, serving.exception() or OSError("closed"))
            at = address(sock, self._settings)
            log.info("loading %s; requests get 503 until then on %s", self._engine_settings.model, at)
            return await self._loaded(sock)
        finally:
            server.should_exit = True
            with suppress(Exception):
                await serving

    def _terminate(self) -> None:
        (self._hurry if self._asked.is_set() else self._asked).set()

    def _interrupt(self) -> None:
        self._asked.set()
        self._hurry.set()

    async def _loaded(self, sock: socket.socket) -> int:
        care = Care(restarts=self._settings.engine_restarts, patience=self._settings.engine_timeout)
        engine = await self._unless_asked(EngineClient.start(self._engine_settings, care, self._settings.log_format))
        if engine is None:
            return 0
        try:
            return await self._serve(engine, sock)
        finally:
            if self._tracing is not None:
                self._tracing.close(TRACE_SECONDS)
            await engine.close(1.0 if self._hurry.is_set() else 5.0)

    async def _unless_asked(self, work: Coroutine[Any, Any, EngineClient]) -> EngineClient | None:
        """The result of `work`, or None when asked to go before it is there."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return None

    async def _serve(self, engine: EngineClient, sock: socket.socket) -> int:
        app = App(engine, _app_settings(self._engine_settings, self._settings))
        self._gate.open(app.routes if self._tracing is None else self._tracing.over(app.routes, app.names[0]))
        _say_ready(engine, app, sock, self._settings)
        reporting = None if self._settings.disable_log_stats else asyncio.ensure_future(_report(engine))
        await _first(self._asked.wait(), engine.stopped.wait())
        if reporting is not None:
            reporting.cancel()
        return await self._end(engine, app)

    async def _end(self, engine: EngineClient, app: App) -> int:
        """Lets open requests end, one way or the other."""
        if not engine.stopped.is_set():
            app.desk.closing = True
            log.info("shutting down; requests open: %d", app.desk.open)
            left = self._settings.shutdown_timeout
            await _first(app.desk.idle.wait(), self._hurry.wait(), engine.stopped.wait(), within=left)
        died = engine.stopped.is_set()
        if died:
            log.error("the engine process died; requests open: %d", app.desk.open)
        dead, going = EngineError("The engine process has died."), GoingAway("The server is shutting down.")
        app.desk.cut(dead if died else going)
        await asyncio.sleep(LINGER_SECONDS if died else 0)
        with suppress(TimeoutError):
            await asyncio.wait_for(app.desk.idle.wait(), LINGER_SECONDS)
        return 1 if died else 0


def tracing_of(settings: ServeSettings) -> Tracing | None:
    """What sends traces, if anything shall. Its libraries are an extra: they are imported here alone."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        made: Tracing = import_module("headrace.serve.watch.tracing").Tracing(
            settings.otlp_traces_endpoint, settings.price_per_hour
        )
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("opentelemetry"):
            raise
        raise SettingError(
            "otlp_traces_endpoint needs the extra `otel`: pip install 'headrace[otel]'", param="otlp_traces_endpoint"
        ) from None
    return made


def _app_settings(engine: EngineSettings, settings: ServeSettings) -> AppSettings:
    return AppSettings(
        names=settings.served_model_name,
        max_body_bytes=settings.max_body_bytes,
        prefix_caching=engine.enable_prefix_caching,
        prefix_cache_per_key=settings.prefix_cache_per_key,
        any_name=settings.any_model_name,
        trusts_templates=settings.trust_request_chat_template,
        docs=not settings.disable_fastapi_docs,
        reasoning_fields=REASONING_FIELDS[settings.reasoning_field],
        price_per_hour=settings.price_per_hour,
        log_requests=settings.enable_log_requests or settings.enable_log_outputs,
        log_texts=settings.enable_log_outputs,
        max_log_len=settings.max_log_len,
        goodput=settings.goodput,
    )


async def _first(*work: Any, within: float | None = None) -> None:
    """Waits for the first, so many seconds; cancels the rest, other than futures that were given as such."""
    tasks = [asyncio.ensure_future(one) for one in work]
    await asyncio.wait(tasks, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    for task, one in zip(tasks, work, strict=True):
        if task is not one and not task.done():
            task.cancel()


def _say_ready(engine: EngineClient, app: App, sock: socket.socket, settings: ServeSettings) -> None:
    info = engine.info
    log.info(
        "%s: %s, %s of weights%s, loaded in %.2f s; %d threads, %s",
        info.name,
        info.architecture,
        megabytes(info.weight_bytes),
        f" ({info.quantization})" if info.quantization else "",
        info.load_seconds,
        info.threads,
        info.isa,
    )
    log.info(
        "CPU KV cache size: %s tokens (%s, %s), Maximum concurrency for %s tokens per request: %.2fx",
        f"{round(info.concurrency * info.max_model_len):,}",
        megabytes(info.cache_bytes),
        info.kv_cache_dtype,
        f"{info.max_model_len:,}",
        info.concurrency,
    )
    if app.limits.defaults:
        log.info("sampling defaults (generation_config, where a request says nothing): %s", app.limits.defaults)
    if engine.template is None:
        log.warning("the model has no chat template: /v1/chat/completions answers 400")
    names, at = ", ".join(app.names), address(sock, settings)
    docs = "" if settings.disable_fastapi_docs else "docs, "
    log.info("serving %s on %s/v1 (%shealth, metrics, trace beside it)", names, at, docs)
    log.info("Application startup complete.")


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:,.1f} MB"


async def _report(engine: EngineClient) -> None:
    """One line every ten seconds in which there was work."""
    before, then = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(STATS_SECONDS)
        after, now = engine.stats(), time.monotonic()
        if after.steps != before.steps or after.running or after.waiting:
            log.info(stats_line(before, after, now - then))
            if after.drafts != before.drafts:
                log.info(drafts_line(before, after, now - then))
        before, then = after, now


def drafts_line(before: Stats, after: Stats, seconds: float) -> str:
    """How well tokens were guessed between two snapshots, in vLLM's words."""
    drafts = after.drafts - before.drafts
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: {accepted / seconds:.2f} tokens/s, "
        f"Drafted throughput: {drafted / seconds:.2f} tokens/s, "
        f"Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    )


def stats_line(before: Stats, after: Stats, seconds: float) -> str:
    """What was done between two snapshots, in vLLM's words."""
    queries = after.prefix_queries - before.prefix_queries
    hits = after.prefix_hits - before.prefix_hits
    return (
        f"Avg prompt throughput: {(after.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {(after.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, "
        f"Running: {after.running} reqs, Waiting: {after.waiting} reqs, "
        f"CPU KV cache usage: {100 * after.pages_used / max(after.pages, 1):.1f}%, "
        f"Prefix cache hit rate: {100 * hits / max(queries, 1):.1f}%"
    )
