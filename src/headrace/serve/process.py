"""The server process: bind, start the engine, serve, drain, go.

Owes: a port in use is said before a model is loaded; every open stream hears of an end; no process is left behind; the
exit code is 0 when asked to go, 1 when the engine died.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from headrace.base.errors import EngineError, SettingError
from headrace.base.log import log, to_stderr
from headrace.base.settings import EngineSettings
from headrace.engine.client import EngineClient
from headrace.engine.messages import Stats
from headrace.serve.app import App
from headrace.serve.errors import GoingAway
from headrace.serve.http import Protocol11
from headrace.serve.service import AppSettings
from headrace.serve.settings import ServeSettings
from headrace.weights import resolve

STATS_SECONDS = 10.0
LINGER_SECONDS = 0.5  # after the engine's death, for clients and health checks to hear of it
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that none is closed as they reuse it
GRACE_SECONDS = 1  # for connections to close once their responses have ended


def serve(engine: EngineSettings, settings: ServeSettings) -> int:
    """Serve until told to stop; the exit code. Raises HeadraceError when it cannot start."""
    to_stderr()
    sock = bind(settings.host, settings.port)
    # Fetched out here, where Ctrl-C still ends a download; the engine then finds it at once.
    resolve(engine.model, revision=engine.revision)
    with sock, asyncio.Runner(loop_factory=_config(None).get_loop_factory()) as runner:
        return runner.run(_Process(engine, settings, sock).run())


def bind(host: str, port: int) -> socket.socket:
    """A socket bound, not listening yet. SettingError(param="port" or "host") says why it cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingError(f"cannot listen on host {host!r}: {error.strerror}", param="host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise _cannot_bind(host, port, error) from None
    return sock


def _cannot_bind(host: str, port: int, error: BaseException) -> SettingError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return SettingError(
            f"port {port} on {host} is in use by another program; choose another with --port", param="port"
        )
    return SettingError(f"cannot listen on {host}:{port}: {error}", param="port")


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Protocol11,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=2048,
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; `ready` is set when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self.ready.set()


class _Process:
    """From the start to the exit code."""

    def __init__(self, engine: EngineSettings, settings: ServeSettings, sock: socket.socket) -> None:
        self._engine_settings = engine
        self._settings = settings
        self._sock = sock
        self._asked = asyncio.Event()  # to go
        self._hurry = asyncio.Event()  # to go at once

    async def run(self) -> int:
        """Serve until told to stop, or until the engine dies."""
        loop = asyncio.get_running_loop()
        for number, handler in ((signal.SIGTERM, self._terminate), (signal.SIGINT, self._interrupt)):
            loop.add_signal_handler(number, handler)
        log.info("loading %s", self._engine_settings.model)
        engine = await self._unless_asked(EngineClient.start(self._engine_settings))
        if engine is None:
            return 0
        try:
            return await self._serve(engine)
        finally:
            await engine.close(1.0 if self._hurry.is_set() else 5.0)

    def _terminate(self) -> None:
        (self._hurry if self._asked.is_set() else self._asked).set()

    def _interrupt(self) -> None:
        self._asked.set()
        self._hurry.set()

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

    async def _serve(self, engine: EngineClient) -> int:
        names = self._settings.served_model_name
        prefix = self._engine_settings.enable_prefix_caching
        app = App(engine, AppSettings(names, self._settings.max_body_bytes, prefix))
        server = _Server(_config(app.asgi))
        serving = asyncio.ensure_future(server.serve(sockets=[self._sock]))
        try:
            await _first(serving, server.ready.wait())
            if serving.done():
                raise _cannot_bind(self._settings.host, self._settings.port, serving.exception() or OSError("closed"))
            _say_ready(engine, app, self._sock, self._settings.host)
            reporting = asyncio.ensure_future(_report(engine))
            await _first(self._asked.wait(), engine.stopped.wait())
            reporting.cancel()
            return await self._end(engine, app)
        finally:
            server.should_exit = True
            with suppress(Exception):
                await serving

    async def _end(self, engine: EngineClient, app: App) -> int:
        """Lets open requests end, one way or the other."""
        if not engine.stopped.is_set():
            app.desk.closing = True
            log.info("shutting down; requests open: %d", app.desk.open)
            drained = asyncio.wait_for(app.desk.idle.wait(), self._settings.shutdown_timeout)
            await _first(drained, self._hurry.wait(), engine.stopped.wait())
        died = engine.stopped.is_set()
        if died:
            log.error("the engine process died; requests open: %d", app.desk.open)
        dead, going = EngineError("The engine process has died."), GoingAway("The server is shutting down.")
        app.desk.cut(dead if died else going)
        await asyncio.sleep(LINGER_SECONDS if died else 0)
        with suppress(TimeoutError):
            await asyncio.wait_for(app.desk.idle.wait(), LINGER_SECONDS)
        return 1 if died else 0


async def _first(*work: Any) -> None:
    """Waits for the first; cancels the rest, other than futures that were given as such."""
    tasks = [asyncio.ensure_future(one) for one in work]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, one in zip(tasks, work, strict=True):
        if task is not one and not task.done():
            task.cancel()


def _say_ready(engine: EngineClient, app: App, sock: socket.socket, host: str) -> None:
    info = engine.info
    tokens = info.pages * info.page_tokens
    log.info(
        "%s: %s, %s of weights, loaded in %.2f s; %d threads, %s",
        info.name,
        info.architecture,
        megabytes(info.weight_bytes),
        info.load_seconds,
        info.threads,
        info.isa,
    )
    log.info(
        "CPU KV cache size: %s tokens (%s), Maximum concurrency for %s tokens per request: %.2fx",
        f"{tokens:,}",
        megabytes(info.pages * info.page_bytes),
        f"{info.max_model_len:,}",
        tokens / info.max_model_len,
    )
    if app.limits.defaults:
        log.info("sampling defaults from the model's generation_config.json: %s", app.limits.defaults)
    if engine.template is None:
        log.warning("the model has no chat template: /v1/chat/completions answers 400")
    where = f"[{host}]" if ":" in host else host
    names = ", ".join(app.names)
    log.info("serving %s on http://%s:%d/v1 (health, metrics, trace beside it)", names, where, sock.getsockname()[1])
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
        before, then = after, now


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
