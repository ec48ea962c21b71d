"""Grammars: what is wanted becomes masks whose every walk is right, and what cannot be enforced is refused by name."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st
from textcases import byte_level

from headrace import RequestError, StructuredOutputs
from headrace.text import Tokenizer
from headrace.text.grammar import Constraint, Grammars, Vocabulary, embedded, source

TOKENIZER = Tokenizer.from_gguf(
    byte_level(("<|im_start|>", "<|end|>", "<|im_end|>"), **{"tokenizer.ggml.eot_token_id": 259})
)
SIZE = TOKENIZER.vocab_size
ENDS = TOKENIZER.stop_ids
GRAMMARS = Grammars(Vocabulary.of(TOKENIZER, SIZE))
CLOSING = [TOKENIZER.encode(c)[0] for c in '"]},']


def compiled(grammars: Grammars = GRAMMARS, ends: frozenset[int] = ENDS, **wanted: Any) -> Constraint:
    return grammars.compile(source(StructuredOutputs(**wanted)), ends)


def allowed(constraint: Constraint) -> list[int]:
    row = np.zeros(-(-SIZE // 32), np.int32)
    assert constraint.mask(row), constraint.error
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[SIZE:].any()
    return np.flatnonzero(bits).tolist()


def walk(constraint: Constraint, rng: random.Random, most: int = 400) -> str | None:
    """A random text that the masks allow, to its end; None if it has not come after `most` tokens."""
    taken: list[int] = []
    while not constraint.stopped:
        ids = allowed(constraint)
        assert ids, "a dead end"
        assert set(ids) >= ENDS if constraint.complete else not set(ids) & ENDS
        if len(taken) >= most:
            return None
        closing = [i for i in ids if i in CLOSING]
        token = rng.choice(closing if closing and rng.random() < 0.4 else ids)
        if token in ENDS:
            break
        assert token not in TOKENIZER.special_ids
        assert constraint.accept(token)
        taken.append(token)
    assert constraint.complete
    return b"".join(map(TOKENIZER.token_bytes, taken)).decode("utf-8")


def follows(constraint: Constraint, text: str) -> bool:
    """Whether the grammar takes exactly this text."""
    return all(constraint.accept(token) for token in TOKENIZER.encode(text)) and constraint.complete


def refused(**wanted: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        compiled(**wanted)
    assert caught.value.param and caught.value.param.startswith("structured_outputs")
    return caught.value


# -- schemas

NAMES = st.sampled_from(["a", "b", 'q"uote', "new\nline", "é", "日本", "back\\slash", "", "$ref", "a/b~c"])
SCALARS = st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(NAMES, v, max_size=3), max_leaves=4)


def counts(low: str, high: str, most: int) -> st.SearchStrategy[dict[str, int]]:
    return st.lists(st.integers(0, most), min_size=2, max_size=2).map(lambda x: {low: min(x), high: max(x)})


LEAVES = st.one_of(
    st.just({}),
    st.sampled_from([{"type": t} for t in ("null", "boolean", "integer", "number", "string", "object", "array")]),
    VALUES.map(lambda v: {"const": v}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda v: {"enum": v}),
    counts("minimum", "maximum", 300).map(lambda x: {"type": "integer", **x} | {"minimum": x["minimum"] - 99}),
    counts("minimum", "maximum", 9).map(lambda x: {"type": "number", **x}),
    counts("exclusiveMinimum", "exclusiveMaximum", 9).map(
        lambda x: {"type": "number", "exclusiveMinimum": x["exclusiveMinimum"] - 0.5} | {"exclusiveMaximum": 9.25}
    ),
    st.integers(2, 7).map(lambda x: {"type": "integer", "multipleOf": x, "minimum": 0, "maximum": 1000}),
    counts("minLength", "maxLength", 5).map(lambda x: {"type": "string", **x}),
    st.sampled_from(["^[a-z]*$", "b", "^x|y$", '[^"]{2}', "^\\d+$"]).map(
        lambda p: {"type": "string", "pattern": p, "maxLength": 6}
    ),
    st.sampled_from(["date", "uuid", "ipv4", "ipv6", "email"]).map(lambda f: {"type": "string", "format": f}),
)  # fmt: skip


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    inner = inner | st.booleans()
    return st.one_of(
        st.tuples(inner, counts("minItems", "maxItems", 3)).map(lambda x: {"type": "array", "items": x[0], **x[1]}),
        st.lists(inner, min_size=1, max_size=2).map(lambda x: {"type": "array", "prefixItems": x, "items": False}),
        st.lists(inner, min_size=1, max_size=3).map(lambda x: {"anyOf": x}),
        st.lists(inner, min_size=1, max_size=2).map(lambda x: {"allOf": x}),
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.data(), inner),
        inner.map(lambda x: {"type": "object", "additionalProperties": x, "maxProperties": 2}),
        inner.map(lambda x: {"type": "object", "patternProperties": {"^[a-c]$": x}, "additionalProperties": False}),
    )


def _object(properties: dict[str, Any], data: Any, other: Any) -> dict[str, Any]:
    required = [name for i, name in enumerate(properties) if i % 2]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": other}


SCHEMAS = st.recursive(LEAVES, deeper, max_leaves=6).filter(lambda s: isinstance(s, dict))


# What llguidance says of a schema that no value fits, and of what it cannot intersect.
UNSUPPORTED = ("Unsatisfiable", "no text fits", "supported")


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 2**32))
def test_every_walk_through_a_schema_gives_a_value_that_a_validator_accepts(schema: dict[str, Any], seed: int) -> None:
    try:
        constraint = compiled(json=schema)
    except RequestError as error:
        event(str(error)[:90])
        assert any(known in str(error) for known in UNSUPPORTED), error
        reject()
    text = walk(constraint, random.Random(seed))
    if text is not None:
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        checker.validate(json.loads(text))


NODE = {
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/color"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
    "$defs": {"color": {"enum": ["red", 'gr"een', "bl\nue", "grün", None]}},
}


def test_references_and_recursion_hold() -> None:
    texts = [walk(compiled(json=NODE), random.Random(seed)) for seed in range(40)]
    for text in filter(None, texts):
        jsonschema.validate(json.loads(text), NODE)
    assert sum(text is not None for text in texts) > 20
    assert follows(compiled(json=NODE), '{"value": "grün", "next": {"value": null, "next": null}}')
    assert not follows(compiled(json=NODE), '{"value": "blue", "next": null}')


def test_one_of_several_looks_behind_references() -> None:
    """What pydantic makes of a union with a discriminator."""
    odd = 'é x%/~1"\n'
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}, odd: {"$ref": "#/$defs/size"}}}
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}, "friend": {"$ref": "#"}}}
    tag: dict[str, Any] = {"required": ["kind"], "additionalProperties": False}
    schema = {
        "$defs": {"cat": cat | tag, "dog": dog | tag, "size": {"type": "integer", "maximum": 9}},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
    }
    value = {"kind": "dog", "friend": {"kind": "cat", odd: 3}}
    jsonschema.validate(value, schema)
    assert follows(compiled(json=schema), json.dumps(value, ensure_ascii=False))
    assert not follows(compiled(json=schema), json.dumps({"kind": "cat", odd: 10}, ensure_ascii=False))
    for seed in range(20):
        if text := walk(compiled(json=schema), random.Random(seed)):
            jsonschema.validate(json.loads(text), schema)


def test_one_of_several_that_may_overlap_is_refused() -> None:
    assert "oneOf" in str(refused(json={"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}))


def test_there_is_one_way_to_space_a_value() -> None:
    assert follows(compiled(json={}), json.dumps({"a": [1, {"b": 2}]}))
    assert not any(follows(compiled(json={}), text) for text in ('{"a":1}', '{"a": 1\n}', ' {"a": 1}', '{"a": 1} '))


def test_json_object_is_an_object_and_an_empty_schema_is_any_value() -> None:
    for text in ("[1]", "1", '"x"', "null"):
        assert follows(compiled(json={}), text)
        assert not follows(compiled(json_object=True), text)
    assert follows(compiled(json_object=True), '{"a": {}}')


def test_a_schema_may_be_text_and_what_only_describes_changes_nothing() -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "x-order": 1, "type": "integer"}
    assert source(StructuredOutputs(json=json.dumps(schema))) == source(StructuredOutputs(json={"type": "integer"}))


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "strng"}, "#/type"),
        ({"abc": "def"}, '#/abc: the keyword "abc"'),
        ({"properties": {"a": {"not": {}}}}, '#/properties/a/not: the keyword "not"'),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems"),
        ({"type": "string", "nullable": True}, "#/nullable"),
        ({"$ref": "#/nope"}, "#/$ref"),
        ({"$ref": "https://example.com/schema"}, "#/$ref"),
        ({"$ref": "#/default", "default": {"type": "integer"}}, "#/$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "back to itself"),
        ({"enum": []}, "#/enum"),
        ({"const": 2**53 + 1}, "#/const"),
        ({"const": {"a": [-(2**60)]}}, "#/const"),
        ({"enum": [1, 12345678901234567890123]}, "#/enum"),
        ('{"const": 1e400}', "#/const"),
        ({"minLength": 5, "maxLength": 2}, "minLength is more than maxLength"),
        ({"maxLength": "3"}, "#/maxLength"),
        ({"maxLength": 2.5}, "#/maxLength"),
        ({"maxItems": -1}, "#/maxItems"),
        ({"maxItems": 10**9}, "#/maxItems"),
        ({"minimum": 1e300}, "#/minimum"),
        ({"multipleOf": 0}, "#/multipleOf"),
        ({"required": "a"}, "#/required"),
        ({"properties": []}, "#/properties"),
        ({"properties": {"a": 1}}, "#/properties/a"),
        ({"anyOf": []}, "#/anyOf"),
        ({"items": [{}]}, "#/items"),
        ({"format": "credit-card"}, "#/format"),
        ({"type": "object", "minProperties": 2}, "#/minProperties"),
        ({"x-guidance": {"whitespace_flexible": True}}, "x-guidance"),
        ({"type": "string", "pattern": "["}, "unclosed character class"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "atisf"),
        ({"properties": {f"p{i}": {} for i in range(401)}}, "#/properties: at most 400"),
        ({"enum": ["x" * (1 << 18)]}, "at most 262144 characters"),
        ("[]", "not a list"),
        ('{"a"', "no JSON"),
        ('{"minimum": NaN}', "NaN"),
        ("[" * 5000, "deep"),
        ('{"const": "\\ud83d"}', ""),
    ],
)  # fmt: skip
def test_what_a_schema_cannot_have_is_refused_with_its_place(schema: Any, where: str) -> None:
    error = refused(json=schema)
    assert where in str(error) and len(str(error)) < 600
    assert walk(compiled(json={"type": "boolean"}), random.Random(1)) in ("true", "false")


def test_schemas_nested_too_deep_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(61):
        schema = {"items": schema}
    assert "nested" in str(refused(json=schema))


@pytest.mark.parametrize("bound", [0, 1, 1999, 2000, 2001, 65536, 1 << 20])
def test_large_bounds_compile(bound: int) -> None:
    """llama.cpp #25923: one odd bound made the whole grammar unusable."""
    assert follows(compiled(json={"type": "string", "maxLength": bound}), '""')
    assert follows(compiled(json={"type": "array", "maxItems": bound}), "[]")
    assert follows(compiled(json={"type": "object", "properties": {}}), "{}")


