"""A real server that keeps its prefixes in a folder: stopped, killed, started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from child_server import Reader, Server, alive, serving, until

pytestmark = pytest.mark.slow
LONG: Any = {"model": "tiny", "prompt": "a prompt that fills many pages " * 20, "max_tokens": 12, "temperature": 0}
FLAGS = ("--served-model-name", "tiny", "--max-model-len", "2k", "--backend", "cpu")


def ask(server: Server, **more: Any) -> tuple[str, int]:
    """What it says, and how many tokens of the prompt it had."""
    answer = server.openai.completions.create(**{**LONG, **more})
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, (details.cached_tokens or 0) if details else 0


def stored(server: Server) -> float:
    """Pages written, as far as the engine has told."""
    text = httpx.get(server.url + "/metrics", timeout=30).text
    found = [line for line in text.splitlines() if "kv_file_traffic_pages_total{" in line and 'way="stored"' in line]
    return float(found[0].split()[-1]) if found else 0


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    return (*FLAGS, "--kv-cache-dir", str(tmp_path / "kv"))


def test_a_prefix_is_warm_after_a_restart(tiny: Path, flags: tuple[str, ...]) -> None:
    with serving(tiny, *flags) as server:
        said, cached = ask(server)
        assert cached == 0
        assert server.stop() == 0
    with serving(tiny, *flags) as server:
        assert ask(server, extra_body={"cache_salt": "another"}) == (said, 0)
        assert ask(server)[0] == said
        assert ask(server, prompt=LONG["prompt"] + "more")[1] > 300
        assert server.metric("vllm:external_prefix_cache_hits_total") > 300
        assert ask(server)[0] == said


@pytest.mark.parametrize("whole", [False, True])
def test_a_prefix_is_warm_after_a_kill(tiny: Path, flags: tuple[str, ...], whole: bool) -> None:
    """Of the engine process, which the server starts again, and of all."""
    with serving(tiny, *flags) as server:
        said, _ = ask(server)
        until(lambda: stored(server) > 10)
        (engine,) = server.children()
        if whole:
            server.process.kill()
            server.process.wait()
        os.kill(engine, signal.SIGKILL)
        if not whole:
            until(lambda: "started again" in server.log or server.children() not in ([], [engine]), 20)
            until(lambda: server.metric("headrace:engine_restarts_total") == 1, 20)
            again, cached = ask(server)
            assert (again, cached > 300) == (said, True)
            return
    with serving(tiny, *flags) as server:
        again, cached = ask(server)
        assert (again, cached > 300) == (said, True)


def test_killed_again_and_again_while_it_writes(tiny: Path, flags: tuple[str, ...]) -> None:
    prompts = [[f"{turn}{i} " + LONG["prompt"] for i in range(2)] for turn in range(3)]
    with serving(tiny, *FLAGS) as server:
        wanted = [[ask(server, prompt=prompt)[0] for prompt in few] for few in prompts]
    for turn in range(3):
        with serving(tiny, *flags) as server:
            readers = [Reader(server, prompt=prompt) for prompt in prompts[turn]]
            until(lambda server=server: stored(server) > 5, 10)
            (engine,) = server.children()
            server.process.kill()
            os.kill(engine, signal.SIGKILL)
            for reader in readers:
                reader.join(10)
        if turn == 1:  # a page that was torn, too
            with (Path(flags[-1]) / "pages").open("r+b") as raw:
                raw.seek(-20_000, os.SEEK_END)
                raw.write(bytes(5_000))
    with serving(tiny, *flags) as server:
        assert [[ask(server, prompt=prompt)[0] for prompt in few] for few in prompts] == wanted
        assert server.metric("vllm:external_prefix_cache_hits_total") > 0


def test_a_second_server_does_without(tiny: Path, flags: tuple[str, ...]) -> None:
    with serving(tiny, *flags) as first, serving(tiny, *flags) as second:
        assert "another process" in second.log
        assert "another process" not in first.log
        assert ask(first) == ask(second)
        assert alive(first) and alive(second)
        assert stored(first) > 0
        assert stored(second) == 0


def test_1500_tokens_are_warm_at_once(smollm2: Path, tmp_path: Path) -> None:
    flags = ("--backend", "cpu", "--max-model-len", "2k", "--kv-cache-dir", str(tmp_path / "kv"))
    asked: Any = {"model": str(smollm2), "prompt": [[100 + i * 7 % 40000 for i in range(1500)]], "max_tokens": 20}
    answers = []
    for _ in range(2):
        with serving(smollm2, *flags) as server:
            answers.append(ask(server, **asked))
            assert server.stop() == 0
    assert [cached for _, cached in answers] == [0, 1472]
    assert answers[0][0] == answers[1][0]
