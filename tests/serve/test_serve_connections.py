"""Hostile and slow connections, as bytes on a real socket; and HTTPS."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from headrace.base.errors import SettingError
from headrace.serve.app import App
from headrace.serve.net.listening import Listening, bind, connections_allowed, tls_context
from headrace.serve.settings import ServeSettings

pytest_plugins = ["serve_fixtures"]
GOOD = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"prompt": "x", "max_tokens": 4, "temperature": 0, "stream": true}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@asynccontextmanager
async def listening(app: App, connections: int = 100, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server on this loop."""
    with bind("127.0.0.1", 0) as sock:
        server = Listening(app.asgi, tls, connections)
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        await server.ready.wait()
        port = sock.getsockname()[1]
        try:
            yield port
        finally:
            server.should_exit = True
            await serving


@pytest.fixture
async def port(app: App) -> AsyncIterator[int]:
    async with listening(app) as port:
        yield port


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, port: int, **kwargs: Any) -> Line:
        return cls(*await asyncio.open_connection("127.0.0.1", port, **kwargs))

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self, within: float = 10) -> bytes:
        """All that comes until the server closes."""
        data = b""
        async with asyncio.timeout(within):
            with suppress(ConnectionError):
                while piece := await self.reader.read(1 << 16):
                    data += piece
        return data

    async def answer(self, within: float = 10) -> tuple[int, bytes]:
        """One answer with a length."""
        async with asyncio.timeout(within):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-le")
            )
            return int(head.split()[1]), await self.reader.readexactly(length)


async def good(port: int) -> None:
    line = await Line.to(port)
    await line.send(GOOD)
    status, body = await line.answer()
    assert status == 200
    assert b'"tiny"' in body
    line.writer.close()


async def drip(line: Line, data: bytes, pause: float, closed: asyncio.Event) -> None:
    for i in range(len(data)):
        if closed.is_set():
            return
        await line.send(data[i : i + 1])
        await asyncio.sleep(pause)


async def slow(port: int, first: bytes, data: bytes) -> bytes:
    """What a client reads that sends a byte from time to time until it is cut off; fails if it is not."""
    line, closed = await Line.to(port), asyncio.Event()
    await line.send(first)
    dripping = asyncio.ensure_future(drip(line, data, 0.05, closed))
    try:
        return await line.rest()
    finally:
        closed.set()
        await dripping


