"""Floor 6: requests over time, and the process around them. Knows nothing of HTTP."""

from headrace.base.settings import EngineSettings
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.client import EngineClient, Stream
from headrace.engine.llm import LLM
from headrace.engine.messages import ModelInfo, Stats
from headrace.engine.output import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Delta",
    "EngineClient",
    "EngineSettings",
    "Logprob",
    "ModelInfo",
    "RequestMetrics",
    "RequestOutput",
    "Stats",
    "Stream",
]
