"""The schemes of other libraries by the name that a `quantization_config` gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.quant import awq, compressed, gptq
from headrace.quant.packed import Scheme, Unfit

SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": gptq.scheme,
    "awq": awq.scheme,
    "compressed-tensors": compressed.scheme,
}


def scheme_of(config: Any) -> Scheme:
    """Raises `Unfit` for a configuration that is no object, or asks for what is not supported."""
    if not isinstance(config, Mapping):
        raise Unfit("", "must be an object")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        raise Unfit("", f"quant_method = {method!r:.60} is not supported, only {', '.join(SCHEMES)}")
    return SCHEMES[method](config)
