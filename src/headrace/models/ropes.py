"""Reads how positions turn into angles from any of the spellings in use.

config.json: `rope_theta` and `rope_scaling` (old), or `rope_parameters` (new; by layer type where layers differ).
GGUF: `rope.freq_base`, `rope.scaling.*`, `rope.dimension_count`. What a kind means: `headrace.program.rope`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace.models.keys import Keys
from headrace.program import Rope

Params = Mapping[str, Any]


def read_rope(keys: Keys, head_dim: int, layer_type: str = "full_attention") -> Rope:
    """The rotation of the layers of one type."""
    return _read_gguf(keys, head_dim) if keys.gguf else _read_hf(keys, head_dim, layer_type)


def by_layer_type(keys: Keys, layer_type: str) -> bool:
    """Whether config.json gives this type of layer a rotation of its own."""
    params = keys.raw.get("rope_parameters")
    return isinstance(params, Mapping) and layer_type in params


def hf_parameters(keys: Keys, layer_type: str) -> Params:
    """`rope_parameters` or the older `rope_scaling`, of one layer type if they are given for each; {} for neither."""
    name = "rope_parameters" if keys.raw.get("rope_parameters") is not None else "rope_scaling"
    params = keys.raw.get(name)
    if isinstance(params, Mapping) and layer_type in params:
        params = params[layer_type]
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise keys.bad(f"{name} must be an object")
    return params


def _read_hf(keys: Keys, head_dim: int, layer_type: str) -> Rope:
    params = hf_parameters(keys, layer_type)
    kind = params.get("rope_type", params.get("type", "default"))
    if not isinstance(kind, str) or kind not in _HF_KINDS:
        raise keys.bad(f"the rope kind {kind!r} is not supported; known: {', '.join(_HF_KINDS)}")
    theta = params["rope_theta"] if params.get("rope_theta") is not None else keys.get("rope_theta")
    share = params.get("partial_rotary_factor", keys.raw.get("partial_rotary_factor"))
    share = 1.0 if share is None else keys.check_real("partial_rotary_factor", share, high=1.0)
    return Rope(
        rotary=_rotary(keys, int(head_dim * share), head_dim),
        theta=keys.check_real("rope_theta", 10000.0 if theta is None else theta, low=1.0, high=1e12),
        **_HF_KINDS[kind](keys, params),
    )


def _rotary(keys: Keys, rotary: int, head_dim: int) -> int:
    if rotary < 2 or rotary % 2 or rotary > head_dim:
        raise keys.bad(f"{rotary} rotated values of a head of {head_dim}: must be even and at most the head")
    return rotary


def _number(keys: Keys, params: Params, name: str, default: float | None = None) -> float:
    value = params.get(name)
    return keys.check_real(f"rope {name}", default if value is None else value)


def _original(keys: Keys, params: Params) -> int:
    name = "original_max_position_embeddings"
    value = params.get(name, keys.raw.get(name))
    return keys.check_whole(f"rope {name}", keys.get("context") if value is None else value, high=1 << 31)


def _default(keys: Keys, params: Params) -> dict[str, Any]:
    return {}


def _linear(keys: Keys, params: Params) -> dict[str, Any]:
    return {"kind": "linear", "factor": _number(keys, params, "factor")}


def _llama3(keys: Keys, params: Params) -> dict[str, Any]:
    low, high = _number(keys, params, "low_freq_factor"), _number(keys, params, "high_freq_factor")
    if high <= low:
        raise keys.bad(f"rope high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    original = _original(keys, params)
    return {"kind": "llama3", "factor": _number(keys, params, "factor"), "low": low, "high": high, "original": original}


def _yarn(keys: Keys, params: Params) -> dict[str, Any]:
    if params.get("truncate") is False:
        raise keys.bad("rope truncate = false (yarn without rounded bounds) is not supported")
    factor = _number(keys, params, "factor")
    return {
        "kind": "yarn",
        "factor": factor,
        "original": _original(keys, params),
        "beta_fast": _number(keys, params, "beta_fast", 32.0),
        "beta_slow": _number(keys, params, "beta_slow", 1.0),
        "attention_factor": _yarn_magnitude(keys, params, factor),
    }


def _yarn_magnitude(keys: Keys, params: Params, factor: float) -> float | None:
    if params.get("attention_factor") is not None:
        return _number(keys, params, "attention_factor")
    if not params.get("mscale") or not params.get("mscale_all_dim"):
        return None
    log = math.log(max(factor, 1.0))
    over, under = (0.1 * _number(keys, params, name) * log + 1.0 for name in ("mscale", "mscale_all_dim"))
    return over / under


_HF_KINDS: dict[str, Callable[[Keys, Params], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


# Names of tensors that only the `longrope` kind has.
LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")


def _read_gguf(keys: Keys, head_dim: int) -> Rope:
    arch = keys.architecture
    if keys.raw.get(f"{arch}.rope.dimension_sections") is not None:
        raise keys.bad(f"{arch}.rope.dimension_sections: rope over several axes is not supported")
    if any(name in keys.shapes for name in LONGROPE):
        raise keys.bad("the rope kind 'longrope' (tensors rope_factors_*) is not supported")
    return Rope(
        rotary=_rotary(keys, keys.whole("rotary", head_dim, low=2), head_dim),
        theta=keys.real("rope_theta", 10000.0, low=1.0, high=1e12),
        **_gguf_scaling(keys),
    )


def _gguf_scaling(keys: Keys) -> dict[str, Any]:
    prefix = f"{keys.architecture}.rope.scaling."
    params = {key.removeprefix(prefix): value for key, value in keys.raw.items() if key.startswith(prefix)}
    factor = params.get("factor", keys.raw.get(f"{keys.architecture}.rope.scale_linear"))
    kind = params.get("type", "linear")  # the type may be left out where the factor says it all
    if not isinstance(kind, str) or kind not in _GGUF_KINDS:
        raise keys.bad(f"the rope kind {kind!r} is not supported; known: {', '.join(_GGUF_KINDS)}")
    return _GGUF_KINDS[kind](keys, {**params, "factor": factor})


def _gguf_linear(keys: Keys, params: Params) -> dict[str, Any]:
    factor = params.get("factor")
    return {} if factor in (None, 0, 1) else _linear(keys, params)


def _gguf_yarn(keys: Keys, params: Params) -> dict[str, Any]:
    factor = _number(keys, params, "factor")
    original = params.get("original_context_length")
    given = params.get("attn_factor", params.get("yarn_attn_factor"))
    magnitude = 1.0 if given is None else keys.check_real("rope attn_factor", given)
    return {
        "kind": "yarn",
        "factor": factor,
        "original": keys.check_whole(
            "rope.scaling.original_context_length", keys.get("context") if original is None else original, high=1 << 31
        ),
        "beta_fast": _number(keys, params, "yarn_beta_fast", 32.0),
        "beta_slow": _number(keys, params, "yarn_beta_slow", 1.0),
        "attention_factor": magnitude * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    }


_GGUF_KINDS: dict[str, Callable[[Keys, Params], dict[str, Any]]] = {
    "none": _default,
    "linear": _gguf_linear,
    "yarn": _gguf_yarn,
}
