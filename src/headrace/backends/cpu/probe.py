"""What this machine can do at best, measured on as many threads as a step uses."""

from __future__ import annotations

from headrace._native import multiply_rate, read_rate
from headrace.backends.cpu.executor import CpuExecutor
from headrace.program.roof import Rates


def rates(executor: CpuExecutor) -> Rates:
    """Takes some 0.2 s and 256 MiB for a moment. The machine should be doing nothing else."""
    isa, threads = executor.isa, executor.threads
    return Rates(read_rate(threads), {kind: multiply_rate(isa, kind, threads) for kind in ("int8", "bf16", "f32")})
