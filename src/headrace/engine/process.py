"""The engine's own process: drain the inbox, step, send one message with what happened to everybody.

Started by `engine.client` as ``python -m headrace.engine.process FD FORMAT``, with one end of a socket pair as FD, and
the log's format. It ends when told to, or when the other end is closed; signals are the parent's business.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import EngineError, HeadraceError, RequestError
from headrace.base.log import log, to_stderr
from headrace.engine.engine import Engine
from headrace.engine.grammars import Compiled, Compiler
from headrace.engine.loading import load_engine
from headrace.engine.messages import (
    Abort,
    Add,
    AskTrace,
    Failed,
    FromEngine,
    News,
    Quit,
    Ready,
    Refused,
    Stopped,
    TraceReply,
    Update,
    Words,
)
from headrace.engine.wire import Inbox, described, send
from headrace.text.grammar import Constraint
from headrace.weights import open_checkpoint


class Server:
    """One engine behind one socket."""

    def __init__(self, engine: Engine, sock: socket.socket, inbox: Inbox) -> None:
        self._engine = engine
        self._sock = sock
        self._inbox = inbox
        self._encoder = msgspec.msgpack.Encoder()
        self._compiler = Compiler(inbox.put)
        self._held: dict[str, Add] = {}  # requests whose grammar is being compiled
        self._acts: dict[type, Callable[[Any], list[Update] | None]] = {
            Add: self._add,
            Words: lambda m: self._compiler.learn(m.vocabulary),
            Compiled: self._compiled,
            Abort: self._abort,
            Stopped: lambda m: self._engine.stopped(m.request_id, m.choice, m.stop),
            AskTrace: lambda m: self.send(TraceReply(m.ticket, self._engine.records(m.last))),
        }

    def send(self, message: FromEngine) -> None:
        send(self._sock, self._encoder.encode(message))

    def run(self) -> None:
        """Until told to quit, or nobody listens."""
        engine = self._engine
        while True:
            messages = self._inbox.drain(wait=not engine.has_work)
            updates: list[Update] = []
            for message in messages:
                if isinstance(message, Quit):
                    return
                updates += self._acts[type(message)](message) or ()
            if updates:
                self.send(News(updates, engine.stats()))
            updates = engine.step() if engine.has_work else []
            began = engine.began()
            if updates or messages or began:
                self.send(News(updates, engine.stats(), began))

    def _add(self, request: Add) -> None:
        if request.grammar is None:
            self._take(request)
        else:
            self._held[request.request_id] = request
            self._compiler.submit(request)

    def _compiled(self, compiled: Compiled) -> None:
        request = compiled.request
        if self._held.get(request.request_id) is not request:
            return  # given up meanwhile
        del self._held[request.request_id]
        if compiled.error is not None:
            self._refuse(request, compiled.error)
        else:
            self._take(request, compiled.constraint)

    def _take(self, request: Add, constraint: Constraint | None = None) -> None:
        try:
            self._engine.add(request, constraint)
        except (RequestError, EngineError) as error:
            self._refuse(request, error)

    def _refuse(self, request: Add, error: HeadraceError) -> None:
        param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
        self.send(Refused(request.request_id, str(error), param, code))

    def _abort(self, message: Abort) -> list[Update]:
        self._held.pop(message.request_id, None)
        return self._engine.abort(message.request_id)


def main(fd: int, log_format: str = "human") -> int:
    """Load, say ready (or why not), serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    to_stderr(form=log_format, others=True)
    sock = socket.socket(fileno=fd)
    inbox = Inbox(sock)
    encode = msgspec.msgpack.encode
    try:
        start = inbox.first()
        engine = load_engine(start.settings, open_checkpoint(Path(start.path)), start.vocab_size, start.draft)
    except EOFError:
        return 0
    except HeadraceError as error:
        send(sock, encode(described(error)))
        return 1
    except Exception as error:
        log.exception("the engine could not start")
        send(sock, encode(Failed("EngineError", [f"the engine could not start: {error!r}"], {})))
        return 1
    try:
        send(sock, encode(Ready(engine.info)))
        Server(engine, sock, inbox).run()
    except (EOFError, ConnectionError):
        return 0
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
