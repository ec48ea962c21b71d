"""HTTP as it comes: in any pieces, chunked or not, and broken off."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Handler, scripted

from headrace.base.errors import SettingError
from headrace.bench.client import Connection, Reply, Target

HEAD = b"HTTP/1.1 200 OK\r\nX: y\r\nTransfer-Encoding: chunked\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_chunks_are_read_whatever_pieces_they_come_in(parts: list[bytes], cuts: list[int]) -> None:
    raw = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    places = sorted({0, len(raw), *(cut % len(raw) for cut in cuts)})
    pieces = [(float(b), raw[a:b]) for a, b in itertools.pairwise(places)]
    reply = Reply(pieces=pieces)
    assert reply.status == 200
    assert [part for _, part in reply.body()] == parts
    end = len(HEAD)
    for when, part in reply.body():
        end += len(b"%x\r\n" % len(part)) + len(part)
        assert when == min(place for place in places if place >= end)  # that of the piece with its last byte
        end += 2


def test_a_body_without_chunks_and_an_empty_reply() -> None:
    assert Reply(pieces=[(1.0, b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nab")]).body() == [(1.0, b"ab")]
    assert (Reply().status, Reply().body()) == (0, [])


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://a:81", "a", 81, ""),
        ("a:81", "a", 81, ""),
        ("http://a/x/", "a", 80, "/x"),
        ("https://a", "a", 443, ""),
        ("http://[::1]:9", "::1", 9, ""),
    ],
)
def test_addresses(url: str, host: str, port: int, path: str) -> None:
    target = Target.of(url)
    assert (target.host, target.port, target.path) == (host, port, path)
    assert (target.tls is not None) == url.startswith("https")


@pytest.mark.parametrize("url", ["", "ftp://a", "http://", "http://a:x", "http://a:99999"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(SettingError, match="http://host:port"):
        Target.of(url)


async def ask(url: str, connection: Connection | None = None) -> tuple[Connection, Reply]:
    target = Target.of(url)
    connection = connection or await Connection.open(target)
    reply = Reply()
    await asyncio.wait_for(connection.exchange(target.request("POST", "/x", {}, b"{}"), reply), 10)
    return connection, reply


async def test_a_connection_carries_one_exchange_after_another() -> None:
    """The first answer holds, at the end of what is sent at once, what looks like its end."""

    def answer(to: Handler, _: dict[str, object]) -> None:
        to.begin()
        to.wfile.write(b"5\r\n0\r\n\r\n")
        to.wfile.flush()
        time.sleep(0.05)
        to.wfile.write(b"\r\n2\r\nok\r\n0\r\n\r\n")

    with scripted(answer) as server:
        connection, reply = await ask(server.url)
        assert [part for _, part in reply.body()] == [b"0\r\n\r\n", b"ok"]
        assert connection.usable
        _, again = await ask(server.url, connection)
        assert [part for _, part in again.body()] == [b"0\r\n\r\n", b"ok"]
        connection.close()


async def test_an_answer_that_breaks_off_says_so() -> None:
    def answer(to: Handler, _: dict[str, object]) -> None:
        to.begin()
        to.chunk(b"half")
        to.close_connection = True

    with scripted(answer) as server:
        connection, reply = await ask(server.url)
        assert reply.failure is not None
        assert "ended before" in reply.failure
        assert not connection.usable


async def test_an_answer_of_no_told_length_ends_with_the_connection() -> None:
    def answer(to: Handler, _: dict[str, object]) -> None:
        to.wfile.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        to.close_connection = True

    with scripted(answer) as server:
        connection, reply = await ask(server.url)
        assert (reply.failure, reply.body()[0][1]) == (None, b"all of it")
        assert not connection.usable
