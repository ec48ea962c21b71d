"""Keys: who may ask, and as whom.

Owes: a key is compared in the same time whatever it is, and is never shown, logged or handed to a child process. Does
not know: routes (`serve.front`), or what a caller's weight does (`core.scheduler`).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from headrace.base.errors import SettingError
from headrace.base.log import log
from headrace.serve.net.callers import Caller

ENVIRONMENT = "HEADRACE_API_KEY"
_SECRET = re.compile(r"[!-~]{1,512}")
_NAME = re.compile(r"[A-Za-z0-9_.@:-]{1,64}")
_HEADERS = ("authorization", "x-api-key")
_FIELDS = ("name", "key", "weight")


@dataclass(frozen=True, slots=True)
class Key:
    """A secret and whom it stands for. The same name with several keys is one caller."""

    secret: str = field(repr=False)
    caller: Caller

    @classmethod
    def of(cls, secret: object, name: object = None, weight: object = 1.0, *, where: str = "api_key") -> Key:
        """Checked; unnamed keys get a name of their own. SettingError says what is wrong, without the key."""
        if not isinstance(secret, str) or not _SECRET.fullmatch(secret):
            raise SettingError(f"{where}: a key is 1 to 512 visible ASCII characters without spaces", param=where)
        if name is None:
            name = "key-" + hashlib.sha256(b"headrace caller " + secret.encode()).hexdigest()[:8]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SettingError(f"{where}: a name is 1 to 64 of A-Za-z0-9_.@:-", param=where)
        try:
            share = float(weight) if isinstance(weight, str | int | float) else math.nan
        except ValueError:
            share = math.nan
        if not 0 < share < math.inf:
            raise SettingError(f"{where}: the weight of {name!r} must be a number above 0", param=where)
        return cls(secret, Caller(name, share))

    @classmethod
    def read(cls, given: str | Mapping[str, Any], where: str = "api_key") -> Key:
        """``key`` or ``name key [weight]``, as in a key file, or a mapping with these names, as in a config file."""
        if isinstance(given, Mapping):
            odd = sorted(str(key) for key in given if key not in _FIELDS)
            if odd:
                raise SettingError(f"{where}: unknown field {odd[0]!r}; known: {', '.join(_FIELDS)}", param=where)
            return cls.of(given.get("key"), given.get("name"), given.get("weight", 1.0), where=where)
        words = given.split()
        if len(words) == 1:
            return cls.of(words[0], where=where)
        if len(words) in (2, 3):
            return cls.of(words[1], words[0], *words[2:], where=where)
        raise SettingError(f"{where}: write `key`, `name key` or `name key weight`", param=where)


class KeyRing:
    """The keys of a server."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._callers: list[tuple[bytes, Caller]] = []
        weights: dict[str, float] = {}
        for key in keys:
            caller = key.caller
            if weights.setdefault(caller.name, caller.weight) != caller.weight:
                raise SettingError(f"keys of {caller.name!r} differ in their weights", param="api_key")
            digest = _digest(key.secret.encode())
            if any(digest == known and caller != other for known, other in self._callers):
                raise SettingError(f"the key of {caller.name!r} is also another's", param="api_key")
            self._callers.append((digest, caller))

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, headers: Headers) -> Caller | None:
        """Whose key the request carries, as ``Authorization: Bearer`` or ``x-api-key``; None: nobody's.

        Each key is compared with what was sent, and each comparison takes as long as any other.
        """
        found = None
        for given in _given(headers):
            digest = _digest(given)
            for known, caller in self._callers:
                if hmac.compare_digest(digest, known):
                    found = caller
        return found


def _given(headers: Headers) -> list[bytes]:
    """What the request offers as a key."""
    given = []
    for name in _HEADERS:
        for value in headers.getlist(name):
            scheme, _, rest = value.strip().partition(" ")
            if name == "authorization":
                value = rest if scheme.lower() == "bearer" else ""
            given.append(value.strip().encode("latin-1"))
    return given


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def key_ring(flags: Iterable[Key], file: str | None, environment: MutableMapping[str, str]) -> KeyRing:
    """All keys: of the flags, the file, and the environment, which loses them, so that no child inherits any."""
    keys = [*flags, *(_from_file(Path(file)) if file is not None else ())]
    given = environment.pop(ENVIRONMENT, "")
    keys += [Key.read(one, ENVIRONMENT) for one in given.split(",") if one.strip()]
    return KeyRing(keys)


def _from_file(path: Path) -> list[Key]:
    """One key a line; ``#`` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"api_key_file {str(path)!r} cannot be read: {reason}", param="api_key_file") from None
    if mode & 0o077:
        log.warning("the key file can be read by others than its owner: chmod 600 would end that")
    found = [
        Key.read(text, f"api_key_file, line {number}")
        for number, line in enumerate(lines, 1)
        if (text := line.partition("#")[0].strip())
    ]
    if not found:
        raise SettingError(f"api_key_file {str(path)!r} holds no key", param="api_key_file")
    return found
