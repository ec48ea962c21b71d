"""A model hub of a few files on 127.0.0.1, speaking as much of the hub's HTTP as huggingface_hub asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """files: repository -> file name -> content. requests: all that was asked, ``"GET /path"``."""

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        self.files = files
        self.requests: list[str] = []
        self.corrupt = False
        self.address = ""

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        asked = (request.split(f"/resolve/{COMMIT}/") for request in self.requests if request.startswith("GET"))
        return sorted({parts[1] for parts in asked if len(parts) == 2})


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if path.startswith("/api/models/"):
            self._api("/".join(parts[2:4]), parts[4:])
        elif "resolve" in parts:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._send(404, b"{}")

    def _api(self, repo: str, rest: list[str]) -> None:
        files = self.hub.files.get(repo)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if rest[:1] in (["revision"], ["tree"]) and rest[1] not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        described = [_described(name, content) for name, content in files.items()]
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": d["rfilename"], "size": d["size"], "oid": d["blobId"]} for d in described]
            return self._send(200, json.dumps(tree).encode())
        return self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": described}).encode())

    def _file(self, repo: str, revision: str, name: str) -> None:
        content = self.hub.files.get(repo, {}).get(name)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(content).hexdigest()
        sent = bytes(len(content)) if self.hub.corrupt else content
        return self._send(200, sent, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _described(name: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"sha256": digest, "size": len(content), "pointerSize": 130}
    return {"rfilename": name, "size": len(content), "blobId": hashlib.sha1(content).hexdigest(), "lfs": lfs}
