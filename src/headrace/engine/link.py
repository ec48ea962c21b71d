"""One engine process and our end of its socket: started, spoken to, watched, ended.

Owes: no process outlives its link. Does not know: requests, or what to do when the process dies (`engine.client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from headrace.base.errors import EngineError
from headrace.engine.messages import Failed, FromEngine, ModelInfo, Ready, ToEngine
from headrace.engine.wire import HEADER, Start, revived

_DECODER: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class NeverReady(EngineError):
    """A process that ended, from outside or by a crash, before it could take requests."""


class Link:
    """Make it with `open`; `begin` loads the model."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.process = process
        self.heard = 0  # messages
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def open(cls, log_format: str) -> Link:
        """A process that waits to be told what to load. log_format: of `base.log.FORMATS`."""
        ours, process = _spawn(log_format)
        try:
            return cls(process, *await asyncio.open_connection(sock=ours))
        except BaseException:
            process.kill()
            process.wait()
            ours.close()
            raise

    async def begin(self, start: Start) -> ModelInfo:
        """Loads; raises what went wrong: NeverReady when the process ended without a word."""
        self._write(msgspec.msgpack.encode(start))
        answer = await self.read()
        if isinstance(answer, Failed):
            raise revived(answer)
        if not isinstance(answer, Ready):
            raise NeverReady("the engine process ended before it was ready")
        return answer.info

    def send(self, message: ToEngine) -> None:
        """One message, whenever the process reads it; never, if it has gone, as `read` will say."""
        self._write(self._encoder.encode(message))

    async def read(self) -> FromEngine | None:
        """The next message; None when the process has gone."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            message = _DECODER.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self.heard += 1
        return message

    def _write(self, payload: bytes) -> None:
        if not self._writer.is_closing():  # between the process's death and the news of it
            self._writer.write(HEADER.pack(len(payload)) + payload)

    async def close(self, timeout: float) -> None:
        """Waits for the process to end; kills it after `timeout` seconds."""
        try:
            if self.process.poll() is None:
                await asyncio.to_thread(self.process.wait, timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """At once; waits no longer than it takes unless the system holds the process back."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait(1.0)
        self._writer.close()


class Watch:
    """Tells when a process that has work neither says anything nor uses the processor for `seconds`.

    A long step uses the processor; a process that was stopped, or whose threads wait for each other, does not.
    """

    def __init__(self, link: Link, seconds: float) -> None:
        self._link = link
        self._seconds = seconds
        self._seen: tuple[int, float] | None = None
        self._since = 0.0

    def stuck(self, busy: bool) -> bool:
        """Whether it is, as of now. busy: it has work. Must be called several times within `seconds`."""
        seen = (self._link.heard, processor_seconds(self._link.process.pid)) if busy else None
        now = time.monotonic()
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
            return False
        return now - self._since >= self._seconds


def processor_seconds(pid: int) -> float:
    """User and system time of a process (proc(5), stat, fields 14 and 15); where there is no such file, the time."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _spawn(log_format: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The engine process and our end of the socket. It gets a process group of its own: Ctrl-C is for us to handle."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.engine.process", str(theirs.fileno()), log_format],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    ours.setblocking(False)
    return ours, process