# -- other kinds


def test_exactly_one_kind_is_wanted_of_its_type_and_of_bearable_size() -> None:
    for wanted in (
        {}, {"regex": "a", "choice": ["a"]}, {"json": 3}, {"json": ""}, {"json": []}, {"regex": ""}, {"regex": 1},
        {"regex": "a\0"}, {"regex": "\ud83d"}, {"regex": "a" * 20000}, {"choice": []}, {"choice": [""]},
        {"choice": ["a", 1]}, {"choice": "abc"}, {"choice": ["a"] * 5000}, {"choice": ["a" * 4096] * 40},
        {"grammar": ""}, {"json_object": False},
    ):  # fmt: skip
        refused(**wanted)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.text(min_size=1, max_size=12).filter(lambda t: "\0" not in t), min_size=1, max_size=6), st.integers()
)
def test_a_walk_through_choices_gives_one_of_them(choices: list[str], seed: int) -> None:
    assert walk(compiled(choice=choices), random.Random(seed)) in choices
    assert all(follows(compiled(choice=choices), choice) for choice in choices)


@pytest.mark.parametrize("pattern", ["[a-c]{2,5}", "(ab)+|c", "[0-9]{4}-[0-9]{2}", "[^a]b?", "héllo|wörld"])
def test_a_walk_through_a_regular_expression_matches_it(pattern: str) -> None:
    texts = [walk(compiled(regex=pattern), random.Random(seed)) for seed in range(20)]
    assert all(re.fullmatch(pattern, text) for text in texts if text is not None) and any(texts)


