"""``headrace serve`` as a child process, and clients that read its streams on the side."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai


class Server:
    """``headrace serve`` as a child, on a port of its own choice; `--backend cpu` among the flags for the fast one."""

    def __init__(self, model: Path, *flags: str) -> None:
        command = [
            sys.executable,
            "-m",
            "headrace.cli",
            "serve",
            str(model),
            "--port",
            "0",
            "--backend",
            "reference",
            *flags,
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(120), self.log
        assert self.process.poll() is None, self.log
        self.port = next(int(found[1]) for line in self.lines if (found := re.search(r"http://[^ /]*:(\d+)", line)))
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "startup complete" in line:
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def children(self) -> list[int]:
        """Process ids below the server."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def metric(self, start: str) -> float:
        """The value of the first line of /metrics that starts so."""
        text = httpx.get(self.url + "/metrics", timeout=30).text
        return float(next(line for line in text.splitlines() if line.startswith(start)).split()[-1])

    def stop(self, number: int = signal.SIGTERM, within: float = 10) -> int:
        self.process.send_signal(number)
        return self.process.wait(within)


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[Server]:
    server = Server(model, *flags)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def gone(pids: list[int], within: float = 3) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


class Reader(threading.Thread):
    """Reads a stream on the side. `frames` as they come; `error` if the connection broke."""

    def __init__(self, server: Server, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url = server.url + "/v1/completions"
        self._body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True, **body}
        self.frames: list[str] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=30) as response:
                for line in response.iter_lines():
                    if line:
                        self.frames.append(line)
                        self.begun.set()
        except Exception as error:
            self.error = error
        self.begun.set()


def running(server: Server) -> float:
    return server.metric("vllm:num_requests_running")


def until(true: Any, within: float = 3) -> None:
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(server: Server) -> bool:
    return server.process.poll() is None
