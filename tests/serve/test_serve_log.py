"""What the log says, what it never says, and that nobody can write lines into it."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from child_server import serving, until
from headrace.base.log import FORMATS, log, note
from headrace.serve.api.service import AppSettings
from headrace.serve.app import App
from headrace.serve.net.callers import Caller
from headrace.serve.net.front import Cors, front
from headrace.serve.net.keys import Key, KeyRing

pytest_plugins = ["serve_fixtures"]


class Lines(logging.Handler):
    """Keeps what would be written."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.setFormatter(FORMATS[form]())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def written() -> Iterator[Lines]:
    handler = Lines("json")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


def record(message: str, fields: dict[str, Any] | None = None, error: Exception | None = None) -> logging.LogRecord:
    made = logging.LogRecord("headrace", logging.INFO, "", 0, "%s", (message,), error and (type(error), error, None))
    if fields is not None:
        made.fields = fields
    return made


ANY = st.text(st.characters(exclude_categories=[]))
FIELDS = st.dictionaries(st.sampled_from(["a", "b", "request_id"]), ANY | st.integers() | st.booleans())


@given(ANY, FIELDS)
def test_a_record_is_one_line_whatever_is_in_it(message: str, fields: dict[str, Any]) -> None:
    line = FORMATS["human"]().format(record(message, fields))
    assert len(line.splitlines()) == 1
    assert line.replace("\t", "").isprintable()
    line = FORMATS["json"]().format(record(message, fields))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    told = json.loads(line)
    assert told["level"] == "info"
    assert told["message"] == message
    assert {key: told[key] for key in fields} == fields


@given(ANY)
def test_a_text_cannot_pretend_to_be_another_field(text: str) -> None:
    """What is printed in quotes reads back as it was, however many quotes it holds."""
    line = FORMATS["human"]().format(record("request", {"a": text + ' " b="c', "z": 1}))
    inside = line[line.index('a="') + 2 : line.rindex(" z=1")]
    assert '" b="' not in inside.replace('\\"', "")


def test_an_exception_is_inside_the_object() -> None:
    told = json.loads(FORMATS["json"]().format(record("failed", {}, ValueError("a\nERROR forged"))))
    assert "ValueError" in told["traceback"]


async def ask(app: App, key: str = "sk-secret-key", **body: Any) -> httpx.Response:
    keys = KeyRing([Key("sk-secret-key", Caller("anna", 1.0))])
    transport = httpx.ASGITransport(front(app.routes, keys, Cors()))
    asked = {"prompt": "a private matter", "temperature": 0, "max_tokens": 4, **body}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/completions", json=asked, headers={"x-api-key": key, "x-request-id": "mine"})


async def test_requests_are_not_logged_unless_asked(app: App, written: Lines) -> None:
    await ask(app)
    await ask(app, key="sk-wrong")
    await ask(app, temperature="hot")
    assert not written.lines


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_for_each_request(engine: FakeEngine, written: Lines, stream: bool) -> None:
    app = App(engine, AppSettings(log_requests=True))  # type: ignore[arg-type]
    answer = await ask(app, stream=stream, n=2, stop="a private stop")
    assert answer.status_code == 200
    (line,) = written.lines
    told = json.loads(line)
    assert told["message"] == "request"
    assert told["request_id"].startswith("cmpl-")
    assert (told["caller"], told["stream"], told["n"], told["temperature"]) == ("anna", stream, 2, 0)
    assert (told["prompts"], told["max_tokens"], told["output_tokens"]) == (1, 4, 8)
    assert told["ends"] == "length:2"
    assert told["seconds"] >= told["first_token_s"] >= 0
    for private in ("private", "secret", engine.tokenizer.decode(engine.says)[:6]):
        assert private not in line


async def test_texts_when_asked_and_cut(engine: FakeEngine, written: Lines) -> None:
    app = App(engine, AppSettings(log_requests=True, log_texts=True, max_log_len=9))  # type: ignore[arg-type]
    await ask(app)
    (line,) = written.lines
    told = json.loads(line)
    assert told["prompt"] == "a private…"
    assert told["output"].rstrip("…") == engine.tokenizer.decode(engine.says[:4])[:9]
    assert "secret" not in line


async def test_a_request_that_breaks_has_its_line(engine: FakeEngine, written: Lines) -> None:
    def fail(stream: Any, number: int) -> None:
        if number == 2:
            stream.fail(RuntimeError("/a/private/path"))

    engine.trouble = fail
    answer = await ask(App(engine, AppSettings(log_requests=True)), n=2)  # type: ignore[arg-type]
    assert answer.status_code == 500
    assert "private" not in answer.text
    lines = [json.loads(line) for line in written.lines]
    told = [(line["ends"], line["error"]) for line in lines if line["message"] == "request"]
    assert told == [("unfinished:2", "RuntimeError")]


def test_notes_go_to_the_log(written: Lines) -> None:
    note("said", a=1)
    assert json.loads(written.lines[0])["a"] == 1


@pytest.mark.slow
def test_every_line_of_a_server_is_json_and_says_no_secret(tiny: Path) -> None:
    """Its own lines, uvicorn's, the engine process's; through bad requests, a death, and the end."""
    os.environ["HEADRACE_API_KEY"] = "sk-environment"
    try:
        flags = ["--log-format", "json", "--served-model-name", "tiny", "--enable-log-requests", "--api-key", "sk-flag"]
        with serving(tiny, *flags) as server:
            for key, status in (("sk-environment", 200), ("sk-flag", 200), ("sk-stolen", 401)):
                body = {"prompt": "my private prompt", "max_tokens": 2}
                headers = {"x-api-key": key}
                assert httpx.post(server.url + "/v1/completions", json=body, headers=headers).status_code == status
            forged = {"model": "x\nERROR forged\x1b[31m", "prompt": "my private prompt"}
            refused = httpx.post(server.url + "/v1/completions", json=forged, headers={"x-api-key": "sk-flag"})
            assert refused.status_code == 404
            for raw in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"):
                with socket.create_connection(("127.0.0.1", server.port)) as line:
                    line.sendall(raw)
                    line.recv(1000)
            (engine,) = server.children()
            assert b"sk-environment" not in Path(f"/proc/{engine}/environ").read_bytes()
            assert b"sk-flag" not in Path(f"/proc/{engine}/cmdline").read_bytes()
            os.kill(engine, signal.SIGKILL)
            until(lambda: "the engine is back" in server.log, within=60)
            assert server.stop() == 0
            told = [json.loads(line) for line in server.lines]
    finally:
        del os.environ["HEADRACE_API_KEY"]
    assert all({"time", "level", "message"} <= set(line) for line in told)
    assert sum(line["message"] == "request" for line in told) == 2
    assert {line["level"] for line in told if line["message"].startswith("the engine process died")} == {"error"}
    for secret in ("sk-", "private", "forged"):
        assert secret not in server.log


@pytest.mark.slow
def test_what_goes_wrong_at_the_start_is_json_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.cli", "serve", str(tmp_path / "no.gguf"), "--log-format", "json"]
    ran = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "no.gguf" in json.loads(ran.stderr.splitlines()[-1])["message"]
