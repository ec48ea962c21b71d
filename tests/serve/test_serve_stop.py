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
        port = re.search(r"127\.0\.0\.1:(\d+)", process.stderr.readline())
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


def test_a_file_is_not_taken_for_a_socket(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.cli", "serve", str(tiny), "--uds", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "no socket; choose another --uds" in done.stderr


def test_a_unix_socket(tiny: Path, tmp_path: Path) -> None:
    """Listened on, in the place of one that a dead server left; not taken from a living one; gone at the end."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    command = [sys.executable, "-m", "headrace.cli", "serve", str(tiny), "--uds", str(path), "--backend", "reference"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("startup complete" in line for line in iter(process.stderr.readline, ""))
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert "in use" in second.stderr
        assert path.exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()


WATCH = """
import sys

EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg",
          "subprocess.Popen", "os.system", "os.posix_spawn", "urllib.Request")


def seen(event, args):
    if event in EVENTS:
        with open(LOG, "a") as log:
            print(event, args, file=log)


sys.addaudithook(seen)
"""


def test_nobody_is_told_of_anything(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of a server with a model on disk looks up a name, connects to anybody, or runs another program."""
    log = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(f"LOG = {str(log)!r}\n{WATCH}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving(tiny) as server:
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert httpx.post(server.url + "/v1/chat/completions", json=chat).status_code == 200
        for path in ("/metrics", "/trace", "/version", "/openapi.json"):
            assert httpx.get(server.url + path).status_code == 200
        assert not established(server.process.pid, server.port)
        assert not established(server.children()[0], server.port)
        assert server.stop() == 0
    told = log.read_text().splitlines()
    ours = ("subprocess.Popen", "headrace.engine.process")
    assert [line for line in told if not all(word in line for word in ours)] == [
        "socket.getaddrinfo ('127.0.0.1', 0, 0, 1, 0)"
    ]
    assert len(told) == 2


def established(pid: int, port: int) -> list[str]:
    """Connections of a process other than those to its own port (proc(5), net/tcp)."""
    mine = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in mine and int(fields[1].rpartition(":")[2], 16) != port:
                found.append(line)
    return found