@pytest.mark.parametrize(
    "first",
    [b"", b"GET /heal", GOOD, GOOD + b"GET /", GOOD + b"\r\n"],
    ids=["nothing", "in the line", "after an answer", "in the second", "empty lines"],
)
async def test_a_head_that_never_ends(port: int, monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr("headrace.serve.net.protocol.HEAD_SECONDS", 0.4)
    answer = await slow(port, first, (b"\r\n" if first.endswith(b"\r\n") and first != GOOD else b"x") * 1000)
    assert answer.startswith(b"HTTP/1.1 200") == first.startswith(GOOD)
    monkeypatch.undo()
    await good(port)


async def test_silence_is_cut_off_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serve.net.protocol.HEAD_SECONDS", 0.2)
    line = await Line.to(port)
    assert await line.rest() == b""
    monkeypatch.undo()
    await good(port)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nothing", b"/health"])
async def test_a_body_that_never_ends(port: int, monkeypatch: pytest.MonkeyPatch, path: bytes) -> None:
    for name, seconds in (("net.protocol.BODY_SECONDS", 0.4), ("net.http.BODY_SECONDS", 0.4)):
        monkeypatch.setattr(f"headrace.serve.{name}", seconds)
    monkeypatch.setattr("headrace.serve.net.protocol._LONGER_BODY_SECONDS", 0.2)
    monkeypatch.setattr("headrace.serve.net.protocol._LATER_SECONDS", 0.2)
    head = (POST % 5000).replace(b"/v1/completions", path)
    answer = await slow(port, head, b" " * 5000)
    assert answer.startswith(
        {b"/v1/completions": b"HTTP/1.1 408", b"/nothing": b"HTTP/1.1 404"}.get(path, b"HTTP/1.1 405")
    )
    monkeypatch.undo()
    await good(port)


async def test_a_long_answer_is_not_cut_for_a_slow_second_request(
    port: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.serve.net.protocol.HEAD_SECONDS", 0.1)
    monkeypatch.setattr("headrace.serve.net.protocol._LATER_SECONDS", 0.1)
    engine.pace = 0.2
    line = await Line.to(port)
    await line.send(POST % len(BODY) + BODY + b"GET /")
    answer = await line.rest()
    assert b"data: [DONE]" in answer


async def test_more_connections_than_are_held(app: App) -> None:
    async with listening(app, connections=2) as port:
        held = [await Line.to(port) for _ in range(2)]
        for line in held:
            await line.send(GOOD)
            assert (await line.answer())[0] == 200
        one_more = await (await Line.to(port)).rest()
        assert one_more.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in one_more
        assert b"too_many_connections" in one_more
        await held[0].send(GOOD)
        assert (await held[0].answer())[0] == 200
        held[1].writer.close()
        await held[1].writer.wait_closed()
        await asyncio.sleep(0.1)
        await good(port)


async def test_pipelined_requests_are_answered_in_turn_and_not_without_end(port: int) -> None:
    line = await Line.to(port)
    await line.send(GOOD * 20)
    assert [(await line.answer())[0] for _ in range(20)] == [200] * 20
    await line.send(GOOD * 5000)
    assert (await line.rest()).count(b"HTTP/1.1 200") < 100
    await good(port)


@pytest.mark.parametrize(
    ("bytes_", "status"),
    [
        (b"GET / HTTP/1.1\r\nx-big: " + b"a" * 100_000, b"431"),
        (b"GET /" + b"a" * 100_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", b"400"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\nabc", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na\x00b: c\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n", b"400"),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
    ],
)
async def test_what_is_no_request(port: int, bytes_: bytes, status: bytes) -> None:
    line = await Line.to(port)
    sending = asyncio.ensure_future(line.send(bytes_))
    answer = await line.rest()
    await sending
    assert status in answer.split(b"\r\n")[0] or answer == b""
    if answer and status == b"400" and b"application/json" in answer:
        assert b'"error"' in answer
    await good(port)


async def test_http_1_0_needs_no_host(port: int) -> None:
    line = await Line.to(port)
    await line.send(b"GET /health HTTP/1.0\r\n\r\n")
    assert b" 200 " in (await line.rest()).split(b"\r\n")[0]


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n\r\n"
WHOLE = b'{"prompt": "x", "max_tokens": 4, "temperature": 0}'


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("pieces", [1, 2, 60])
async def test_who_would_rather_speak_http_2_is_answered_in_http_1(port: int, pieces: int, chunked: bool) -> None:
    """As Java's client asks, unless told not to. What follows is answered, too; a body is never taken for a request."""
    if chunked:
        head = (POST % 0).replace(b"content-length: 0", b"transfer-encoding: chunked").removesuffix(b"\r\n")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(WHOLE), WHOLE)
    else:
        head, body = (POST % len(WHOLE)).removesuffix(b"\r\n"), WHOLE
    smuggled = (POST % len(GOOD)).removesuffix(b"\r\n") + H2C + GOOD
    data = head + H2C + body + GOOD + smuggled + GOOD
    line, size = await Line.to(port), -(-len(data) // pieces)
    for at in range(0, len(data), size):
        await line.send(data[at : at + size])
        await asyncio.sleep(0)
    status, answer = await line.answer()
    assert status == 200
    assert b'"finish_reason":"length"' in answer
    assert [(await line.answer())[0] for _ in range(3)] == [200, 400, 200]
    await good(port)


async def test_a_wish_for_websockets_changes_nothing(port: int) -> None:
    line = await Line.to(port)
    await line.send(GOOD.removesuffix(b"\r\n") + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n" + GOOD)
    assert [(await line.answer())[0] for _ in range(2)] == [200, 200]


async def test_spaces_around_values_are_none_of_them(port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type:\tapplication/json \r\ncontent-length:  %d \r\n"
    line = await Line.to(port)
    await line.send(head % len(WHOLE) + b"x-request-timeout-ms: 60000 \t\r\nx-request-id:  mine \r\n\r\n" + WHOLE)
    status, answer = await line.answer()
    assert status == 200
    assert b'"id":"cmpl-mine"' in answer


async def test_a_long_body_does_not_count_as_the_next_head(port: int) -> None:
    line = await Line.to(port)
    await line.send(POST % 99_000)
    await asyncio.sleep(0.05)
    await line.send(b" " * 99_000)
    assert (await line.answer())[0] == 400
    await line.send(GOOD[:20])
    await asyncio.sleep(0.05)
    await line.send(GOOD[20:])
    assert (await line.answer())[0] == 200


def test_connections_are_open_files() -> None:
    assert connections_allowed(10) == 10
    assert 1 <= connections_allowed(1 << 40) < 1 << 40


Certificate = Callable[[str], tuple[str, str]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """(certificate, key) for 127.0.0.1, signed by themselves."""
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str) -> tuple[str, str]:
        made = (str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-days",
            "2",
            "-nodes",
            "-subj",
        ]
        names = ["/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*command, *names, "-out", made[0], "-keyout", made[1]], check=True, capture_output=True)
        return made

    return make


async def test_https(app: App, certificate: Certificate) -> None:
    cert, key = certificate("ours")
    tls = tls_context(ServeSettings(ssl_certfile=cert, ssl_keyfile=key))
    async with listening(app, tls=tls) as port:
        line = await Line.to(port, ssl=ssl.create_default_context(cafile=cert))
        await line.send(GOOD)
        assert (await line.answer())[0] == 200
        plain = await Line.to(port)
        await plain.send(GOOD)
        assert b"200" not in await plain.rest()


async def test_clients_show_certificates(app: App, certificate: Certificate) -> None:
    (cert, key), (theirs, their_key), (other, other_key) = map(certificate, ("server", "client", "stranger"))
    tls = tls_context(ServeSettings(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=theirs, ssl_cert_reqs=2))

    async def ask(shown: tuple[str, str] | None) -> bytes:
        context = ssl.create_default_context(cafile=cert)
        if shown:
            context.load_cert_chain(*shown)
        with suppress(ssl.SSLError, ConnectionError):
            line = await Line.to(port, ssl=context)
            await line.send(GOOD.replace(b"host", b"connection: close\r\nhost"))
            return await line.rest()
        return b""

    async with listening(app, tls=tls) as port:
        assert b" 200 " in await ask((theirs, their_key))
        assert b" 200 " not in await ask(None)
        assert b" 200 " not in await ask((other, other_key))


def test_files_that_are_no_certificates(tmp_path: Path, certificate: Certificate) -> None:
    cert, key = certificate("good")
    other = certificate("another")[1]
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"ssl_keyfile": key}, "--ssl-certfile"),
        ({"ssl_certfile": str(tmp_path / "no.pem")}, "no.pem"),
        ({"ssl_certfile": cert}, "good.pem.*--ssl-keyfile"),
        ({"ssl_certfile": cert, "ssl_keyfile": other}, "another.key"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(locked)}, "locked.key"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": str(nothing)}, "nothing.pem"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_cert_reqs": 2}, "ssl_ca_certs"),
    ]
    for given, says in bad:
        with pytest.raises(SettingError, match=says):
            tls_context(ServeSettings(**given))
    assert tls_context(ServeSettings()) is None


async def test_a_socket_that_is_reset(port: int) -> None:
    """Clients that vanish with a reset, in every state, leave nothing behind."""
    for sent in (b"", b"GET /", GOOD, POST % 100, POST % len(BODY) + BODY, GOOD * 10):
        line = await Line.to(port)
        await line.send(sent)
        sock = line.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        line.writer.close()
    await good(port)


async def unread(port: int, body: bytes) -> socket.socket:
    """A request whose client will not read the answer."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", port))
    await loop.sock_sendall(raw, POST % len(body) + body)
    return raw


@pytest.mark.parametrize("more", [b'"stream": true', b'"n": 8'])
async def test_who_does_not_read_is_cut_off(
    app: App, engine: FakeEngine, more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.serve.net.protocol.READ_SECONDS", 0.5)
    engine.says = engine.says[:1] * 5000  # with all alternatives 10 MB or more, more than the system buffers
    async with listening(app) as port:
        with await unread(port, b'{"prompt": "x", "max_tokens": 9000, "logprobs": 20, %s}' % more) as raw:
            async with asyncio.timeout(60):
                while not engine.seen or app.desk.open or engine.running:
                    await asyncio.sleep(0.05)
            assert engine.queue.live == engine.queue.waiting == 0
            await asyncio.sleep(1)
            await good(port)
            data = b""
            with suppress(ConnectionError):
                while piece := await asyncio.get_running_loop().sock_recv(raw, 1 << 20):
                    data += piece
            assert len(data) < 10_000_000 and b"data: [DONE]" not in data and not data.endswith(b"}")
            engine.says = engine.says[:3]
        line = await Line.to(port)
        await line.send(POST.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost") % len(BODY) + BODY)
        assert b"data: [DONE]" in await line.rest()


async def test_who_reads_slowly_gets_it_all(app: App, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serve.net.protocol.READ_SECONDS", 3.0)
    engine.says = engine.says[:1] * 3000
    loop = asyncio.get_running_loop()
    async with listening(app) as port:
        with await unread(port, b'{"prompt": "x", "max_tokens": 9000, "logprobs": 20, "stream": true}') as raw:
            await asyncio.sleep(1)
            data = b""
            async with asyncio.timeout(60):
                while b"data: [DONE]" not in data[-100:]:
                    data += await loop.sock_recv(raw, 1 << 20)
            # Every token, in fewer and larger events the slower it reads.
            word = engine.tokenizer.token_text(engine.says[0]).encode()
            assert data.count(b'"%s":-0.5' % word) == 3000
