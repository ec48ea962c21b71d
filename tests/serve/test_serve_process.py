"""A real server process and real clients: answers, signals, deaths, ports."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from child_server import Reader, Server, alive, gone, running, serving, until
from headrace.backends.cpu import CpuBackend
from headrace.engine.messages import Stats
from headrace.runtime.plan import of_path
from headrace.serve.process import drafts_line, stats_line
from real import golden
from tiny_model import FLOATS, write_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with serving(tiny, "--served-model-name", "tiny", "--max_model_len", "2k") as server:
        yield server


def test_the_openai_client(server: Server) -> None:
    client = server.openai
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    with client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=messages)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
        )
    assert refused.value.param == "response_format.json_schema.schema"


async def test_the_async_openai_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:

        async def ask(i: int, stream: bool) -> str:
            asked: Any = {"model": "tiny", "prompt": f"number {i}", "temperature": 0, "max_tokens": 8}
            if not stream:
                return (await client.completions.create(**asked)).choices[0].text
            return "".join([c.choices[0].text async for c in await client.completions.create(**asked, stream=True)])

        whole = await asyncio.gather(*(ask(i, False) for i in range(8)))
        assert await asyncio.gather(*(ask(i, True) for i in range(8))) == whole


def test_the_same_seed_gives_the_same_choices(server: Server) -> None:
    first = server.openai.completions.create(model="tiny", prompt="x", n=3, max_tokens=10)
    seed = first.model_dump()["seed"]
    again = server.openai.completions.create(model="tiny", prompt="x", n=3, max_tokens=10, seed=seed)
    assert [c.text for c in again.choices] == [c.text for c in first.choices]
    assert len({c.text for c in first.choices}) == 3
    alone = server.openai.completions.create(model="tiny", prompt="x", max_tokens=10, seed=seed)
    assert alone.choices[0].text == first.choices[0].text


def test_cached_tokens_are_counted(server: Server) -> None:
    asked: Any = {"model": "tiny", "prompt": "a prompt that fills pages " * 5, "max_tokens": 2, "temperature": 0}
    usages = [server.openai.completions.create(**asked).usage for _ in range(2)]
    cached = [u.prompt_tokens_details.cached_tokens or 0 for u in usages if u and u.prompt_tokens_details]
    assert usages[1] is not None
    assert cached[0] < 64 < cached[1] == usages[1].prompt_tokens - 1


def test_a_client_that_hangs_up_frees_its_pages(server: Server) -> None:
    body = json.dumps({"prompt": "z", "max_tokens": 2000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: running(server) == 1)
    until(lambda: running(server) == 0)


def test_giant_headers_are_refused(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: ")
        try:
            for _ in range(200):
                raw.sendall(b"a" * 10_000)
            answer = raw.recv(100)
        except ConnectionError:
            answer = b""
    assert answer == b"" or b"431" in answer
    assert httpx.get(server.url + "/health").status_code == 200


def test_the_trace_and_the_log(server: Server) -> None:
    server.openai.completions.create(model="tiny", prompt="my secret", max_tokens=3)
    steps = httpx.get(server.url + "/trace?last=2").json()["steps"]
    assert len(steps) == 2
    assert "Application startup complete." in server.log
    assert "CPU KV cache size" in server.log
    assert "secret" not in server.log
    assert "Traceback" not in server.log


def test_a_port_in_use_is_said_before_the_model_is_loaded(server: Server) -> None:
    again = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "serve", "/no/such/model.gguf", "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert again.returncode == 1
    assert again.stderr.strip() == (
        f"headrace: port {server.port} on 127.0.0.1 is in use by another program; choose another with --port"
    )


def test_sigterm_lets_streams_end(tiny: Path) -> None:
    with serving(tiny, "--max-model-len", "2k") as server:
        children = server.children()
        assert children
        readers = [Reader(server, max_tokens=60, prompt=f"p{i}") for i in range(3)]
        assert all(reader.begun.wait(10) for reader in readers)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "shutting down" in server.log)
        assert httpx.post(server.url + "/v1/completions", json={"prompt": "a"}).status_code == 503 or not alive(server)
        assert server.process.wait(20) == 0
        for reader in readers:
            reader.join(5)
            assert reader.frames[-1] == "data: [DONE]"
        assert gone(children)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_sigint_or_a_second_sigterm_ends_streams_at_once(tiny: Path, signals: list[int]) -> None:
    with serving(tiny, "--max-model-len", "2k") as server:
        children = server.children()
        readers = [Reader(server, prompt=f"p{i}", n=4) for i in range(3)]
        assert all(reader.begun.wait(10) for reader in readers)
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.2)
        start = time.monotonic()
        for reader in readers:
            reader.join(2)
            assert not reader.is_alive()
        assert time.monotonic() - start < 1.5
        assert server.process.wait(5) == 0
        assert all("shutting_down" in reader.frames[-1] for reader in readers)
        assert gone(children)


def test_sigterm_while_loading(tiny: Path) -> None:
    command = [sys.executable, "-m", "headrace.cli", "serve", str(tiny), "--port", "0", "--backend", "reference"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "loading" in process.stderr.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: children.read_text())
    engine = [int(pid) for pid in children.read_text().split()]
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert gone(engine)


def test_the_line_of_every_ten_seconds() -> None:
    before = Stats(prompt_tokens=100, generation_tokens=50, prefix_queries=100, prefix_hits=0, pages=10)
    after = Stats(1, 2, 5, 0, 10, 300, 150, 0, 200, 25, 9)
    assert stats_line(before, after, 10.0) == (
        "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 1 reqs, "
        "Waiting: 2 reqs, CPU KV cache usage: 50.0%, Prefix cache hit rate: 25.0%"
    )


def test_the_line_of_guesses() -> None:
    before = Stats(drafts=10, drafted_tokens=30, accepted_tokens=20)
    after = Stats(drafts=20, drafted_tokens=70, accepted_tokens=50)
    assert drafts_line(before, after, 10.0) == (
        "SpecDecoding metrics: Mean acceptance length: 4.00, Accepted throughput: 3.00 tokens/s, "
        "Drafted throughput: 4.00 tokens/s, Accepted: 30 tokens, Drafted: 40 tokens, Avg Draft acceptance rate: 75.0%"
    )


def test_a_bad_model_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\0" * 10)
    ran = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "serve", str(bad), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("headrace: ")
    assert "bad.gguf" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_weights_are_rounded_when_asked(tmp_path: Path) -> None:
    """The log, and what clients are told; a name that cannot be is one line."""
    path = write_tiny(tmp_path / "floats.gguf", FLOATS)
    planned = {weights.format: weights.bytes for weights in of_path(path, CpuBackend(), "q4_0").weights}
    with serving(path, "-q", "q4_0", "--backend", "cpu") as server:
        assert "of weights (q4_0), loaded in" in server.log
        (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert card["meta"]["size"] == planned[""] < planned["q8_0"]
        assert server.openai.completions.create(model=card["id"], prompt="hi", max_tokens=4).choices[0].text
    command = [sys.executable, "-m", "headrace.cli", "serve", str(path), "--quantization", "awq"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "quantization must be one of q8_0" in refused.stderr and "Traceback" not in refused.stderr


def test_smollm2_says_what_the_reference_says(smollm2: Path) -> None:
    """The whole way: HTTP, template, tokens, engine, text."""
    with serving(smollm2, "--served-model-name", "smollm2", "--max-model-len", "1k") as server:
        client = server.openai
        for case in golden("smollm2")["chat"]:
            answer = client.chat.completions.create(
                model="smollm2", messages=case["messages"], temperature=0, max_tokens=5,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )  # fmt: skip
            assert answer.model_dump()["prompt_token_ids"] == case["prompt_ids"]
        first = client.chat.completions.create(
            model="smollm2", messages=golden("smollm2")["chat"][0]["messages"], temperature=0
        )
        assert first.choices[0].message.content == "The capital of France is Paris."
        assert first.choices[0].finish_reason == "stop"