@pytest.mark.parametrize("pattern", ["(", "a{3,1}", "(?<=a)b", "a(?!b)", "(a)\\1", "[", "*a"])
def test_a_wrong_regular_expression_is_refused(pattern: str) -> None:
    refused(regex=pattern)


def test_a_grammar_may_hold_schemas_and_special_tokens() -> None:
    part = embedded({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "tools[0]")
    wanted = f'start: <|im_start|> "call: " args // %json here is no schema\nargs: {part}'
    constraint = compiled(grammar=wanted)
    assert allowed(constraint) == [258]
    assert constraint.accept(258) and follows(constraint, 'call: {"a": 12}')
    assert follows(compiled(grammar='start: "::=" // GBNF has ::='), "::=")
    numbered = compiled(grammar='start: <[258]> "x"')
    assert allowed(numbered) == [258]


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "a', "lexer error"),
        ("start: nothing", "unknown name"),
        ("start: <|nope|>", "unknown special token"),
        ("start: <[99999]>", "too large"),
        ('start: "a"{2,1}', "range end"),
        ("start: start", ""),
        ("start: A\nA: B\nB: A", "circular"),
        ("start[temperature=0.3]: /a/", "temperature"),
        ('start: %json {"type": "integer", "foo": 1}', '#/foo: the keyword "foo"'),
        ("start: %json {", "no JSON"),
        ('root ::= "a"', "Lark"),
    ],
)
def test_a_wrong_grammar_is_refused(grammar: str, why: str) -> None:
    assert why in str(refused(grammar=grammar))


