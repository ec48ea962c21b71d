"""A server of our own to measure: `headrace serve` as a process, on a free port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.base.errors import EngineError

_PATIENCE = 600.0  # seconds for a model to load
_ADDRESS = re.compile(r"on (http://\S+)/v1 .*Application startup complete", re.DOTALL)


@contextmanager
def served(arguments: Sequence[str]) -> Iterator[str]:
    """The address of `headrace serve ARGUMENTS`. EngineError, with its last line, if it does not start."""
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "headrace.cli", "serve", *arguments, "--port", "0"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield _address(process, log.fileno())
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: int) -> str:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        ended = process.poll() is not None
        text = os.pread(log, 1 << 20, 0).decode(errors="replace")  # the place of writing is the server's
        if match := _ADDRESS.search(text):
            return match[1]
        if ended:
            said = (text.strip().splitlines() or ["it said nothing"])[-1]
            raise EngineError(f"the server did not start: {said.removeprefix('headrace: ')}")
        time.sleep(0.05)
    raise EngineError(f"the server did not start within {_PATIENCE:.0f} s")
