"""The command as a user runs it: a child process, its output, its exit code."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from headrace.cli.flags import milliseconds_or_auto, whole
from headrace.cli.terminal import visible
from real import golden

ENV = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
REFERENCE = ["--backend", "reference", "--max-model-len", "512"]


def headrace(*args: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    data = stdin.encode() if isinstance(stdin, str) else stdin
    command = [sys.executable, "-m", "headrace.cli", *args]
    ran = subprocess.run(command, input=data, capture_output=True, timeout=120, env=ENV)
    return subprocess.CompletedProcess(command, ran.returncode, ran.stdout.decode(), ran.stderr.decode())


def test_help_lists_the_commands() -> None:
    ran = headrace("--help")
    assert ran.returncode == 0
    for name in ("serve", "generate", "chat", "pull", "inspect", "version"):
        assert name in ran.stdout


def test_version() -> None:
    ran = headrace("version")
    assert ran.returncode == 0
    assert ran.stdout.strip()
    assert headrace("--version").stdout == ran.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("genrate",), "'generate'"),
        (("serve", "--max-modle-len", "5"), "--max-model-len"),
        (("generate", "--max-model-len", "4.5", "x"), "4.5"),
        (("generate", "--threads", "many", "x"), "many"),
        (("generate", "--max-inter-token-ms", "soon", "x"), "soon"),
        (("serve", "--port", "70000"), "--port"),
        (("generate", "a", "b", "c"), "one prompt"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_wrong_usage_is_2(args: tuple[str, ...], says: str) -> None:
    ran = headrace(*args)
    assert ran.returncode == 2
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("generate", "-m", "/no/such.gguf", "x"), "/no/such.gguf"),
        (("inspect", "no-such-model"), "no-such-model"),
        (("generate", "-m", "TINY", "x", "--batching", "never"), "batching"),
        (("generate", "-m", "TINY", "x", "--temperature", "-1", *REFERENCE), "temperature"),
        (("generate", "-m", "TINY", "x" * 2000, "--raw", *REFERENCE), "maximum context length"),
        (("generate", "-m", "TINY", "x", "--raw", "--system", "y", *REFERENCE), "--system"),
        (("serve", "TINY", "--host", "no.such.host.invalid"), "host"),
    ],
    ids=lambda v: " ".join(v)[:40] if isinstance(v, tuple) else "",
)
def test_what_cannot_work_is_one_plain_line_and_1(tiny: Path, args: tuple[str, ...], says: str) -> None:
    ran = headrace(*(str(tiny) if arg == "TINY" else arg for arg in args))
    assert ran.returncode == 1
    assert ran.stderr.startswith("headrace: ")
    assert says in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert ran.stdout == ""


@pytest.mark.slow
def test_generate_from_an_argument_and_from_standard_input(tiny: Path) -> None:
    flags = ["--temperature", "0", "--max_tokens", "9", *REFERENCE]
    first = headrace("generate", str(tiny), "hello", *flags)
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith("\n")
    assert len(first.stdout) > 2
    assert headrace("generate", "-m", str(tiny), *flags, stdin="hello").stdout == first.stdout
    assert headrace("generate", str(tiny), "hello", "--chat", *flags).stdout == first.stdout
    raw = headrace("generate", str(tiny), "hello", "--raw", *flags)
    assert raw.stdout != first.stdout


@pytest.mark.slow
def test_generate_says_how_fast_and_with_which_seed(tiny: Path) -> None:
    flags = ["--max-tokens", "9", "--stats", "--raw", "-n", "2", *REFERENCE]
    first = headrace("generate", str(tiny), "hello", *flags)
    assert "first token after" in first.stderr
    assert "tokens/s" in first.stderr
    assert "--- 2 of 2" in first.stdout
    seed = first.stderr.rpartition("seed ")[2].strip()
    assert headrace("generate", str(tiny), "hello", *flags, "--seed", seed).stdout == first.stdout


@pytest.mark.slow
def test_generate_refuses_what_is_no_text(tiny: Path) -> None:
    ran = headrace("generate", "-m", str(tiny), *REFERENCE, stdin=b"\xff\xfe")
    assert ran.returncode == 1
    assert "UTF-8" in ran.stderr


@pytest.mark.slow
def test_chat_remembers_until_reset(tiny: Path) -> None:
    flags = ["--temperature", "0", "--max-tokens", "6", *REFERENCE]
    once = headrace("chat", str(tiny), *flags, stdin="hi\n").stdout.rstrip("\n")
    ran = headrace("chat", str(tiny), *flags, stdin="hi\nhi\n/reset\nhi\n/nothing\n/exit\nhi\n")
    assert ran.returncode == 0, ran.stderr
    before, _, after = ran.stdout.partition("a new conversation\n")
    assert before.startswith(once)
    assert before.rstrip("\n") not in (once, f"{once}\n{once}")
    assert after.startswith(once + "\nno such command: /nothing\n/help")


@pytest.mark.slow
def test_chat_tells_when_the_conversation_is_full(tiny: Path) -> None:
    flags = ["--max-tokens", "2", *REFERENCE]
    ran = headrace("chat", str(tiny), *flags, stdin="x" * 1000 + "\nhi\n")
    assert ran.returncode == 0
    assert "maximum context length" in ran.stdout
    assert "/reset begins" in ran.stdout


def test_inspect(tiny: Path) -> None:
    ran = headrace("inspect", str(tiny))
    assert ran.returncode == 0, ran.stderr
    assert "kv_bytes_a_token" in ran.stdout
    told = json.loads(headrace("inspect", str(tiny), "--json").stdout)
    assert told["architecture"] == "llama"
    assert told["context"] == 2048
    # 2 layers, K and V, 2 heads of 64, 2 bytes
    assert told["kv_bytes_a_token"] == 2 * 2 * 2 * 64 * 2
    assert told["bytes"] == sum(group["bytes"] for group in told["groups"].values())


def test_pull_says_where_a_model_is(tiny: Path) -> None:
    assert headrace("pull", str(tiny)).stdout.strip() == str(tiny)


def test_generate_loads_nothing_of_the_server() -> None:
    unwanted = ("fastapi", "uvicorn", "starlette", "prometheus_client", "huggingface_hub.hf_api", "httpx", "torch")
    code = f"import sys, headrace.cli.generate; print([m for m in {unwanted} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.slow
def test_ctrl_c_ends_a_long_generation(tiny: Path) -> None:
    slow = ["--no-kv-cache", "--ignore-eos", "--max-tokens", "auto", *REFERENCE]
    command = [sys.executable, "-m", "headrace.cli", "generate", str(tiny), "x", *slow]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    assert child.stdout is not None
    child.stdout.read(1)
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=10)
    assert child.returncode == 130
    assert time.monotonic() - start < 2
    assert b"Traceback" not in stderr


@pytest.mark.slow
def test_ctrl_c_in_chat_ends_the_answer_then_the_program(tiny: Path) -> None:
    """On a terminal of its own, as a user has it."""
    parent, child = pty.openpty()
    slow = ["--no-kv-cache", "--temperature", "0", *REFERENCE]  # 336 tokens to "go on", each slower than the last
    command = [sys.executable, "-m", "headrace.cli", "chat", str(tiny), *slow]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=ENV, start_new_session=True)
    os.close(child)
    screen = Screen(parent)
    try:
        screen.wait_for(b"> ")
        os.write(parent, b"go on\n")
        screen.wait_for(b"go on")
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
        screen.wait_for(b"[ended]")
        screen.wait_for(b"> ")
        time.sleep(0.3)  # the prompt shows a moment before readline listens
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


class Screen:
    """What a program writes to its terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._seen = b""

    def wait_for(self, text: bytes) -> None:
        """Reads up to the next `text`."""
        end = time.monotonic() + 20
        while text not in self._seen:
            assert select.select([self._terminal], [], [], max(end - time.monotonic(), 0))[0], self._seen
            self._seen += os.read(self._terminal, 100)
        self._seen = self._seen.partition(text)[2]


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("2G", 2 << 30), ("1.5K", 1536), ("2GiB", 2 << 30)]
)
def test_integers_with_units(text: str, value: int) -> None:
    assert whole(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "4 k k", "1e3", "0x10"])
def test_what_is_no_integer(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        whole(text)


def test_escape_sequences_are_shown_not_obeyed() -> None:
    assert visible("a\x1b[2Jb\r\nc\td é🌽") == "a\\x1b[2Jb\\r\nc\td é🌽"


def test_smollm2_answers(smollm2: Path) -> None:
    prompt = golden("smollm2")["chat"][0]["messages"][0]["content"]
    ran = headrace("generate", str(smollm2), prompt, "--temperature", "0", "--max-model-len", "1k")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "The capital of France is Paris.\n"


def test_milliseconds() -> None:
    assert [milliseconds_or_auto(text) for text in ("auto", "0", "12.5")] == [None, 0.0, 12.5]
