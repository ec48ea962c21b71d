"""HTTP/1.1 for a load generator, which shares its cores with what it measures.

While an answer comes, what came and when is noted and nothing else; it is read once the load is over. Does not know
what is asked.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast
from urllib.parse import urlsplit

from headrace.base.errors import SettingError

_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Target:
    """A server. path: comes before that of every request."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str) -> Target:
        """SettingError if that is no address of a server."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise SettingError(f"{url!r} is no address of a server; write http://host:port", param="base_url")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"), tls)

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
        """The bytes of a request."""
        told = {"Host": f"{self.host}:{self.port}", "Content-Length": str(len(body)), **headers}
        lines = [f"{method} {self.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(slots=True)
class Reply:
    """What came for one request. Times are those of time.perf_counter.

    sent: when the request was; pieces: (when, bytes) as they came; failure: what broke it off.
    """

    sent: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None

    @property
    def raw(self) -> bytes:
        """All of it, head included."""
        return b"".join(piece for _, piece in self.pieces)

    @property
    def status(self) -> int:
        """The HTTP status; 0 if none came."""
        match = re.match(rb"HTTP/1\.[01] (\d{3})", self.raw)
        return int(match[1]) if match else 0

    def body(self) -> list[tuple[float, bytes]]:
        """(when its last byte came, bytes) of each part of the body; the framing of chunks is left out."""
        raw, start = self.raw, _head_length(self.raw)
        if not start:
            return []
        ends = list(accumulate(len(piece) for _, piece in self.pieces))
        spans = _chunks(raw, start) if _chunked(raw[:start]) else [(start, len(raw))]
        return [(self.pieces[bisect_left(ends, end)][0], raw[begin:end]) for begin, end in spans if end > begin]


def _head_length(raw: bytes) -> int:
    """Bytes up to the body; 0 while the head is not whole."""
    return raw.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in raw else 0


def _chunked(head: bytes) -> bool:
    return re.search(rb"(?i)\r\ntransfer-encoding:[^\r]*chunked", head) is not None


def _chunks(raw: bytes, at: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of each chunk that is whole; the last chunk is empty."""
    while (line := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line].split(b";")[0], 16)
        begin = line + 2
        if begin + size + 2 > len(raw):
            return
        yield begin, begin + size
        if not size:
            return
        at = begin + size + 2


class Connection(asyncio.Protocol):
    """A connection on which one exchange follows another."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply = Reply()
        self._done: asyncio.Future[None] | None = None
        self._start = self._length = 0  # of the body, once the head is there; length -1: chunked, -2: until the end
        self._got = 0

    @classmethod
    async def open(cls, target: Target) -> Connection:
        """A new one; OSError when the server does not answer."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, target.host, target.port, ssl=target.tls)
        return connection

    @property
    def usable(self) -> bool:
        """Whether another exchange may begin."""
        return self._transport is not None and not self._transport.is_closing() and self._length != -2

    async def exchange(self, request: bytes, reply: Reply) -> None:
        """Sends a request and waits for the end of the reply, which grows as it comes. Does not raise."""
        assert self._transport is not None
        self._reply, self._done = reply, asyncio.get_running_loop().create_future()
        self._start = self._got = 0
        reply.sent = time.perf_counter()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Notes what came, and whether that was all."""
        self._reply.pieces.append((time.perf_counter(), data))
        self._got += len(data)
        if (self._start or self._read_head()) and self._whole() and self._done and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """An exchange that was under way has ended, rightly only if its length was not told."""
        if self._done and not self._done.done():
            if not (self._start and self._length == -2):
                self._reply.failure = "the connection ended before the answer did"
            self._done.set_result(None)

    def close(self) -> None:
        """No more exchanges."""
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self) -> bool:
        raw = self._reply.raw
        self._start = _head_length(raw)
        if self._start:
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", raw[: self._start])
            self._length = -1 if _chunked(raw[: self._start]) else int(length[1]) if length else -2
        return self._start > 0

    def _whole(self) -> bool:
        if self._length >= 0:
            return self._got >= self._start + self._length
        pieces = self._reply.pieces
        tail = b"".join(piece for _, piece in pieces[-5:]) if len(pieces[-1][1]) < 5 else pieces[-1][1]
        if self._length == -2 or not tail.endswith(_LAST_CHUNK):
            return False
        return any(begin == end for begin, end in _chunks(self._reply.raw, self._start))
