"""Settings of an engine: one frozen record that library, command line and processes share. Names are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from headrace.base.errors import SettingError
from headrace.base.formats import ENCODED
from headrace.base.rules import nearest
from headrace.base.speculation import Speculation

PAGE = 32  # tokens of a KV page

BATCHED_TOKENS = 512  # rows of a step, where nothing else is asked for

DEFAULT_MODEL = "smollm2-135m"

KV_DTYPES = ("float16", "bfloat16", "int8")  # formats of the KV cache

ISAS = ("scalar", "avx2", "avx512", "amx", "neon_dot", "neon_i8mm")  # instruction sets with kernels of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How a model is run.

    model: a model reference (file, folder, ``org/name``, ``pypi:...``, catalogue name).
    max_model_len: longest prompt and answer together, in tokens; None takes the model's own, at most 8192.
    max_num_seqs: sequences that may run at once.
    max_num_batched_tokens: rows of one step; prompt chunks fill what decoding leaves.
    max_num_queued_reqs: sequences that may be waited for beyond `max_num_seqs`; None takes 4,096, or 64 times
        `max_num_seqs`. max_num_queued_tokens: of prompts that have not begun; None takes 4 Mi. `LLM` knows neither.
    max_inter_token_ms: how long a step may take while prompts are computed beside sequences that decode; chunks of the
        prompts are cut to fit. None takes twice the step without them; 0 is no limit.
    generation_config: where sampling defaults come from: "auto", the model's generation_config.json; "vllm", nowhere:
        OpenAI's hold; or the path of such a file or of its folder.
    override_generation_config: goes before it, by the same names.
    kv_cache_memory_bytes: size of the KV cache; None takes enough for `max_num_seqs` sequences of 1,024 tokens, and
        for one of `max_model_len`, within the free memory.
    kv_cache_dtype: what keys and values are kept as: "float16" (and "auto"); "bfloat16", for models that have larger
        ones than 65504; or "int8", with a scale for each token and head: half the memory, and faster at long contexts;
        see docs/log.md for what it costs. The reference back end's "auto" keeps float32.
    kv_cache_dir: a folder where prefixes are kept beyond a restart, one for each model; None: nowhere. It holds what
        prompts and answers were, in the model's numbers. kv_cache_dir_bytes: the most that they take there.
    threads: of the native pool; 0 takes what the machine allows this process.
    quantization: one of ENCODED: what float weights are rounded to as they are loaded, as `headrace quantize --method
        plain` does it; None (or "none"): not at all. The bits are those of that file.
    batching: "continuous", or for comparison "static": a batch is filled and runs until all of it has ended.
    kv_cache: False recomputes the whole sequence at each step, for comparison.
    backend: "cpu", or "reference" (numpy, slow: the specification).
    dtype: what the inputs of bf16 weights are: "float32" (and "auto"), or "bfloat16": up to twice as fast, less exact.
    measure_roof: look at the start at what the machine gives at best, so that metrics tell how near to it steps are.
    speculative_config: how tokens are guessed ahead of the model, by vLLM's keys (see `Speculation`); None: not at all.
        It changes how fast answers come, never what they are. Without a KV cache it does nothing.
    isa: one of ISAS; "" takes the best of the machine, or the environment's HEADRACE_ISA.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = BATCHED_TOKENS
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_inter_token_ms: float | None = None
    max_logprobs: int = 20
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: Literal["auto", "float16", "bfloat16", "int8"] = "auto"
    quantization: str | None = None
    kv_cache_dir: str | None = None
    kv_cache_dir_bytes: int = 4 << 30
    threads: int = 0
    batching: Literal["continuous", "static"] = "continuous"
    kv_cache: bool = True
    backend: Literal["cpu", "reference"] = "cpu"
    isa: str = ""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    measure_roof: bool = False
    speculative_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, (ok, wanted) in _RULES.items():
            value = getattr(self, name)
            if not ok(value):
                raise SettingError(f"{name} must be {wanted}, got {value!r}", param=name)
        if self.kv_cache_dir is not None and not (self.enable_prefix_caching and self.kv_cache):
            raise SettingError("kv_cache_dir keeps prefixes, but prefix caching is off", param="kv_cache_dir")
        if self.speculative_config is not None:
            Speculation.of(self.speculative_config)

    @property
    def weight_format(self) -> str | None:
        """What float weights become; None: what they are."""
        return None if self.quantization == "none" else self.quantization

    @classmethod
    def of(cls, model: str | None = None, **settings: Any) -> EngineSettings:
        """From keyword arguments; an unknown one is an error that names it and the nearest known."""
        known = {f.name for f in fields(cls)}
        for name in settings:
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(known))}"
                raise SettingError(f"unknown setting {name!r}; {hint}", param=name)
        if model is not None:
            settings["model"] = model
        return cls(**settings)


def _whole(low: int, high: float = math.inf) -> Callable[[object], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _at_least_0(v: object) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < math.inf


def _optional(rule: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda v: v is None or rule(v)


def _text(v: object) -> bool:
    return isinstance(v, str) and bool(v) and "\0" not in v


def _names(v: object) -> bool:
    return isinstance(v, dict) and all(isinstance(name, str) for name in v)


def _flag(v: object) -> bool:
    return isinstance(v, bool)


_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "model": (_text, "a model reference"),
    "revision": (_optional(_text), "a revision name"),
    "tokenizer": (_optional(_text), "a path or reference"),
    "chat_template": (_optional(_text), "a template or a path"),
    "max_model_len": (_optional(_whole(1, 1 << 24)), "a number of tokens from 1 on"),
    "max_num_seqs": (_whole(1, 4096), "from 1 to 4096"),
    "max_num_batched_tokens": (_whole(1, 65536), "from 1 to 65536"),
    "max_num_queued_reqs": (_optional(_whole(0)), "a number of sequences from 0 on"),
    "max_num_queued_tokens": (_optional(_whole(1)), "a number of tokens from 1 on"),
    "max_inter_token_ms": (_optional(_at_least_0), "milliseconds, 0 (no limit) or more"),
    "max_logprobs": (_whole(0, 1 << 20), "from 0 on"),
    "generation_config": (_text, "'auto', 'vllm' or a path"),
    "override_generation_config": (_optional(_names), "an object of sampling fields"),
    "enable_prefix_caching": (_flag, "true or false"),
    "kv_cache_memory_bytes": (_optional(_whole(1)), "a number of bytes"),
    "kv_cache_dtype": (lambda v: v in ("auto", *KV_DTYPES), f"'auto' or one of {', '.join(KV_DTYPES)}"),
    "quantization": (
        lambda v: v in (None, "none", *ENCODED),
        f"one of {', '.join(ENCODED)}, or none; a checkpoint that is quantised already (gptq, awq, gguf) needs no flag",
    ),
    "kv_cache_dir": (_optional(_text), "the path of a folder"),
    "kv_cache_dir_bytes": (_whole(1), "a number of bytes"),
    "threads": (_whole(0, 256), "from 0 (automatic) to 256"),
    "batching": (lambda v: v in ("continuous", "static"), "'continuous' or 'static'"),
    "kv_cache": (_flag, "true or false"),
    "backend": (lambda v: v in ("cpu", "reference"), "'cpu' or 'reference'"),
    "measure_roof": (_flag, "true or false"),
    "speculative_config": (_optional(_names), "an object such as {'method': 'suffix'}"),
    "isa": (lambda v: v in ("", *ISAS), f"one of {', '.join(ISAS)}, or empty for the best"),
    "dtype": (lambda v: v in ("auto", "float32", "bfloat16"), "'auto', 'float32' or 'bfloat16'"),
}
