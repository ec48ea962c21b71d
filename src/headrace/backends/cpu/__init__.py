"""The cpu back end: a program becomes one native plan, a step one native call. Knows no models and no requests."""

from headrace.backends.cpu.executor import CpuBackend, CpuExecutor

__all__ = ["CpuBackend", "CpuExecutor"]
