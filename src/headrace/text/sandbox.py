"""Jinja for chat templates that a model file brings along, and that are therefore not trusted.

Owes: the dialect that published chat templates use, and an end to every rendering: no value grows past `MAX_CHARS`,
no loop runs past `MAX_SECONDS`. Source: the chat template page of huggingface/transformers (dialect).
Does not know: messages, tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from time import monotonic
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.base.errors import RequestError

MAX_CHARS = 1 << 25
MAX_ITEMS = 1 << 20
MAX_SECONDS = 10.0
GUARD = "headrace_guard"  # the template variable that names the sentinel character
_TICK, _JOINED, _BOUNDED = "headrace_tick", "headrace_joined", "headrace_bounded"
_WIDE = re.compile(r"\d{7}")
_GROWING = ("center", "indent", "wordwrap", "format", "replace", "join", "batch", "slice")


class Runaway(RequestError):
    """A template that takes too much time or memory."""

    def __init__(self, what: str) -> None:
        super().__init__(f"The chat template {what}; use another template or shorter messages.", param="messages")


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads the class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bounded(value: Any) -> Any:
    """`value`, refused if it is too large."""
    if isinstance(value, str) and len(value) > MAX_CHARS:
        raise Runaway("makes a text that is too long")
    if isinstance(value, list | tuple) and len(value) > MAX_ITEMS:
        raise Runaway("makes a list that is too long")
    return value


def _joined(*values: Any) -> str:
    """What ``~`` does, bounded."""
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int, limit: int = MAX_CHARS) -> None:
    if size > limit:
        raise Runaway("makes a value that is too large")


def _check_call(name: str, args: tuple[Any, ...]) -> None:
    """Refuses calls of filters and methods whose result would be huge before it is made. args: the value first."""
    for arg in args:
        if isinstance(arg, int):
            _check_size(abs(arg))
    value, rest = (args[0], args[1:]) if args else ("", ())
    if name == "replace" and len(rest) >= 2 and all(isinstance(arg, str) for arg in (value, *rest[:2])):
        _check_size(len(value) + value.count(rest[0]) * len(rest[1]))
    if name in ("format", "format_map") and isinstance(value, str) and _WIDE.search(value):
        raise Runaway("formats to a width that is too large")
    if name == "join":
        parts, glue = (rest[0], value) if isinstance(value, str) and rest else (value, rest[0] if rest else "")
        if isinstance(parts, list | tuple):
            _check_size(sum(len(part) if isinstance(part, str) else 1 for part in parts) + len(str(glue)) * len(parts))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    own = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja2 hands such filters its context first

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_call(name, (*args[own:], *kwargs.values()))
        return _bounded(function(*args, **kwargs))

    return bounded


@jinja2.pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int):
        _check_size(indent, 64)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    guard = context.get(GUARD)
    return text.replace(json.dumps(guard)[1:-1], guard) if ensure_ascii and guard else text


def _raise(message: str) -> None:
    raise RequestError(str(message), param="messages")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Metered(NodeTransformer):
    """Puts a tick into every loop and macro, and bounds what ``~`` and block assignments make."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(_JOINED, node.nodes, node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, _BOUNDED, [], [], None, None, lineno=node.lineno)
        return node

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(_TICK, [], node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=line), args, [], None, None, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _OPERATORS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_call(getattr(method, "__name__", ""), (owner, *args, *kwargs.values()))
        return _bounded(super().call(__context, __obj, *args, **kwargs))


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        _check_size(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        _check_size(len(left) + len(right), MAX_ITEMS)


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str):
            _check_size(len(value) * times)
        elif isinstance(times, int) and isinstance(value, list | tuple):
            _check_size(len(value) * times, MAX_ITEMS)
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() + right.bit_length(), 1024)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() * right, 1024)


def _check_format(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _check_call("format", (left,))


_OPERATORS: Mapping[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "%": _check_format,
}


# What a template runs into when messages are not as it expects.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
)


class _Meter:
    """The time one rendering has left."""

    def __init__(self) -> None:
        self._end = monotonic() + MAX_SECONDS

    def tick(self) -> None:
        if monotonic() > self._end:
            raise Runaway(f"has not ended after {MAX_SECONDS:g} seconds")


def _environment() -> _Sandbox:
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    for name in _GROWING:
        sandbox.filters[name] = _bounded_filter(name, sandbox.filters[name])
    sandbox.filters |= {"tojson": _tojson, _BOUNDED: _bounded}
    sandbox.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now, _JOINED: _joined}
    return sandbox


class Program:
    """A compiled template. Raises ValueError for source that is not Jinja. May be shared between threads.

    variables: the names that it may read from what it is given.
    """

    def __init__(self, source: str) -> None:
        sandbox = _environment()
        try:
            tree = sandbox.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            tree = _Metered().visit(tree)
            tree.set_environment(sandbox)
            code = sandbox.compile(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(str(error)) from error
        self._template = jinja2.Template.from_code(sandbox, code, sandbox.make_globals(None))

    def run(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises RequestError: by the template itself, for a runaway, and for messages it cannot render."""
        meter = _Meter()
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(**variables, **{_TICK: meter.tick}):
                size += len(piece)
                _check_size(size)
                meter.tick()
                pieces.append(piece)
        except RequestError:
            raise
        except _FAILURES as error:
            reason = str(error) or type(error).__name__
            raise RequestError(f"The chat template cannot render these messages: {reason}", param="messages") from error
        return "".join(pieces)
