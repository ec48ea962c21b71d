"""Messages between the processes: taken as they come, and the end of the other side."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from headrace.base.settings import EngineSettings
from headrace.core.sampling import SamplingParams
from headrace.engine.messages import Abort, Add, ToEngine
from headrace.engine.wire import Inbox, Start, send


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Inbox]]:
    ours, theirs = socket.socketpair()
    inbox = Inbox(theirs)
    send(ours, msgspec.msgpack.encode(Start(EngineSettings(), "", 1)))
    inbox.first()
    yield ours, inbox
    ours.close()


def test_what_is_sent_is_taken_while_nobody_looks(pair: tuple[socket.socket, Inbox]) -> None:
    """So an abort never waits for the steps that would let in what was sent before it."""
    ours, inbox = pair
    many: list[ToEngine] = [Add(str(i), [1000] * 2000, SamplingParams(), 0, []) for i in range(500)]
    ours.settimeout(5)
    for message in (*many, Abort("0")):
        send(ours, msgspec.msgpack.encode(message))
    got: list[ToEngine] = []
    while len(got) <= len(many):
        got += inbox.drain(wait=True)
    assert got == [*many, Abort("0")]
    assert inbox.drain(wait=False) == []


def test_a_closed_socket_is_the_end_also_for_who_waits(pair: tuple[socket.socket, Inbox]) -> None:
    ours, inbox = pair
    threading.Timer(0.05, ours.close).start()
    with pytest.raises(EOFError):
        inbox.drain(wait=True)


def test_a_message_that_is_none_is_the_end(pair: tuple[socket.socket, Inbox]) -> None:
    ours, inbox = pair
    send(ours, b"\xc1")
    with pytest.raises(EOFError):
        inbox.drain(wait=True)
