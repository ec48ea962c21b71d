"""Headrace serves large language models fast and exactly.

    from headrace import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        out = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
        print(out[0].outputs[0].text)

Importing the package loads only its two lowest floors; the rest comes when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.base.errors import HeadraceError, RequestError
from headrace.core.sampling import SamplingParams
from headrace.core.structured import StructuredOutputs

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM
    from headrace.engine.llm import LLM
    from headrace.engine.output import CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"

_LAZY = {
    "LLM": "headrace.engine.llm",
    "AsyncLLM": "headrace.engine.async_llm",
    "CompletionOutput": "headrace.engine.output",
    "RequestOutput": "headrace.engine.output",
    "Logprob": "headrace.engine.output",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "HeadraceError",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
