"""A command that also reads its flags from a file, ``--config FILE``, and knows those of other servers.

The file is YAML: a flag a line, with dashes or underscores and without the two in front; the command line wins. What is
in it goes through the same checks as the command line, and what is unknown is an error.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.core import TyperCommand

from headrace.base.errors import SettingError
from headrace.cli.foreign import IGNORED, INSTEAD, Foreign, without_foreign

ConfigOption = Annotated[
    str | None, typer.Option("--config", help="YAML file of flags, such as `max-model-len: 4k`; the command line wins.")
]
_NOT_IN_FILES = {"config", "help", "model-option"}
_ALSO = {"api-keys": "api-key"}  # in files


class Configured(TyperCommand):
    """See the module. A flag that may be given again also takes several words, once the model has been named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The file's values become defaults."""
        left_out: list[Foreign] = []
        own = {name.removeprefix("--"): option for option in self.params for name in _spellings(option)}
        words = repeated(list(without_foreign(args, frozenset(own), left_out)), own)
        path = _value_of("--config", words)
        if path is not None:
            options = {option.name.replace("_", "-"): option for option in self.params if option.name}
            entries = read(path)
            try:
                ctx.default_map = _defaults(entries, options, left_out)
            except SettingError as error:
                raise SettingError(f"config {path!r}: {error}", param=error.param) from None
        for foreign in left_out:
            print(f"headrace: {foreign.flag} is ignored: {foreign.why}", file=sys.stderr)
        rest: list[str] = super().parse_args(ctx, words)
        return rest


def _spellings(option: Any) -> tuple[str, ...]:
    return (*option.opts, *option.secondary_opts)


def repeated(args: list[str], own: Mapping[str, Any]) -> list[str]:
    """``--x a b`` as ``--x a --x b`` for flags that may be given again; ``--x '["a", "b"]'`` too. own: options by flag.

    The first word that is no flag's value is the model; only after it can a flag take more words than one.
    """
    rest, words, named = deque(args), list[str](), False
    while rest:
        word = rest.popleft()
        flag, equals, given = word.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        option = own.get(name)
        named = named or not word.startswith("-")
        if option is None and name in INSTEAD:
            raise typer.BadParameter(f"there is no {flag}: {INSTEAD[name]}")
        if not word.startswith("-") or option is None or getattr(option, "is_flag", False) or not (equals or rest):
            words.append(word)
            continue
        values = [given if equals else rest.popleft()]
        many = getattr(option, "multiple", False)
        while many and named and rest and not rest[0].startswith("-"):
            values.append(rest.popleft())
        words += [part for value in values for one in (_several(value) if many else [value]) for part in (flag, one)]
    return words


def _several(word: str) -> list[str]:
    """The strings of a JSON list, or the word itself."""
    try:
        given = json.loads(word) if word.startswith("[") else None
    except ValueError:
        given = None
    return given if isinstance(given, list) and all(isinstance(one, str) for one in given) else [word]


def _value_of(flag: str, words: list[str]) -> str | None:
    for i, word in enumerate(words):
        if word == flag and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def read(path: str) -> dict[str, Any]:
    """The file's entries, with dashes. SettingError when it is no YAML mapping, or has an entry twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        entries = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingError(f"config {path!r} cannot be read: {reason}", param="config") from None
    if entries is None:
        return {}
    if not isinstance(entries, dict):
        raise SettingError(f"config {path!r} must be a list of `flag: value` lines", param="config")
    names = [str(key.value).replace("_", "-") for key, _ in node.value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingError(f"config {path!r} says {twice!r} more than once", param="config")
    return {str(key).replace("_", "-"): value for key, value in entries.items()}


def _defaults(entries: Mapping[str, Any], options: Mapping[str, Any], left_out: list[Foreign]) -> dict[str, Any]:
    """By parameter's name, as the command line's parsers take them."""
    defaults: dict[str, Any] = {}
    for key, value in entries.items():
        option = None if key in _NOT_IN_FILES else options.get(_ALSO.get(key, key))
        if option is None and key in IGNORED:
            left_out.append(Foreign(key, IGNORED[key][1]))
        elif option is None:
            raise SettingError(f"unknown entry {key!r}{_like(key, options)}", param="config")
        elif value is not None:
            defaults[option.name] = _typed(key, value, option)
    return defaults


def _like(key: str, options: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, [*(set(options) - _NOT_IN_FILES), *_ALSO], 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _typed(key: str, value: Any, option: Any) -> Any:
    """Numbers as the words that they are on the command line; true and false only for switches."""
    if getattr(option, "multiple", False):
        return [_word(key, one) for one in (value if isinstance(value, list) else [value])]
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise SettingError(f"{key} is true or false", param=key)
        return value
    if isinstance(value, Mapping):
        raise SettingError(f"{key} is one value", param=key)
    return _word(key, value)


def _word(key: str, value: Any) -> Any:
    if isinstance(value, bool | list) or value is None:
        raise SettingError(f"{key} cannot be {json.dumps(value)}: put text into quotes", param=key)
    return value if isinstance(value, Mapping) else str(value)
