"""What a value may be: one rule from which come its check, the words that refuse it, and its JSON schema.

Owes: a `RequestError` with the path of the first part that is wrong, in time linear in the value, whatever was sent.
Does not know: which fields there are, requests, HTTP. Schemas: JSON Schema 2020-12, the dialect of OpenAPI 3.1.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from headrace.base.errors import RequestError

Schema = Mapping[str, Any]
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN = 60  # characters of a value, or of a name, that a message repeats


@dataclass(frozen=True, slots=True)
class Rule:
    """wanted: in words, after "must be". accepts: whether the outside of a value is right; inside: checks its parts."""

    wanted: str
    schema: Schema
    accepts: Callable[[Any], bool]
    inside: Callable[[str, Any], None] | None = None

    def check(self, path: str, value: Any) -> None:
        """RequestError, whose param is the path of what is wrong."""
        if not self.accepts(value):
            refuse(path, f"must be {self.wanted}, got {told(value)}")
        if self.inside is not None:
            self.inside(path, value)


def refuse(path: str, why: str, code: str | None = None) -> NoReturn:
    """RequestError about the field at `path`."""
    raise RequestError(f"{path} {why}.", param=path, code=code)


def told(value: Any) -> str:
    """A value for a message, in JSON's words: short, escaped, whatever the caller sent."""
    if isinstance(value, str):
        return f"the string {_cut(ascii(value[: _SHOWN + 1]))}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return _cut(str(value)) if abs(value) < 10**_SHOWN or value != value else "a huge number"
    if isinstance(value, Mapping):
        return f"an object of {len(value)}"
    return f"a list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def named(name: str) -> str:
    """A name that a caller chose, for a path: escaped and cut."""
    return ascii(name[: _SHOWN + 1])[1:-1][:_SHOWN]


def nearest(name: str, known: Collection[str]) -> str | None:
    """What was likely meant by a misspelt name; None where nothing is near."""
    return next(iter(difflib.get_close_matches(name[:64], known, n=1, cutoff=0.8)), None)


