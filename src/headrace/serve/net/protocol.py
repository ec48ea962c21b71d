"""One client's connection: uvicorn's protocol, with the limits that it lacks.

Owes: no connection holds memory or a place for longer than a request may take that is on its way or being answered.
Does not know: routes, bodies.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.serve.errors import Problem
from headrace.serve.net.http import BODY_SECONDS

MAX_HEAD = 64 << 10  # bytes of request line and headers
HEAD_SECONDS = 30.0  # for them to arrive whole, and for a new connection to begin
READ_SECONDS = 120.0  # for a client to read some of what is ready for it, once the buffers are full
MAX_PIPELINED = 32  # requests that may wait for the answer before theirs
_LATER_SECONDS = 5.0  # until it is looked again whether an answer still goes out
_LONGER_BODY_SECONDS = 5.0  # beyond what the reading of bodies grants, which answers 408

_TOO_LARGE = Problem(431, "invalid_request_error", f"Headers are larger than {MAX_HEAD} bytes.")
_NO_HTTP = Problem(400, "invalid_request_error", "This is no valid HTTP/1.1 request.", code="invalid_http")
_FULL = Problem(
    503,
    "overloaded_error",
    "The server has as many connections as it takes.",
    code="too_many_connections",
    headers={"retry-after": "1"},
)


class NoUpgrade:
    """A parser of requests that ignores wishes for another protocol (h2c, WebSocket), as RFC 9110, 7.8 allows.

    httptools ends a request with such a head, and would take its body for the next request. Here what it reads of the
    head is put together again without the wish, for a new parser that goes on from there.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._parser = self._new()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> None:
        """As httptools does it, but for the upgrade."""
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            head = self._head()
            self._parser = self._new()
            self._parser.feed_data(head)
            self.feed_data(data[upgrade.args[0] :])

    def _new(self) -> HttpRequestParser:
        """It answers a last request even if more comes after it."""
        parser = HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _head(self) -> bytes:
        protocol, parser = self._protocol, self._parser
        first = b"%b %b HTTP/%b" % (parser.get_method(), protocol.url, parser.get_http_version().encode())
        kept = [b"%b: %b" % (name, value) for name, value in protocol.headers if name != b"upgrade"]
        return b"\r\n".join([first, *kept, b"", b""])


class Protocol11(HttpToolsProtocol):
    """most: connections that are held at once; what comes beyond is answered 503."""

    def __init__(self, *args: Any, most: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = NoUpgrade(self)  # type: ignore[assignment]
        self._most = most
        self._head_bytes = 0
        self._in_head = True  # or between two requests
        self._deaf = False  # what comes is not read any more
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It may have to leave again at once."""
        super().connection_made(transport)
        self._arm(HEAD_SECONDS)
        if len(self.connections) > self._most:
            self._refuse(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._disarm()
        self._read_on()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts and times what comes while headers are incomplete."""
        if self._deaf or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head or self._deaf or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEAD:
            self._refuse(_TOO_LARGE)
        elif self._timer is None:
            self._arm(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Spaces around a value are none of it (RFC 9110, 5.5)."""
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        """The body comes next. An exception here ends the connection with 400."""
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        if self.parser.should_upgrade():
            return  # the head comes once more
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            raise ValueError("a request names one host (RFC 9112, 3.2)")
        self._in_head, self._head_bytes = False, 0
        self._arm(BODY_SECONDS + _LONGER_BODY_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """What comes next is another head, and until then it is uvicorn that waits."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._head_bytes = True, 0
        self._disarm()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not read what there is; answers wait for it, but not for ever."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        self._read_on()

    def on_response_complete(self) -> None:
        """A connection that is to be closed stays until the last of it has been read."""
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._wait_for_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for a long while."""
        self._close()

    def _wait_for_reader(self) -> None:
        self._read_on()
        self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def _read_on(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _close(self) -> None:
        """Without waiting for a client that has not read for so long."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """In our own shape."""
        self._refuse(_NO_HTTP)

    def _refuse(self, problem: Problem) -> None:
        """Ends the connection; answers that are due to earlier requests are given first."""
        self._deaf = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self._in_head:
                self.cycle.keep_alive = False
                return
            if self.pipeline or self.cycle.response_started:
                self.transport.close()
                return
        self._write(problem)
        self.transport.close()

    def _write(self, problem: Problem) -> None:
        body, status = problem.json(), HTTPStatus(problem.status)
        headers = {
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(body)),
            **problem.headers,
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """A request did not arrive in time; an answer that goes out to the one before it is not cut for that."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm(_LATER_SECONDS)
        else:
            self._close()
