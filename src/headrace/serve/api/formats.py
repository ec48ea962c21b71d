"""What clients ask of an answer's form: `response_format`, `structured_outputs`, and the older `guided_*`.

Owes: one `StructuredOutputs` from whichever was given, and the names under which errors about it are told. Does not
know: grammars. Source: OpenAI's API reference; vLLM's `structured_outputs` and, before it, guided_json and the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace.base.errors import RequestError
from headrace.base.rules import Rule, flag, matching, one_of, open_object, record, tagged, text
from headrace.core.structured import FIELD, KINDS, StructuredOutputs, structured

Names = tuple[tuple[str, str], ...]  # beginnings of paths: the sampler's, the client's

_SCHEMA = record(
    {
        "name": matching("[a-zA-Z0-9_-]{1,64}", "1 to 64 of the characters a-zA-Z0-9_-"),
        "description": text(),
        "schema": open_object("a JSON schema"),
        "strict": flag,
    },
    ("schema",),
)
RESPONSE_FORMAT: Final = tagged(
    "type",
    {
        "text": record({"type": one_of("text")}),
        "json_object": record({"type": one_of("json_object")}),
        "json_schema": record({"type": one_of("json_schema"), "json_schema": _SCHEMA}, ("json_schema",)),
    },
)

_GUIDED: Final = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}

FORMATS: Final[Mapping[str, tuple[Rule, str]]] = {
    "response_format": (
        RESPONSE_FORMAT,
        "text, any JSON object, or JSON that follows a schema, strict or not. The answer is on one line, with a space "
        "after each comma and colon; keywords that cannot be enforced are refused.",
    ),
    FIELD: (structured, "One of json (a schema), regex, choice, grammar (Lark), json_object: for the whole answer."),
} | {name: (KINDS[kind], f"The older name of {FIELD}.{kind}.") for name, kind in _GUIDED.items()}
"""Field: what it may be, and what it does."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the answer must look like, if anything was said; names: how the client calls it."""

    wanted: StructuredOutputs | None = None
    names: Names = ()


def form_of(given: Mapping[str, Any]) -> Form:
    """From the fields of a request that has been checked; RequestError if two of them say something."""
    forms = [_form(name, given[name]) for name in FORMATS if name in given]
    forms = [form for form in forms if form.wanted is not None]
    if len(forms) > 1:
        first, second = forms[0].names[0][1].split(".")[0], forms[1].names[0][1].split(".")[0]
        raise RequestError(f"{second} and {first} both say what the answer looks like: give one.", param=second)
    return forms[0] if forms else Form()


def _form(name: str, value: Any) -> Form:
    if name == FIELD:
        kinds = {kind: part for kind, part in value.items() if part is not None}
        return Form(StructuredOutputs(**kinds), ((FIELD, FIELD),))
    if name in _GUIDED:
        kind = _GUIDED[name]
        return Form(StructuredOutputs(**{kind: value}), ((f"{FIELD}.{kind}", name),))
    if value["type"] == "json_object":
        return Form(StructuredOutputs(json_object=True), ((f"{FIELD}.json_object", name),))
    if value["type"] == "json_schema":
        schema = value["json_schema"]["schema"]
        return Form(StructuredOutputs(json=schema), ((f"{FIELD}.json", f"{name}.json_schema.schema"),))
    return Form()
