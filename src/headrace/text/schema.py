"""JSON schemas, as far as a grammar can be made of them: checked, and brought to one form.

Owes: a schema whose every keyword will be enforced, or a `SchemaError` that says where it holds one that will not be.
The keywords are those of JSON Schema 2020-12 that llguidance honours (docs/json_schema.md there); it takes unknown ones
for remarks, so that a misspelt "maxlength" would end nothing. What says nothing about values is left out.
Does not know: grammars, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote, unquote

from headrace.base.errors import HeadraceError
from headrace.base.log import shown
from headrace.core.structured import MAX_SCHEMA_CHARACTERS

MAX_DEPTH: Final = 60
MAX_COUNT: Final = 1 << 20
"""For lengths and numbers of items: more than any context holds."""
MAX_PATTERN: Final = 4096
MAX_SHOWN: Final = 120
"""Characters of a caller's text that a message repeats."""
MAX_OPTIONAL: Final = 400
"""Names that an object may leave out: any of them may be next, and a grammar's state holds them all."""
MAX_BOUND: Final = 2**53
"""Numbers up to here are exact in float64, with which bounds are reckoned."""

Schema = dict[str, Any]

SPACING: Final[Schema] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write a value: no model can spend its answer on white space. Python's json.dumps writes so, too."""


class SchemaError(HeadraceError, ValueError):
    """A schema that cannot be enforced. where: a JSON pointer from its root, as "#/properties/age"."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"at {shown(where, MAX_SHOWN)}: {what}")
        self.where = where


def normalised(schema: Any) -> Schema:
    """The schema without what says nothing, and with how values are to be spaced. SchemaError.

    schema: a JSON object, decoded or as text.
    """
    if isinstance(schema, str):
        schema = _decoded(schema)
    elif isinstance(schema, dict):
        schema = _decoded(_encoded(schema))  # none of the caller's own objects, and numbers as JSON has them
    if not isinstance(schema, dict):
        raise SchemaError("#", f"a schema is a JSON object, not {_kind(schema)}")
    walk = _Walk(schema)
    found = walk.schema(schema, "#", 0)
    walk.check_references()
    assert isinstance(found, dict)
    walk.outline_choices(found)
    return found | {"x-guidance": SPACING}


def _encoded(schema: Schema) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError("#", f"this is no JSON value: {shown(str(error), MAX_SHOWN)}") from None


def _decoded(text: str) -> Any:
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise SchemaError("#", f"a schema has at most {MAX_SCHEMA_CHARACTERS} characters, this one {len(text)}")

    def refuse(name: str) -> Any:
        raise SchemaError("#", f"{name} is no JSON number")

    try:
        text.encode("utf-8")
        return json.loads(text, parse_constant=refuse)
    except (RecursionError, UnicodeEncodeError):
        raise SchemaError("#", f"schemas are nested at most {MAX_DEPTH} deep, and their text is Unicode") from None
    except ValueError as error:
        raise SchemaError("#", f"this is no JSON: {shown(str(error), MAX_SHOWN)}") from None


def _kind(value: Any) -> str:
    names = {bool: "true or false", str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# -- what may be the value of a keyword

Check = Callable[[Any], str | None]  # what the value must be, if it is not


def _count(value: Any) -> str | None:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    return None if whole and 0 <= value <= MAX_COUNT else f"an integer from 0 to {MAX_COUNT}"


def _bound(value: Any) -> str | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_BOUND
    return None if fits else "a number from -2**53 to 2**53"


def _step(value: Any) -> str | None:
    return None if _bound(value) is None and value > 0 else "a number above 0 and at most 2**53"


def _pattern(value: Any) -> str | None:
    return None if isinstance(value, str) and len(value) <= MAX_PATTERN else f"a string of at most {MAX_PATTERN}"


def _names(value: Any) -> str | None:
    return None if isinstance(value, list) and all(isinstance(x, str) for x in value) else "a list of strings"


def _exact(value: Any) -> bool:
    """Whether float64 can tell every number in there from the next integer."""
    if isinstance(value, dict):
        return all(_exact(item) for item in value.values())
    if isinstance(value, list):
        return all(_exact(item) for item in value)
    return isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= MAX_BOUND


def _constant(value: Any) -> str | None:
    return None if _exact(value) else "a value whose numbers are from -2**53 to 2**53"


def _values(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "a list of at least one value"
    return None if _exact(value) else "values whose numbers are from -2**53 to 2**53"


TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")


def _type(value: Any) -> str | None:
    names = value if isinstance(value, list) else [value]
    known = names and all(isinstance(name, str) and name in TYPES for name in names)
    return None if known else f"one of {', '.join(TYPES)}, or a list of them"


FORMATS: Final = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip


def _format(value: Any) -> str | None:
    return None if value in FORMATS else f"one of {', '.join(FORMATS)}"


VALUES: Final[dict[str, Check]] = {
    "type": _type,
    "const": _constant,
    "enum": _values,
    "minLength": _count,
    "maxLength": _count,
    "pattern": _pattern,
    "format": _format,
    "minimum": _bound,
    "maximum": _bound,
    "exclusiveMinimum": _bound,
    "exclusiveMaximum": _bound,
    "multipleOf": _step,
    "minItems": _count,
    "maxItems": _count,
    "required": _names,
    "minProperties": _count,
    "maxProperties": _count,
}
"""Keywords with a value of their own."""

ONE: Final = frozenset({"items", "additionalProperties"})
SEVERAL: Final = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords that hold a schema, a list of them, or a map to them."""

