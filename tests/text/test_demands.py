"""What the grammar of a demand allows is what the readers read as that, and the template says in which dialect."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcases import byte_level

from headrace import StructuredOutputs
from headrace.text import ChatTemplate, Tokenizer
from headrace.text.calls import HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, CallFormat
from headrace.text.demands import Demand, demanded
from headrace.text.dialect import PLAIN, Dialect, dialect_of
from headrace.text.grammar import Constraint, Grammars, Vocabulary, embedded, source
from headrace.text.reasoning import Thinking
from headrace.text.speech import Spoken, gathered

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
TOKENIZER = Tokenizer.from_gguf(byte_level(("<|im_start|>", *MARKS, "<|im_end|>")))
GRAMMARS = Grammars(Vocabulary.of(TOKENIZER, TOKENIZER.vocab_size))
CONTROL = {token.text: token.id for _, _, token in TOKENIZER.control.find(" ".join(MARKS))}
CLOSING = {TOKENIZER.encode(c)[0] for c in '"]},'}
THINK = Thinking("<think>", "</think>")
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["C", "F"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "f": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
          "additionalProperties": False},
}  # fmt: skip
CALLS = [(name, embedded(schema, name)) for name, schema in SCHEMAS.items()]
FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED)}


def constraint(dialect: Dialect, demand: Demand, opened: bool = False) -> Constraint:
    wanted = StructuredOutputs(grammar=demanded(demand, dialect, opened))
    return GRAMMARS.compile(source(wanted), TOKENIZER.stop_ids)


def ids_of(text: str, control: Mapping[str, int]) -> list[int]:
    """The text's tokens; marks are control tokens where the dialect has them so."""
    found = [(start, end, token.id) for start, end, token in TOKENIZER.control.find(text) if token.text in control]
    ids, at = [], 0
    for start, end, id in [*found, (len(text), len(text), -1)]:
        ids += TOKENIZER.encode(text[at:start], parse_special=False) + ([id] if id >= 0 else [])
        at = end
    return ids


def follows(walked: Constraint, text: str, control: Mapping[str, int]) -> bool:
    return all(walked.accept(token) for token in ids_of(text, control)) and walked.complete


def walk(walked: Constraint, rng: random.Random) -> str:
    """A random text that is allowed, to its end."""
    taken: list[int] = []
    row = np.zeros(-(-TOKENIZER.vocab_size // 32), np.int32)
    while not walked.stopped:
        assert walked.mask(row) and len(taken) < 2000
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        closing = [id for id in ids if id in CLOSING]
        if walked.complete and rng.random() < 0.5:
            break
        ids = [id for id in ids if id not in TOKENIZER.stop_ids]
        taken.append(rng.choice(closing if closing and rng.random() < 0.5 else ids))
        assert walked.accept(taken[-1])
    return b"".join(map(TOKENIZER.token_bytes, taken)).decode("utf-8")


def read(dialect: Dialect, text: str, opened: bool = False) -> Spoken:
    reader = dialect.reader(SCHEMAS, opened=opened)
    return gathered(reader.push(text) + reader.finish())


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), marked=st.booleans(), parallel=st.booleans(), seed=st.integers(0, 10**6))
def test_demanded_calls_are_calls_and_follow_their_schemas(name: str, marked: bool, parallel: bool, seed: int) -> None:
    dialect = Dialect(FORMATS[name], control=CONTROL if marked else {})
    text = walk(constraint(dialect, Demand(CALLS, called=True, parallel=parallel)), random.Random(seed))
    said = read(dialect, text)
    assert not said.content and said.calls
    assert parallel or len(said.calls) == 1
    for call in said.calls.values():
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


C1, C2 = '{"name": "f", "arguments": {"n": 1}}', '{"name": "f", "arguments": {"n": 100}}'
H1, H2 = (f"<tool_call>\n{call}\n</tool_call>" for call in (C1, C2))
AUTO, ONE, STRICT = Demand(CALLS), Demand(CALLS, parallel=False), Demand(CALLS, strict=True)
FORM = Demand(CALLS, content=embedded({"type": "object", "properties": {"a": {"type": "null"}},
                                       "additionalProperties": False}, "form"))  # fmt: skip
ALLOWED: list[tuple[CallFormat | None, Demand, str, bool]] = [
    (HERMES, ONE, "hello", True),
    (HERMES, ONE, "", True),
    (HERMES, ONE, f"hello\n{H1}", True),
    (HERMES, ONE, f"hello\n{H1}\n{H1}", False),
    (HERMES, ONE, f"hello\n{H2}", False),
    (HERMES, ONE, '{"other": 1}', True),
    (HERMES, AUTO, f"hello\n{H1}\n{H1}", True),
    (HERMES, STRICT, f"hello\n{H1}", True),
    (HERMES, STRICT, "hello {", True),
    (HERMES, STRICT, C1, True),
    (HERMES, STRICT, C2, False),
    (HERMES, STRICT, f"\n {C2}{H1}", False),
    (HERMES, STRICT, f"```json\n{C2}\n```", False),
    (HERMES, FORM, '{"a": null}', True),
    (HERMES, FORM, H1, True),
    (HERMES, FORM, C1, True),
    (HERMES, FORM, "hello", False),
    (HERMES, FORM, C2, False),
    (LLAMA3, ONE, "hello", True),
    (LLAMA3, STRICT, C1.replace("arguments", "parameters"), True),
    (LLAMA3, STRICT, C2.replace("arguments", "parameters"), False),
    (MISTRAL, ONE, f"[TOOL_CALLS][{C1}]", True),
    (MISTRAL, ONE, f"[TOOL_CALLS][{C1}, {C1}]", False),
    (MISTRAL, STRICT, f"so[TOOL_CALLS][{C1}, {C1}]", True),
    (MISTRAL, STRICT, f"so[TOOL_CALLS][{C2}]", False),
    (MISTRAL_NAMED, STRICT, 'so[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]f[ARGS]{"n": 2}', True),
    (MISTRAL_NAMED, ONE, 'so[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]f[ARGS]{"n": 2}', False),
    (HERMES, Demand(uncalled=True), "hello {", True),
    (HERMES, Demand(uncalled=True), f"hello {H1}", False),
    (HERMES, Demand(uncalled=True), C1, False),
    (MISTRAL, Demand(uncalled=True), C1, True),
    (MISTRAL, Demand(uncalled=True), f"[TOOL_CALLS][{C1}]", False),
    (None, Demand(content=FORM.content), '{"a": null}', True),
]


