"""How a server begins and ends: while the model is loaded, and when it is told to go."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from child_server import Reader, Server, gone, serving, until

pytestmark = pytest.mark.slow


def test_before_the_model_is_there(tiny: Path) -> None:
    """The port answers, with 503, and goes on to 200; and it can be told to go."""
    command = [sys.executable, "-m", "headrace.cli", "serve", str(tiny), "--port", "0", "--backend", "reference"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        port = re.search(r"port (\d+)", process.stderr.readline())
        assert port is not None
        url = f"http://127.0.0.1:{port[1]}"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(children.read_text, within=20)
        engine = [int(pid) for pid in children.read_text().split()]
        os.kill(engine[0], signal.SIGSTOP)
        for path in ("/health", "/ready", "/v1/models", "/metrics"):
            answer = httpx.get(url + path)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "loading"
            assert answer.headers["retry-after"] == "1"
        assert httpx.post(url + "/v1/completions", json={"prompt": "a"}).status_code == 503
        assert httpx.get(url + "/live").status_code == 200
        os.kill(engine[0], signal.SIGCONT)
        until(lambda: httpx.get(url + "/ready").status_code == 200, within=60)
        assert httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert gone(engine)
    finally:
        process.kill()
        process.wait()


def test_streams_and_queued_requests_end_well(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k", "--max-num-seqs", "3") as server:
        children = server.children()
        running = [Reader(server, max_tokens=150, prompt=f"p{i}") for i in range(3)]
        assert all(reader.begun.wait(20) for reader in running)
        queued = [Reader(server, max_tokens=10, prompt=f"q{i}") for i in range(2)]
        with httpx.Client(base_url=server.url) as kept:
            until(lambda: waiting(kept) == 2)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "shutting down" in server.log)
            for path in ("/ready", "/health"):
                answer = kept.get(path)
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) > 0
            assert kept.get("/live").status_code == 200
            refused = kept.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) > 0
        for reader in [*running, *queued]:
            reader.join(30)
            assert reader.frames[-1] == "data: [DONE]"
        assert server.process.wait(5) == 0
        assert gone(children)


def waiting(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("vllm:num_requests_waiting{")).split()[-1])


def test_what_does_not_end_in_time_is_told_so(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k", "--max-num-seqs", "3", "--shutdown-timeout", "0.5") as server:
        children = server.children()
        readers = [Reader(server, prompt=f"p{i}") for i in range(5)]
        until(lambda: sum(reader.begun.is_set() for reader in readers) >= 3, within=20)
        assert server.stop(within=8) == 0
        for reader in readers:
            reader.join(2)
            assert "data: [DONE]" not in reader.frames
            assert reader.error is not None or "shutting_down" in reader.frames[-1]
        assert sum(reader.error is None for reader in readers) >= 3
        assert gone(children)
        assert "Traceback" not in server.log


def stuck(server: Server) -> socket.socket:
    """A client that asks for a long stream and reads none of it."""
    body = json.dumps({"prompt": "s", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(head.encode() + b"\r\n\r\n" + body)
    return raw


def test_a_client_that_does_not_read_holds_nobody_up(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k", "--shutdown-timeout", "0.5") as server, stuck(server), stuck(server):
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        with half, httpx.Client(base_url=server.url) as client:
            until(lambda: client.get("/metrics").text.count("num_requests_running") > 0)
            time.sleep(0.5)
            start = time.monotonic()
            assert server.stop(within=10) == 0
            assert time.monotonic() - start < 6
        assert "Traceback" not in server.log
