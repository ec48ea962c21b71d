"""Back ends by name, each imported only when asked for: the optional ones bring large libraries."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from headrace.backends import Backend
from headrace.base.errors import SettingError

_MAKERS = {
    "cpu": ("headrace.backends.cpu", "CpuBackend"),
    "reference": ("headrace.backends.reference", "ReferenceBackend"),
}


def backend_named(name: str, isa: str = "", bf16: bool = False, kv: str = "auto", taps: bool = False) -> Backend:
    """The back end of that name; isa, bf16: see `CpuBackend`; isa "" is the best there is. kv: see `EngineSettings`.

    taps: values can be tapped.
    """
    if name not in _MAKERS:
        raise SettingError(f"backend must be one of {', '.join(_MAKERS)}, got {name!r}", param="backend")
    module, maker = _MAKERS[name]
    given: dict[str, Any] = {} if kv == "auto" else {"kv": kv}
    if name == "cpu":
        given |= {"isa": isa or None, "bf16": bf16, "merge": not taps}
    made: Backend = getattr(import_module(module), maker)(**given)
    return made
