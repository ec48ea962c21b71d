"""Flags of vLLM that people type and that mean nothing here: each is said to be ignored, and why.

Source of the names: vllm/engine/arg_utils.py and vllm/entrypoints/common/cli_args.py. A flag that a command has itself
is never looked up here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_GPU = "there is no GPU"
_ONE = "one process uses all the cores that it is given (--threads)"
_FILE = "the model's file says so"
_ALWAYS = "it is always so"
_MEMORY = "--kv-cache-memory-bytes sets the size of the KV cache; weights are never moved"
_TEMPLATE = "it is chosen from the chat template"
_CODE = "no code of a model is ever run"

# flag: (whether a value follows, why it means nothing)
IGNORED: Mapping[str, tuple[bool, str]] = {
    "api-server-count": (True, "one server process is enough"),
    "async-scheduling": (False, "steps are scheduled in microseconds"),
    "block-size": (True, "KV pages hold 32 tokens"),
    "code-revision": (True, _CODE),
    "compilation-config": (True, "nothing is compiled at start"),
    "config-format": (True, _FILE),
    "cpu-offload-gb": (True, _MEMORY),
    "data-parallel-size": (True, _ONE),
    "device": (True, _GPU),
    "device-memory-utilization": (True, _MEMORY),
    "disable-cascade-attn": (False, _GPU),
    "disable-custom-all-reduce": (False, _ONE),
    "disable-log-requests": (False, "requests are logged only with --enable-log-requests"),
    "disable-uvicorn-access-log": (False, "there is no access log"),
    "distributed-executor-backend": (True, _ONE),
    "enable-auto-tool-choice": (False, _ALWAYS),
    "enable-chunked-prefill": (False, _ALWAYS),
    "enable-expert-parallel": (False, _ONE),
    "enable-prompt-tokens-details": (False, _ALWAYS),
    "enable-request-id-headers": (False, _ALWAYS),
    "enable-server-load-tracking": (False, "/metrics has the numbers"),
    "enforce-eager": (False, "nothing is compiled at start"),
    "fingerprint-mode": (True, "/version says what runs"),
    "gpu-memory-utilization": (True, _MEMORY),
    "kv-cache-metrics": (False, "/metrics has what there is"),
    "load-format": (True, _FILE),
    "long-prefill-token-threshold": (True, "--max-inter-token-ms sets how prompts are cut"),
    "max-parallel-loading-workers": (True, _ONE),
    "max-seq-len-to-capture": (True, "nothing is compiled at start"),
    "model-impl": (True, "there is one implementation of each model"),
    "num-gpu-blocks-override": (True, _MEMORY),
    "numa-bind": (False, "the threads stay where the process may run"),
    "performance-mode": (True, "--max-inter-token-ms is that choice"),
    "pipeline-parallel-size": (True, _ONE),
    "prefix-caching-hash-algo": (True, "hits compare token ids too"),
    "reasoning-parser": (True, _TEMPLATE),
    "seed": (True, "each request has a seed of its own, which its answer names"),
    "stream-interval": (True, "tokens are sent as they come"),
    "swap-space": (True, _MEMORY),
    "tensor-parallel-size": (True, _ONE),
    "tokenizer-mode": (True, _FILE),
    "tool-call-parser": (True, _TEMPLATE),
    "trust-remote-code": (False, _CODE),
    "uvicorn-log-level": (True, "uvicorn says only what went wrong"),
    "watermark": (True, "pages are taken as sequences grow"),
    "worker-use-ray": (False, _ONE),
}
SHORT = {"-dp": "data-parallel-size", "-ep": "enable-expert-parallel", "-pp": "pipeline-parallel-size"}
SHORT |= {"-tp": "tensor-parallel-size"}
SHORT |= {f"-O{level}": "enforce-eager" for level in range(4)}

# flag: what to do instead
INSTEAD: Mapping[str, str] = {
    "download-dir": "set HEADRACE_CACHE",
    "hf-token": "set HF_TOKEN",
    "enable-lora": "adapters are not supported: merge them into the model",
    "lora-modules": "adapters are not supported: merge them into the model",
}


@dataclass(frozen=True, slots=True)
class Foreign:
    """One flag that was left out."""

    flag: str
    why: str


def without_foreign(args: list[str], own: frozenset[str], left_out: list[Foreign]) -> Iterator[str]:
    """`args` without ignored flags and their values, which are added to `left_out`. own: flags that the command has."""
    words = iter(args)
    for word in words:
        name, equals, _ = word.partition("=")
        flag = SHORT.get(name) or name.removeprefix("--").replace("_", "-")
        flag = flag if flag in IGNORED or not flag.startswith("no-") else flag.removeprefix("no-")
        if not word.startswith("-") or flag in own or name in own or flag not in IGNORED:
            yield word
            continue
        takes_value, why = IGNORED[flag]
        left_out.append(Foreign(name, why))
        if takes_value and not equals:
            next(words, None)
