"""The engine process of a real server dies: what clients see, and what comes after."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from child_server import Reader, Server, gone, serving, until

pytestmark = pytest.mark.slow
GREEDY = {"prompt": "once", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def streams(server: Server) -> list[Reader]:
    readers = [Reader(server, prompt=f"p{i}", n=4) for i in range(3)]
    assert all(reader.begun.wait(20) for reader in readers)
    return readers


def broken(readers: list[Reader]) -> None:
    """Each stream ends with an error event, at once, and does not pretend that it is complete."""
    start = time.monotonic()
    for reader in readers:
        reader.join(3)
        assert not reader.is_alive()
        assert "engine_dead" in reader.frames[-1]
        assert "data: [DONE]" not in reader.frames
        assert reader.error is None
    assert time.monotonic() - start < 2


def says(server: Server) -> str:
    answer = httpx.post(server.url + "/v1/completions", json=GREEDY, timeout=30)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def counters(server: Server) -> dict[str, float]:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if "_total{" in name}


def test_an_engine_that_is_killed_is_started_again_once(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k") as server:
        before = says(server)
        counted = counters(server)
        readers = streams(server)
        (first,) = server.children()
        os.kill(first, signal.SIGKILL)
        broken(readers)
        asked = httpx.post(server.url + "/v1/completions", json=GREEDY)
        health, trace = httpx.get(server.url + "/health"), httpx.get(server.url + "/trace")
        assert asked.status_code == health.status_code == trace.status_code == 503
        assert asked.json()["error"]["code"] == health.json()["error"]["code"] == "engine_restarting"
        assert int(asked.headers["retry-after"]) > 0
        assert "x-should-retry" not in asked.headers
        assert httpx.get(server.url + "/live").status_code == 200
        until(lambda: httpx.get(server.url + "/health").status_code == 200, within=60)
        assert "signal 9" in server.log
        assert "the engine is back" in server.log
        assert says(server) == before
        after = counters(server)
        assert all(after[name] >= value for name, value in counted.items())
        tokens = next(name for name in counted if "generation_tokens" in name)
        assert after[tokens] >= counted[tokens] + 20
        restarts = next(name for name in counted if "engine_restarts" in name)
        assert (counted[restarts], after[restarts]) == (0, 1)
        assert httpx.get(server.url + "/trace?last=1").json()["steps"]
        readers = streams(server)
        (second,) = server.children()
        os.kill(second, signal.SIGKILL)
        broken(readers)
        assert server.process.wait(10) == 1
        assert "Traceback" not in server.log
        assert gone([first, second])


def test_without_restarts_the_server_ends(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k", "--engine-restarts", "0") as server:
        readers = streams(server)
        os.kill(server.children()[0], signal.SIGKILL)
        broken(readers)
        assert server.process.wait(10) == 1
        assert "Traceback" not in server.log


def test_an_engine_that_hangs_is_ended(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k", "--engine-timeout", "1.5") as server:
        before = says(server)
        readers = streams(server)
        (stuck,) = server.children()
        os.kill(stuck, signal.SIGSTOP)
        until(lambda: "has done nothing" in server.log, within=20)
        broken(readers)
        until(lambda: httpx.get(server.url + "/health").status_code == 200, within=60)
        assert says(server) == before
        assert gone([stuck])


def test_sigterm_while_the_engine_is_started_again(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k") as server:
        (first,) = server.children()
        os.kill(first, signal.SIGKILL)
        until(lambda: "starting another" in server.log)
        children = server.children()
        assert server.stop(within=5) == 0
        assert gone(children)
        assert "Traceback" not in server.log


def test_an_engine_that_is_killed_while_it_starts_counts_as_one_more_death(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k", "--engine-restarts", "2") as server:
        before = says(server)
        (first,) = server.children()
        os.kill(first, signal.SIGKILL)
        until(lambda: server.children() not in ([], [first]), within=10)
        (second,) = server.children()
        os.kill(second, signal.SIGKILL)
        until(lambda: "the engine is back" in server.log, within=60)
        assert says(server) == before
        assert server.log.count("the engine process died (signal 9)") == 2
        (third,) = server.children()
        os.kill(third, signal.SIGKILL)
        assert server.process.wait(10) == 1
        assert gone([first, second, third])
