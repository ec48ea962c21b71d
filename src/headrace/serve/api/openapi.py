"""The documentation of the API: an OpenAPI 3.1 document, and a page that shows it without help from other hosts.

Owes: what the tables of fields and the shapes of answers say, and nothing besides; so there is nothing to keep in step.
Does not know: how requests are answered.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jinja2
import msgspec

from headrace.base.rules import Rule, Schema
from headrace.serve.api.fields import Bounds, Fields, body_schema
from headrace.serve.errors import ErrorAnswer
from headrace.serve.version import version

# One server-sent event, as tools read the schema of a stream before OpenAPI 3.2; `x-events`: what its data holds.
_EVENT: Schema = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_REFERENCE = "#/components/schemas/{name}"
_SAYS: Mapping[int, str] = {
    200: "Done.",
    400: "A field is wrong: error.param names it.",
    401: "No key, or an unknown one.",
    403: "Not for this key, or not from this origin.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON as it is.",
    429: "More requests wait than may: try again after Retry-After.",
    431: "The headers are too large.",
    500: "This request failed inside; others are not affected.",
    503: "The engine is not there, or the server is going.",
}
EVERYWHERE = (401, 403, 429, 431, 500, 503)  # statuses of every operation, for which keys or limits may be asked
OF_BODIES = (400, 404, 408, 413, 415)


@dataclass(frozen=True, slots=True)
class Operation:
    """What one route does. `answer` and `events` are shapes (msgspec types); events: of each server-sent one.

    body, required: the table of the body's fields, and those that must be there. query, path: rules of parameters.
    errors: statuses beside `EVERYWHERE` and, with a body, `OF_BODIES`; error: their shape.
    """

    summary: str
    body: Fields | None = None
    required: Sequence[str] = ()
    answer: Any = None
    events: Any = None
    media: str = "application/json"
    query: Mapping[str, Rule] = field(default_factory=dict)
    path: Mapping[str, Rule] = field(default_factory=dict)
    errors: Sequence[int] = ()
    error: Any = ErrorAnswer

    def statuses(self) -> list[int]:
        """Of errors."""
        return sorted({*EVERYWHERE, *self.errors, *(OF_BODIES if self.body is not None else ())})

    def shapes(self) -> list[Any]:
        """Types for which the document needs schemas."""
        return [shape for shape in (self.answer, self.events, self.error) if shape is not None]


Operations = Sequence[tuple[str, str, Operation]]  # method, path, what it does


def document(operations: Operations, bounds: Bounds) -> dict[str, Any]:
    """The OpenAPI document of these operations, for one served model."""
    shapes = list(dict.fromkeys(shape for _, _, operation in operations for shape in operation.shapes()))
    schemas, components = msgspec.json.schema_components(shapes, ref_template=_REFERENCE)
    of_shape = dict(zip(shapes, schemas, strict=True))
    paths: dict[str, Any] = {}
    for method, path, operation in operations:
        paths.setdefault(path, {})[method.lower()] = _operation(operation, bounds, of_shape)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version(),
            "description": "OpenAI's API, Anthropic's messages, and extensions of them."
            " Fields that are not listed are refused by name; null equals absent.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _operation(operation: Operation, bounds: Bounds, of_shape: Mapping[Any, Schema]) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": of_shape.get(operation.answer, {"type": "string"})}}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": _EVENT, "x-events": of_shape[operation.events]}
    answers: dict[str, Any] = {"200": {"description": _SAYS[200], "content": content}}
    for status in operation.statuses():
        errors = {"application/json": {"schema": of_shape[operation.error]}}
        answers[str(status)] = {"description": _SAYS[status], "content": errors}
    out: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if operation.query or operation.path:
        out["parameters"] = [
            *(_parameter(name, "query", rule) for name, rule in operation.query.items()),
            *(_parameter(name, "path", rule) for name, rule in operation.path.items()),
        ]
    if operation.body is not None:
        schema = body_schema(operation.body, bounds, operation.required)
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return out


def _parameter(name: str, place: str, rule: Rule) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": rule.schema, "description": rule.wanted}


_FILES = resources.files(__package__)


@functools.cache
def _style() -> str:
    return (_FILES / "docs.css").read_text("utf-8")


def page(document: Mapping[str, Any]) -> str:
    """The document for people, in HTML."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((_FILES / "docs.html").read_text("utf-8")).render(**document, style=_style())


def page_policy() -> str:
    """The page's content-security-policy: its own style, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
