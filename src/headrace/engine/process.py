"""The engine's own process: drain the inbox, step, send one message with what happened to everybody.

Started by `engine.client` as ``python -m headrace.engine.process FD``, with one end of a socket pair as FD. It ends
when told to, or when the other end is closed; signals are the parent's business.
"""

from __future__ import annotations

import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.base import errors
from headrace.base.errors import BadModelFile, EngineError, HeadraceError, RequestError
from headrace.base.log import log, to_stderr
from headrace.base.settings import EngineSettings
from headrace.engine.engine import Engine
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
    ToEngine,
    TraceReply,
)

HEADER = struct.Struct("<I")  # bytes of the message that follows
MAX_MESSAGE = 1 << 30


class Start(msgspec.Struct, frozen=True):
    """The first message: what to load."""

    settings: EngineSettings
    path: str
    vocab_size: int
    generation: dict[str, Any]


class Inbox:
    """Whole messages out of a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._held = bytearray()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def first(self) -> Start:
        """The first message; waits for it."""
        while (frame := self._frame()) is None:
            self._receive()
        return msgspec.msgpack.decode(frame, type=Start)

    def drain(self, wait: bool) -> list[ToEngine]:
        """What has come; waits for something if `wait`. EOFError when the other end has gone."""
        while wait or select.select([self._sock], [], [], 0)[0]:
            self._receive()
            wait = False
        messages = []
        while (frame := self._frame()) is not None:
            messages.append(self._decoder.decode(frame))
        return messages

    def _receive(self) -> None:
        data = self._sock.recv(1 << 16)
        if not data:
            raise EOFError
        self._held += data

    def _frame(self) -> bytes | None:
        if len(self._held) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._held)[0]
        if len(self._held) < end:
            return None
        frame = bytes(self._held[HEADER.size : end])
        del self._held[:end]
        return frame


class Server:
    """One engine behind one socket."""

    def __init__(self, engine: Engine, sock: socket.socket, inbox: Inbox) -> None:
        self._engine = engine
        self._sock = sock
        self._inbox = inbox
        self._encoder = msgspec.msgpack.Encoder()
        self._acts: dict[type, Callable[[Any], None]] = {
            Add: self._add,
            Abort: lambda m: self._engine.abort(m.request_id),
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
            for message in messages:
                if isinstance(message, Quit):
                    return
                self._acts[type(message)](message)
            updates = engine.step() if engine.has_work else []
            if updates or messages:
                self.send(News(updates, engine.stats()))

    def _add(self, request: Add) -> None:
        try:
            self._engine.add(request)
        except RequestError as error:
            self.send(Refused(request.request_id, str(error), error.param, error.code))
        except EngineError as error:
            self.send(Refused(request.request_id, str(error), None, None))


def send(sock: socket.socket, payload: bytes) -> None:
    """One framed message."""
    sock.sendall(HEADER.pack(len(payload)) + payload)


def described(error: HeadraceError) -> Failed:
    """An exception as data."""
    if isinstance(error, BadModelFile):
        return Failed("BadModelFile", [error.file, error.reason], {"tensor": error.tensor})
    fields = {name: getattr(error, name) for name in ("param", "code") if hasattr(error, name)}
    return Failed(type(error).__name__, [str(error)], fields)


def revived(failed: Failed) -> HeadraceError:
    """The exception that `described` was given."""
    kind = getattr(errors, failed.kind, EngineError)
    error = kind(*failed.args, **failed.fields)
    assert isinstance(error, HeadraceError)
    return error


def main(fd: int) -> int:
    """Load, say ready (or why not), serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    to_stderr()
    sock = socket.socket(fileno=fd)
    inbox = Inbox(sock)
    encode = msgspec.msgpack.encode
    try:
        start = inbox.first()
        engine = load_engine(start.settings, Path(start.path), start.vocab_size, start.generation)
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
    sys.exit(main(int(sys.argv[1])))