REMARKS: Final = frozenset({
    "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "contentMediaType", "contentEncoding", "contentSchema", "discriminator",
})  # fmt: skip
"""Keywords that say nothing about values (a "discriminator" only how to read a "oneOf"); "x-" begins others."""

NEUTRAL: Final[dict[str, Any]] = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True}
"""Keywords that are not supported, with the value that asks for nothing."""

PAIRS: Final = (
    ("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"), ("minimum", "maximum"),
)  # fmt: skip

HINTS: Final = {"nullable": 'use "type": ["...", "null"]', "additionalItems": 'use "prefixItems" and "items"'}


class _Walk:
    """One schema: what was found where, and which references are still to be checked."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._met: dict[int, str] = {}  # id of a subschema -> where
        self._references: list[tuple[str, str]] = []  # where, target
        self._choices: list[list[Any]] = []  # the lists of "oneOf", in their normal form

    def schema(self, value: Any, where: str, depth: int) -> Schema | bool:
        """The normal form of a subschema."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise SchemaError(where, f"a schema is an object, true or false, not {_kind(value)}")
        if depth > MAX_DEPTH:
            raise SchemaError(where, f"schemas are nested at most {MAX_DEPTH} deep")
        self._met[id(value)] = where
        found = {}
        for name, item in value.items():
            if not _is_remark(name, item, where):
                found[name] = self._keyword(name, item, where, depth)
        _check_pairs(value, where)
        _check_names(value, where)
        return found

    def _keyword(self, name: str, value: Any, where: str, depth: int) -> Any:
        place = f"{where}/{_escaped(name)}"
        if name in VALUES:
            wanted = VALUES[name](value)
            if wanted:
                raise SchemaError(place, f"{name} must be {wanted}")
            return int(value) if VALUES[name] is _count else value
        if name in ONE:
            return self.schema(value, place, depth + 1)
        if name in SEVERAL:
            if not isinstance(value, list) or not value:
                raise SchemaError(place, f"{name} must be a list of at least one schema")
            several = [self.schema(item, f"{place}/{i}", depth + 1) for i, item in enumerate(value)]
            if name == "oneOf":
                self._choices.append(several)
            return several
        if name in NAMED:
            if not isinstance(value, dict):
                raise SchemaError(place, f"{name} must be an object of schemas")
            return {key: self.schema(item, f"{place}/{_escaped(key)}", depth + 1) for key, item in value.items()}
        if name == "$ref":
            return self._reference(value, place)
        hint = f"; {HINTS[name]}" if name in HINTS else ""
        raise SchemaError(place, f'the keyword "{shown(name, 40)}" is not supported{hint}')

    def _reference(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise SchemaError(place, '$ref must be a pointer within this schema, as "#/$defs/name"')
        self._references.append((place, value))
        return value

    def check_references(self) -> None:
        """Each leads to a subschema of this schema, and not back to itself."""
        for place, reference in self._references:
            seen = [reference]
            target = self._target(place, reference)
            while isinstance(target, dict) and "$ref" in target:
                if target["$ref"] in seen:
                    raise SchemaError(place, f"$ref {shown(reference, MAX_SHOWN)} leads back to itself")
                seen.append(target["$ref"])
                target = self._target(place, target["$ref"])

    def outline_choices(self, root: Schema) -> None:
        """Say what a reference in "oneOf" leads to: llguidance takes schemas for each other's opposites only where it
        sees that they are, by their types or by properties that are constant, and it does not look behind references.
        """
        for choices in self._choices:
            for i, choice in enumerate(choices):
                while isinstance(choice, dict) and choice.keys() == {"$ref"}:
                    reference = choice["$ref"]
                    choice = _found(root, reference)
                    choices[i] = _outline(choice, reference) if isinstance(choice, dict) else choice

    def _target(self, place: str, reference: str) -> Any:
        try:
            node = _found(self._root, reference)
        except (LookupError, ValueError, TypeError):
            raise SchemaError(place, f"$ref {shown(reference, MAX_SHOWN)} leads nowhere") from None
        if not isinstance(node, bool) and id(node) not in self._met:
            raise SchemaError(place, f"$ref {shown(reference, MAX_SHOWN)} leads to no schema")
        return node


def _found(root: Schema, reference: str) -> Any:
    """What a reference leads to; LookupError, ValueError or TypeError if nothing."""
    node: Any = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        node = node[int(name)] if isinstance(node, list) else node[name]
    return node


def _outline(schema: Schema, where: str) -> Schema:
    """A schema with references in the place of the schemas in it, but for constants."""

    def behind(value: Any, *path: str) -> Any:
        plain = isinstance(value, bool) or value.keys() <= {"const", "enum", "type"}
        return value if plain else {"$ref": "/".join((where, *(quote(_escaped(name)) for name in path)))}

    outline: Schema = {}
    for name, value in schema.items():
        if name in ("properties", "patternProperties"):
            outline[name] = {key: behind(item, name, key) for key, item in value.items()}
        elif name in SEVERAL:
            outline[name] = [behind(item, name, str(i)) for i, item in enumerate(value)]
        elif name not in NAMED:
            outline[name] = behind(value, name) if name in ONE else value
    return outline


def _is_remark(name: str, value: Any, where: str) -> bool:
    if name == "x-guidance":
        return where == "#" and bool(value == SPACING)  # a schema that has been here before
    if name in REMARKS or name.startswith("x-"):
        return True
    if name == "$schema" or (name in ("$id", "id") and where == "#"):
        return isinstance(value, str)
    return name in NEUTRAL and value is NEUTRAL[name]


def _check_pairs(schema: Schema, where: str) -> None:
    for low, high in PAIRS:
        if low in schema and high in schema and schema[low] > schema[high]:
            raise SchemaError(where, f"{low} is more than {high}")


def _check_names(schema: Schema, where: str) -> None:
    required = set(schema.get("required", ()))
    if len(schema.get("properties", {}).keys() - required) > MAX_OPTIONAL:
        raise SchemaError(f"{where}/properties", f"at most {MAX_OPTIONAL} may be left out; put some in required")
    if (least := schema.get("minProperties", 0)) > max(len(required), 1):  # a name could come twice
        raise SchemaError(f"{where}/minProperties", f"{least} needs as many names in required")