@pytest.mark.parametrize("control", [{}, CONTROL], ids=["text", "control"])
@pytest.mark.parametrize(("form", "demand", "text", "allowed"), ALLOWED, ids=range(len(ALLOWED)))
def test_what_else_an_answer_may_be(
    form: CallFormat | None, demand: Demand, text: str, allowed: bool, control: dict[str, int]
) -> None:
    assert follows(constraint(Dialect(form, control=control), demand), text, control) == allowed


@pytest.mark.parametrize("control", [{}, CONTROL], ids=["text", "control"])
def test_reasoning_comes_before_what_is_demanded(control: dict[str, int]) -> None:
    dialect = Dialect(HERMES, THINK, control)
    for opened, text, allowed in (
        (True, f"hm {C2}</think>\n\n{H1}", True),
        (True, H1, False),
        (True, "hm</think>\n\nhello", False),
        (False, f"<think>hm</think>\n\n{H1}", True),
        (False, H1, True),
        (False, f"hm</think>{H1}", False),
    ):
        walked = constraint(dialect, Demand(CALLS, called=True), opened)
        assert follows(walked, text, control) == allowed, (opened, text)
        if allowed:
            said = read(dialect, text, opened)
            assert (said.content, [call.name for call in said.calls.values()]) == ("", ["f"])


def test_many_odd_tools_at_once() -> None:
    def tool(n: int, most: int) -> tuple[str, str]:
        texts = {"a": {"type": "string", "maxLength": most}, "b": {"type": "string", "pattern": "^[a-z]+$"}}
        return f"t{n}", embedded({"type": "object", "properties": {"in": {"type": "object", "properties": texts}}}, "x")

    calls = [tool(n, most) for n, most in enumerate([1999, 2000, 2001, 65536] * 8)]
    calls.append(("empty", embedded({"type": "object", "properties": {}}, "x")))
    demand = Demand(calls, called=True)
    for call in ('{"name": "empty", "arguments": {}}', '{"name": "t31", "arguments": {"in": {"a": "é", "b": "x"}}}'):
        text = f"<tool_call>\n{call}\n</tool_call>"
        assert follows(constraint(Dialect(HERMES), demand), text, {})
        assert not follows(constraint(Dialect(HERMES), demand), text.replace('"b": "x"', '"b": "X"') + "x", {})


SHOWS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}"
TEMPLATES: list[tuple[str, CallFormat | None, str | None]] = [
    (SHOWS + '<tool_call>{"name": n, "arguments": a}</tool_call>', HERMES, None),
    (SHOWS + "<tool_call><function=f><parameter=x></tool_call> arguments", None, None),
    (SHOWS + "[TOOL_CALLS]", MISTRAL, None),
    (SHOWS + "[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_NAMED, None),
    (SHOWS + '{"name": function name, "parameters": dictionary}', LLAMA3, None),
    (SHOWS + "{% if enable_thinking is defined %}<think></think>{% endif %}", None, "<think>"),
    ("{{ messages[0].content }}<tool_call> arguments", None, None),
    ("{{ messages[0].content }}", None, None),
]


@pytest.mark.parametrize(("template", "calls", "opens"), TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_template_says_its_dialect(template: str, calls: CallFormat | None, opens: str | None) -> None:
    dialect = dialect_of(ChatTemplate(template, TOKENIZER), TOKENIZER)
    assert dialect.calls == calls
    assert (dialect.thinking and dialect.thinking.open) == opens
    shown = {TOKENIZER.token_text(id) for id in dialect.shown(calls=True)}
    assert shown == {mark for mark in MARKS if mark in (*(calls.marks if calls else ()), *(dialect.thinking or ()))}
    assert ("enable_thinking" in dialect.variables) == (opens is not None)
    assert dialect_of(None, TOKENIZER) is PLAIN


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate("plain {{ messages[0].content }}", TOKENIZER, SHOWS + "[TOOL_CALLS]{{ documents }}")
    dialect = dialect_of(template, TOKENIZER)
    assert dialect.calls == MISTRAL and "documents" in dialect.variables
    hi, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}]
    assert template.render(hi).text == "plain hi"
    assert template.render(hi, tools=tools).text == json.dumps(tools[0]) + "hi[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nI see", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_whether_the_prompt_has_begun_to_think(prompt: str, opened: bool) -> None:
    for control in ({}, CONTROL):
        turns = {"<|im_start|>": 258, "<|im_end|>": 258 + 1 + len(MARKS)}
        assert Dialect(None, THINK, control).opened_by(ids_of(prompt, {**control, **turns}), TOKENIZER) == opened
