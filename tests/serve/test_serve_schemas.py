"""The documented schema of each field agrees with what is accepted: neither is wider than the other."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from headrace.base.errors import RequestError
from headrace.serve.api.fields import CHAT, COMPLETION, Bounds, Fields, check_fields
from headrace.serve.api.messages import MESSAGES
from headrace.serve.api.responses import RESPONSES
from headrace.serve.api.tokenizing import DETOKENIZE, TOKENIZE

BOUNDS = Bounds(vocab_size=320, max_logprobs=20, max_model_len=64, reads=frozenset({"documents"}))
TABLES: dict[str, Fields] = {
    "chat": CHAT, "completion": COMPLETION, "tokenize": TOKENIZE, "detokenize": DETOKENIZE,
    "response": RESPONSES, "message": MESSAGES,
}  # fmt: skip
NAMES = sorted({(table, name) for table, fields in TABLES.items() for name in fields})
# Checked elsewhere: messages where they are rendered; forms of answers where their grammars are made, tools with them.
ELSEWHERE = {"messages", "response_format", "structured_outputs", "tools", "tool_choice"}

NUMBERS = [0, 1, -1, 2, 19, 20, 21, 128, 129, 319, 320, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, -(2**31), -(2**63)]
FLOATS = [0.5, -0.5, 1.5, 2.0001, 1e-30, 1e-5, 1e308, -1e308, 1e-4, 5e-324, 99.5, 100.5]
SMALL: list[Any] = [
    None, True, False, *NUMBERS, *FLOATS, "", "a", "auto", "left", "x" * 513, "x" * 4097, "A1.b:c_-", "a b", "none",
    "24h", [], ["a"], [""], [5], [-1], [320], [[1]], [[]], ["a"] * 33, ["a" * 129], ["a" * 1025], [None],
    [True], ["text"], [{}], {}, {"a": 1}, {"5": 1}, {"5": 101}, {"05": 1}, {"-5": 1}, {"5": None},
    {"include_usage": True},
    {"include_usage": None}, {"include_usage": 1}, {"include_obfuscation": True}, {"type": "text"},
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def refusal(table: str, name: str, value: Any) -> RequestError | None:
    fields = TABLES[table]
    body = {name: value}
    if (needs := fields[name].needs) is not None and value is not None:
        body[needs[0]] = 5 if needs[1] is None else needs[1]
    try:
        check_fields(body, fields, BOUNDS)
    except RequestError as error:
        return error
    return None


def whole_floats(value: Any) -> bool:
    """Whether 1.0 is in there, an integer to JSON Schema, or a line's end, which its patterns see differently."""
    if isinstance(value, str):
        return value.endswith("\n")
    if isinstance(value, dict):
        return any(map(whole_floats, value)) or any(map(whole_floats, value.values()))
    return any(map(whole_floats, value)) if isinstance(value, list) else isinstance(value, float) and value.is_integer()


def check(table: str, name: str, value: Any) -> None:
    error = refusal(table, name, value)
    if error is not None:
        assert error.param is not None and re.split(r"[.\[]", error.param)[0] == name, (value, error)
        assert str(error).startswith(name) and str(error).isprintable() and len(str(error)) < 600
    if name not in ELSEWHERE and not whole_floats(value):
        valid = Draft202012Validator(dict(TABLES[table][name].schema(BOUNDS))).is_valid(value)
        assert valid == (error is None), (name, value, str(error))


@pytest.mark.parametrize(("table", "name"), NAMES, ids=str)
def test_values_at_the_edges(table: str, name: str) -> None:
    for value in SMALL:
        check(table, name, value)


@settings(max_examples=400, deadline=None)
@given(field=st.sampled_from(NAMES), value=VALUES)
def test_any_value(field: tuple[str, str], value: Any) -> None:
    check(*field, value)


@pytest.mark.parametrize(("table", "name"), NAMES, ids=str)
def test_what_json_cannot_say_is_refused_as_well(table: str, name: str) -> None:
    for value in (math.nan, math.inf, -math.inf, "\ud83d", ["\udc00"], object(), b"x", {"\ud83d": 1}):
        error = refusal(table, name, value)
        if error is not None:
            assert str(error).isascii()


@pytest.mark.parametrize("table", TABLES)
def test_a_default_that_is_told_is_legal(table: str) -> None:
    told = {name: field.default for name, field in TABLES[table].items() if field.default is not None}
    assert check_fields(told, TABLES[table], BOUNDS) == told
