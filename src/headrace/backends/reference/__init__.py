"""The reference back end: numpy, op by op as recorded. It is slow and it is the specification and the debugger."""

from headrace.backends.reference.executor import ReferenceBackend, ReferenceExecutor

__all__ = ["ReferenceBackend", "ReferenceExecutor"]