def unknown(name: str, known: Collection[str], path: str = "") -> NoReturn:
    """RequestError for a field that nobody knows, with the nearest that is known."""
    near = nearest(name, known)
    hint = f"Did you mean {near!r}?" if near else "Leave it out."
    where = path + named(name)
    raise RequestError(f"{where} is not supported here. {hint}", param=where, code="unsupported_parameter")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def is_whole(value: Any) -> TypeGuard[int]:
    """An integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int, says: str = "") -> Rule:
    """An integer of low..high; `says` in the place of these words."""
    schema = {"type": "integer", "minimum": low, "maximum": high}
    words = says or f"an integer from {low} to {high}"
    return Rule(words, schema, lambda value: is_whole(value) and low <= value <= high)


def number(low: float, high: float, above: bool = False, says: str = "") -> Rule:
    """A finite number of low..high; `above` leaves `low` itself out."""
    words = says or (f"a number above {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}")
    schema = {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}

    def accepts(value: Any) -> bool:
        # Comparisons are exact for integers of any size, and False for NaN.
        right = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        return right and not (above and value == low)

    return Rule(words, schema, accepts)


flag = Rule("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
nothing = Rule("null", {"type": "null"}, lambda value: False)  # null equals absent, and is never asked about
anything = Rule("anything", {}, lambda value: True)


def refused(why: str) -> Rule:
    """Nothing but null, because of what is told."""
    return Rule(f"absent: {why}", nothing.schema, nothing.accepts)


def text(most: int | None = None, least: int = 0) -> Rule:
    """A string of least..most characters, which can be encoded."""
    highest = sys.maxsize if most is None else most

    def inside(path: str, value: str) -> None:
        if _SURROGATE.search(value):
            refuse(path, f"holds half of a surrogate pair, which is no character: {told(value)}")

    words = "a string" if most is None else f"a string of {f'{least} to' if least else 'at most'} {most} characters"
    limits = {"minLength": least or None, "maxLength": most}
    schema = {"type": "string", **{name: limit for name, limit in limits.items() if limit is not None}}
    return Rule(words, schema, lambda value: isinstance(value, str) and least <= len(value) <= highest, inside)


def matching(pattern: str, wanted: str) -> Rule:
    """A string that the whole of `pattern` matches. `wanted`: in words."""
    compiled = re.compile(pattern)
    schema = {"type": "string", "pattern": f"^(?:{pattern})$"}
    return Rule(wanted, schema, lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None)


def one_of(*values: Any) -> Rule:
    """One of these values, of the same type: 1 is not true."""
    words = " or ".join(_literal(value) for value in values)
    schema = {"const": values[0]} if len(values) == 1 else {"enum": list(values)}
    return Rule(words, schema, lambda given: any(_same(given, value) for value in values))


def _literal(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _same(given: Any, value: Any) -> bool:
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)


def list_of(item: Rule, most: int, least: int = 0, of: str = "") -> Rule:
    """A list of least..most items. `of`: what they are, in words."""

    def inside(path: str, values: Any) -> None:
        for i, value in enumerate(values):
            if item.inside is not None or not item.accepts(value):
                item.check(f"{path}[{i}]", value)

    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and least <= len(value) <= most

    words = f"a list of {least} to {most} {of}" if of else f"a list of {least} to {most}, each {item.wanted}"
    schema = {"type": "array", "items": item.schema, "maxItems": most, **({"minItems": least} if least else {})}
    return Rule(words, schema, accepts, inside)


def map_of(key: Rule, value: Rule, most: int, of: str) -> Rule:
    """An object of at most `most` members. `of`: what they are, in words."""

    def inside(path: str, values: Any) -> None:
        for name, member in values.items():
            if not key.accepts(name):
                refuse(path, f"must have keys that are each {key.wanted}, got {told(name)}")
            value.check(f"{path}.{named(str(name))}", member)

    schema = {"type": "object", "additionalProperties": value.schema, "maxProperties": most}
    if key.schema.get("type") == "string":
        schema["propertyNames"] = key.schema
    accepts = lambda value: isinstance(value, dict) and len(value) <= most  # noqa: E731
    return Rule(f"an object of at most {most} {of}", schema, accepts, inside)


def record(members: Mapping[str, Rule], required: Collection[str] = ()) -> Rule:
    """An object with these members and no others; null equals absent for those that are not required."""

    def inside(path: str, values: Any) -> None:
        for name in required:
            if name not in values:
                refuse(f"{path}.{name}", "is missing")
        for name, value in values.items():
            if name not in members:
                unknown(name, members, path + ".")
            if value is not None or name in required:
                members[name].check(f"{path}.{name}", value)

    properties = {name: (rule if name in required else nullable(rule)).schema for name, rule in members.items()}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = sorted(required)
    return Rule("an object", schema, lambda value: isinstance(value, dict), inside)


def open_object(of: str = "an object") -> Rule:
    """Any object; what is in it is for somebody else to check."""
    return Rule(of, {"type": "object"}, lambda value: isinstance(value, dict))


def either(*rules: Rule, says: str = "") -> Rule:
    """What one of the rules accepts. Of several that a value may be meant for, the error is of the one that goes on
    longest.
    """

    def inside(path: str, value: Any) -> None:
        errors: list[RequestError] = []
        for rule in rules:
            if rule.accepts(value):
                try:
                    return rule.check(path, value)
                except RequestError as error:
                    errors.append(error)
        raise max(errors, key=lambda error: len(error.param or ""))

    schema = {"anyOf": [rule.schema for rule in rules]}
    words = says or " or ".join(rule.wanted for rule in rules)
    return Rule(words, schema, lambda value: any(rule.accepts(value) for rule in rules), inside)


def tagged(tag: str, kinds: Mapping[str, Rule], default: str | None = None) -> Rule:
    """An object whose member `tag` says which of `kinds` it is; `default`: which, if that member is absent or null."""

    def inside(path: str, value: Any) -> None:
        kind = default if value.get(tag) is None else value[tag]
        if not isinstance(kind, str) or kind not in kinds:
            refuse(f"{path}.{tag}", f"must be {words}, got {told(value[tag])}" if tag in value else "is missing")
        kinds[kind].check(path, value)

    words = " or ".join(map(repr, kinds))
    schema = {"anyOf": [rule.schema for rule in kinds.values()]}
    return Rule(f"an object with {tag}", schema, lambda value: isinstance(value, dict), inside)


def nullable(rule: Rule) -> Rule:
    """Null, or what `rule` accepts."""

    def inside(path: str, value: Any) -> None:
        if value is not None:
            rule.check(path, value)

    schema = rule.schema if rule is anything or rule is nothing else {"anyOf": [rule.schema, {"type": "null"}]}
    return Rule(f"{rule.wanted} or null", schema, lambda value: value is None or rule.accepts(value), inside)
