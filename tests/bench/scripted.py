"""A server that answers as a script says, in real time, over real connections."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Calls the server's script with the parsed body of each POST."""

    protocol_version = "HTTP/1.1"
    server: Scripted  # type: ignore[assignment]

    def do_GET(self) -> None:
        wanted = self.server.key and f"Bearer {self.server.key}"
        known = wanted in (None, self.headers["Authorization"])
        self.plain(*((200, {"data": [{"id": "scripted"}]}) if known else (401, {})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((time.perf_counter(), body))
        self.server.answer(self, body)

    def plain(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def event(self, body: Any) -> None:
        self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def end(self) -> None:
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


class Scripted(ThreadingHTTPServer):
    """asked: (when, body) of each POST. key: which GET needs, if any."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.key: str | None = None
        self.asked: list[tuple[float, dict[str, Any]]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def scripted(answer: Answer) -> Iterator[Scripted]:
    with Scripted(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


def speak(to: Handler, texts: list[str], *, first: float = 0.0, each: float = 0.0) -> None:
    """A whole streamed answer: a piece after `first` seconds and after every further `each`, then the usage."""
    to.begin()
    for number, text in enumerate(texts):
        time.sleep(each if number else first)
        to.event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
    to.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(texts)}})
    to.end()