# -- ends


def test_no_end_comes_before_the_grammar_is_complete_and_all_ends_after() -> None:
    ends = ENDS | {TOKENIZER.encode("b")[0]}  # "b" is one that the request added
    constraint = compiled(ends=ends, regex="a[a-c]{1,3}")
    seen = []
    for token in TOKENIZER.encode("aac"):
        seen.append(set(allowed(constraint)) & ends)
        assert constraint.accept(token)
    assert seen == [set(), {TOKENIZER.encode("b")[0]}, ends]  # "ab" is complete with its last token


def test_an_end_whose_text_looks_like_plain_characters_is_in_no_string() -> None:
    plain = Tokenizer.from_gguf(byte_level(("<|im_start|>", "hello"), **{"tokenizer.ggml.token_type": [1] * 260}))
    assert plain.stop_ids == {259}
    constraint = compiled(Grammars(Vocabulary.of(plain, 260)), plain.stop_ids, json={"type": "string"})
    assert constraint.accept(plain.encode('"')[0])
    row = np.zeros(9, np.int32)
    assert constraint.mask(row) and not row[259 >> 5] >> (259 & 31) & 1


def test_a_named_end_comes_only_where_it_completes_the_grammar() -> None:
    end = max(ENDS)
    constraint = compiled(grammar=f'start: "x" <[{end}]>')
    assert constraint.accept(TOKENIZER.encode("x")[0]) and allowed(constraint) == [end]
    never = compiled(grammar=f'start: "x" <[{end}]> "y"')
    assert never.accept(TOKENIZER.encode("x")[0]) and allowed(never) == []


# -- bounds, copies, drafts


HOSTILE = [
    "a{0,1000000}", "((a{0,100}){0,100}){0,100}", "(a+)+b", "(a|a)*b", "[a-z]{50}.*[a-z]{50}", "x{100000}",
    "(.*a){30}", "(.*[a-f].{20}){10}", "(a|b)*a(a|b){25}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_hostile_pattern_is_refused_or_meets_a_limit_or_works(pattern: str) -> None:
    rng = random.Random(1)
    try:
        constraint = compiled(regex=pattern)
    except RequestError:
        return
    row = np.zeros(-(-SIZE // 32), np.int32)
    for _ in range(50):
        if not constraint.mask(row):
            assert constraint.error and not constraint.stopped
            return
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        token = rng.choice(ids)
        if token in ENDS:
            return
        assert constraint.accept(token)


def test_what_is_kept_of_grammars_is_bounded() -> None:
    few = Grammars(Vocabulary.of(TOKENIZER, SIZE), most=5, most_bytes=100)
    for i in range(30):
        compiled(few, regex=f"a{{{i}}}b")
    assert len(few) == 5
    compiled(few, regex="a" * 90)
    assert len(few) <= 2
    compiled(few, regex="a" * 200)
    assert len(few) == 0


def test_the_small_vocabulary_refuses_what_the_whole_one_refuses() -> None:
    many = Tokenizer.from_gguf(byte_level(tuple(f"<|t{i}|>" for i in range(2000))))
    small = Vocabulary.small(many, many.vocab_size)
    assert len(small.data) < len(Vocabulary.of(many, many.vocab_size).data) + 2000
    grammars = Grammars(small)
    compiled(grammars, grammar='start: <|t7|> "x" <[300]>')
    with pytest.raises(RequestError, match="special token"):
        compiled(grammars, grammar="start: <|t2000|>")


def test_copies_go_their_own_ways_and_drafts_can_be_checked() -> None:
    first = compiled(regex="ab*c")
    a, b, c = (TOKENIZER.encode(text)[0] for text in "abc")
    assert first.accept(a)
    second = first.copy()
    assert second.accept(c) and second.stopped and not first.stopped
    assert first.valid([b, b, a]) == 2
    assert first.accept(b) and first.accept(c) and first.stopped
