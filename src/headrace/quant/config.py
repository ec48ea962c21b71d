"""Values of a `quantization_config`: typed, or `Unfit` that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.quant.packed import Unfit


def whole(config: Mapping[str, Any], key: str, low: int, high: int, other: str = "") -> int:
    """A whole number in a range. other: what older files call it."""
    value = config.get(key, config.get(other))
    if type(value) is not int or not low <= value <= high:
        raise Unfit("", f"{key} is {value!r:.60}; a whole number from {low} to {high} is expected")
    return value


def one_of(config: Mapping[str, Any], key: str, known: tuple[Any, ...], default: Any) -> Any:
    """The value, or the default for none: one of `known`, or else it is not supported."""
    value = config.get(key)
    value = default if value is None else value
    if value not in known or type(value) is not type(known[0]):
        raise Unfit("", f"{key} = {value!r:.60} is not supported, only {' or '.join(map(str, known))}")
    return value
