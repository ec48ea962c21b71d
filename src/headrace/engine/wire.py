"""How messages travel: a length, then msgpack, over a stream socket; and exceptions as data."""

from __future__ import annotations

import socket
import struct
import threading
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from headrace.base import errors
from headrace.base.errors import BadModelFile, EngineError, HeadraceError
from headrace.base.log import log
from headrace.base.settings import EngineSettings
from headrace.engine.messages import Failed, ToEngine

HEADER = struct.Struct("<I")  # bytes of the message that follows


class Start(msgspec.Struct, frozen=True):
    """The first message: what to load. draft: of a model that drafts, its path and the ids that both know."""

    settings: EngineSettings
    path: str
    vocab_size: int
    draft: tuple[str, int] | None = None


class Inbox:
    """Whole messages out of a stream socket.

    After `first` a thread takes them as they come, also during a step: else an abort would stand in the socket behind
    megabytes of requests, of which each step would let in as much as the kernel holds.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._held = bytearray()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._come: SimpleQueue[Any] = SimpleQueue()

    def first(self) -> Start:
        """The first message; waits for it."""
        while (frame := self._frame()) is None:
            self._receive()
        threading.Thread(target=self._listen, name="inbox", daemon=True).start()
        return msgspec.msgpack.decode(frame, type=Start)

    def put(self, message: object) -> None:
        """Have `drain` return this too: news from a thread of this process."""
        self._come.put(message)

    def drain(self, wait: bool) -> list[Any]:
        """What has come; waits for something if `wait`. EOFError when the other end has gone."""
        messages: list[Any] = []
        while True:
            try:
                message = self._come.get(block=wait)
            except Empty:
                return messages
            if message is None:
                raise EOFError
            messages.append(message)
            wait = False

    def _listen(self) -> None:
        try:
            while True:
                while (frame := self._frame()) is not None:
                    self._come.put(self._decoder.decode(frame))
                self._receive()
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("the server's message could not be read")
        finally:
            self._come.put(None)

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
