"""Reads a checkpoint's configuration: typed, bounded values under one name, whatever the file calls them.

Owes: for each of our names the key of Hugging Face's config.json and of GGUF metadata, and a `BadModelFile` that names
the key whenever a value is missing, of the wrong type or absurd. Does not know what an architecture does with a value.
Sources: transformers' configuration classes; ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headrace.base.errors import BadModelFile

Kind = Literal["gguf", "safetensors"]

# Our name: (keys of config.json, the first that is there counts; key of GGUF metadata after the architecture's prefix).
NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "layers": (("num_hidden_layers",), "block_count"),
    "dim": (("hidden_size",), "embedding_length"),
    "hidden": (("intermediate_size",), "feed_forward_length"),
    "heads": (("num_attention_heads",), "attention.head_count"),
    "kv_heads": (("num_key_value_heads",), "attention.head_count_kv"),
    "head_dim": (("head_dim",), "attention.key_length"),
    "value_dim": (("v_head_dim",), "attention.value_length"),
    "eps": (("rms_norm_eps",), "attention.layer_norm_rms_epsilon"),
    "context": (("max_position_embeddings",), "context_length"),
    "vocab": (("vocab_size",), "vocab_size"),
    "window": (("sliding_window",), "attention.sliding_window"),
    "attention_softcap": (("attn_logit_softcapping",), "attn_logit_softcapping"),
    "logit_softcap": (("final_logit_softcapping",), "final_logit_softcapping"),
    "embed_scale": (("embedding_multiplier",), "embedding_scale"),
    "residual_scale": (("residual_multiplier",), "residual_scale"),
    "logit_divisor": (("logits_scaling",), "logit_scale"),
    "attention_scale": (("attention_multiplier",), "attention.scale"),
    "experts": (("num_local_experts", "num_experts"), "expert_count"),
    "experts_used": (("num_experts_per_tok",), "expert_used_count"),
    "expert_hidden": (("moe_intermediate_size",), "expert_feed_forward_length"),
    "rope_theta": (("rope_theta",), "rope.freq_base"),
    "rotary": ((), "rope.dimension_count"),
}

LARGEST = 1 << 24
"""No extent of a model is larger than this; what is, is a damaged file."""


@dataclass(frozen=True, slots=True)
class Keys:
    """One checkpoint's configuration.

    raw: config.json as parsed, or GGUF metadata. architecture: `model_type`, or `general.architecture`.
    shapes: the shape of each tensor in the file, by the file's names. defaults: values for absent keys, by our names.
    """

    raw: Mapping[str, Any]
    kind: Kind
    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    file: str = "the model"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gguf(self) -> bool:
        return self.kind == "gguf"

    def with_defaults(self, **defaults: Any) -> Keys:
        return replace(self, defaults=defaults)

    def bad(self, reason: str) -> BadModelFile:
        return BadModelFile(self.file, reason)

    def spelled(self, name: str) -> str:
        """What the file calls our `name`."""
        hf, gguf = NAMES[name]
        if self.gguf:
            return f"{self.architecture}.{gguf}"
        return next((key for key in hf if self.raw.get(key) is not None), hf[0] if hf else name)

    def get(self, name: str) -> Any:
        """The value as the file has it, or None."""
        value = self.raw.get(self.spelled(name))
        return self.defaults.get(name) if value is None else value

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def whole(self, name: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
        value = _uniform(self.get(name))
        return self.check_whole(self.spelled(name), default if value is None else value, low, high)

    def real(self, name: str, default: float | None = None, low: float = 0.0, high: float = 1e9) -> float:
        value = self.get(name)
        return self.check_real(self.spelled(name), default if value is None else value, low, high)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """A boolean of config.json, which GGUF doesn't have."""
        value = None if self.gguf else self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(f"{key} is {value!r}, not true or false")
        return value

    def check_whole(self, key: str, value: Any, low: int = 1, high: int = LARGEST) -> int:
        if value is None:
            raise self.bad(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(f"{key} is {_short(value)}, not a whole number")
        if not low <= value <= high:
            raise self.bad(f"{key} is {_short(value)}, outside {low} to {high}")
        return value

    def check_real(self, key: str, value: Any, low: float = 0.0, high: float = 1e9) -> float:
        """A finite number above `low` and at most `high`."""
        if value is None:
            raise self.bad(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(f"{key} is {_short(value)}, not a number")
        if not low < value <= high or not math.isfinite(value):
            raise self.bad(f"{key} is {_short(value)}; it must be above {low:g} and at most {high:g}")
        return float(value)

    def refuse(self, key: str, harmless: Sequence[Any], what: str) -> None:
        """Refuses the file by name if `key` is there with a value that asks for something that isn't done."""
        value = self.raw.get(key)
        if value is not None and value not in harmless:
            raise self.bad(f"{key} = {_short(value)}: {what} is not supported")


def _uniform(value: Any) -> Any:
    """GGUF may give a number for each layer: fine where all are the same."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value):
        first = value[0]
        if isinstance(first, int) and all(v == first for v in value):
            return first
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
