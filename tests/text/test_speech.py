"""What a model says is taken apart the same however it comes; calls are told exactly, and nothing else is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.text.calls import HERMES, LLAMA3, MAX_DEPTH, MISTRAL, CallFormat, CallReader
from headrace.text.reasoning import Thinking, ThinkReader
from headrace.text.speech import CallArguments, CallStart, Content, Piece, Plain, Reader, Reasoning

FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}
NAMES = ("get_weather", "f")
THINK = Thinking("<think>", "</think>")

Said = list[tuple[str, ...]]  # ("content", text), ("thinks", text), ("call", name, arguments)


def said(pieces: list[Piece]) -> Said:
    """Pieces as a reader of the answer sees them: neighbours of a kind are one."""
    out: Said = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == sum(part[0] == "call" for part in out)
            out.append(("call", piece.name, ""))
        elif isinstance(piece, CallArguments):
            kind, name, text = out[-1]
            assert (kind, piece.index) == ("call", sum(part[0] == "call" for part in out) - 1)
            out[-1] = ("call", name, text + piece.text)
        else:
            assert piece.text
            kind = "content" if isinstance(piece, Content) else "thinks"
            out.append((kind, (out.pop()[1] if out and out[-1][0] == kind else "") + piece.text))
    return out


def read(reader: Reader, *texts: str) -> Said:
    pieces = [piece for text in texts for piece in reader.push(text)]
    return said(pieces + reader.finish())


def calls(form: CallFormat, *texts: str, names: tuple[str, ...] = NAMES) -> Said:
    return read(CallReader(form, names), *texts)


def hermes(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


W = '{"city": "Oslo", "days": [1, -2.5e3, {"x": null}], "s": "a \\"b\\" \\u00e9 </tool_call>"}'
CASES: list[tuple[CallFormat, str, Said]] = [
    (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {W}}}\n</tool_call>', [("call", "f", W)]),
    (HERMES, f'<tool_call>{{"arguments": {W}, "name": "f"}}</tool_call>', [("call", "f", W)]),
    (HERMES, f'<tool_call>{{"id": [1, "}}"], "name": "f", "arguments": {W}, "type": "x"}}', [("call", "f", W)]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', [("call", "f", "{}")]),
    (HERMES, f"{hermes('f', {})}\n{hermes('f', {'a': 1})}\n", [("call", "f", "{}"), ("call", "f", '{"a": 1}')]),
    (
        HERMES,
        f"Let me see.\n\n{hermes('f', {})}\n between \n{hermes('f', {})}\n\nDone. ",
        [("content", "Let me see."), ("call", "f", "{}"), ("content", "between"), ("call", "f", "{}"),
         ("content", "Done. ")],
    ),
    # The golden answers of Qwen2.5-Coder, which leaves the marks out.
    (HERMES, '{"name": "f", "arguments": {"a": 1}}', [("call", "f", '{"a": 1}')]),
    (HERMES, '{"name": "f", "arguments": {}}\n{"temp": 3}', [("call", "f", "{}"), ("content", '\n{"temp": 3}')]),
    (HERMES, ' {"name": "f", "arguments": {}}\n{"name": "f", "arguments": {}}',
     [("call", "f", "{}"), ("call", "f", "{}")]),
    (HERMES, '```json\n{\n  "name": "f",\n  "arguments": {}\n}\n```\nThere.',
     [("call", "f", "{}"), ("content", "There.")]),
    (HERMES, '```json\n{"a": 1}\n```', [("content", '```json\n{"a": 1}\n```')]),
    (HERMES, "```json", [("content", "```json")]),
    # No calls.
    (HERMES, '{"name": "f"}', [("content", '{"name": "f"}')]),
    (HERMES, 'so: {"name": "f", "arguments": {}}', [("content", 'so: {"name": "f", "arguments": {}}')]),
    (HERMES, '{"name": "nobody", "arguments": {}}', [("content", '{"name": "nobody", "arguments": {}}')]),
    (HERMES, hermes("nobody", {"a": 1}), [("content", hermes("nobody", {"a": 1}))]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
     [("content", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>')]),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}', [("content", '<tool_call>{"name": 5, "arguments": {}}')]),
    (HERMES, "  \n<tool_call>\nf(1)\n</tool_call>", [("content", "  \n<tool_call>\nf(1)\n</tool_call>")]),
    (HERMES, '<tool_call>{"name": "f", "argum', [("content", '<tool_call>{"name": "f", "argum')]),
    (HERMES, "a <tool_", [("content", "a <tool_")]),
    # Whatever came before the next mark, that one counts.
    (HERMES, f"<tool_call>{{<tool_call>{hermes('f', {})}",
     [("content", "<tool_call>{<tool_call>"), ("call", "f", "{}")]),
    # A call that breaks off keeps what it has; what follows is content.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, tru', [("call", "f", '{"a": [1, tru')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 01}} x', [("call", "f", '{"a": 01'), ("content", "}} x")]),
    (HERMES, '{"name": "f", "arguments": {"a": "b\nc"}}', [("call", "f", '{"a": "b'), ("content", '\nc"}}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}',
     [("call", "f", "{}"), ("content", ', "arguments": {}}')]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": "1"}}', [("call", "f", '{"a": "1"}')]),
    (LLAMA3, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}',
     [("call", "f", "{}"), ("call", "f", "{}")]),
    (LLAMA3, '{"name": "f", "parameters": {}}; and', [("call", "f", "{}"), ("content", "; and")]),
    (LLAMA3, '<|python_tag|>print("x")', [("content", '<|python_tag|>print("x")')]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
     [("call", "f", '{"a": 1}'), ("call", "f", "{}")]),
    (MISTRAL, '[TOOL_CALLS] [ {"name": "f", "arguments": {}} , {"name": "g"}] x',
     [("call", "f", "{}"), ("content", ' , {"name": "g"}] x')]),
    (MISTRAL, 'Hi[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}',
     [("content", "Hi"), ("call", "f", '{"a": 1}'), ("call", "f", "{}")]),
    (MISTRAL, "[TOOL_CALLS]g[ARGS]{}", [("content", "[TOOL_CALLS]g[ARGS]{}")]),
    (MISTRAL, "[TOOL_CALLS][]", [("content", "[TOOL_CALLS][]")]),
    (MISTRAL, '{"name": "f", "arguments": {}}', [("content", '{"name": "f", "arguments": {}}')]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "wanted"), CASES, ids=range(len(CASES)))
def test_an_answer_and_its_calls(form: CallFormat, text: str, wanted: Said) -> None:
    assert calls(form, text) == wanted
    assert calls(form, *text) == wanted


FRAGMENTS = st.sampled_from([
    *HERMES.marks, *LLAMA3.marks, *MISTRAL.marks, "<think>", "</think>", "<tool_", "```json\n", "```",
    "[", "]", "{", "}", '"', ",", ":", ";",
    '"name"', '"arguments"', '"parameters"', '"get_weather"', '"f"', "get_weather", '{"name": "f", "arguments": {',
    '{"name": "f", "arguments": {}}', '{"a": 1}', '"a": ', "0", "-1.5e3", "true", "nul", "\\", "\\u12",
    " ", "\n", "word",
    hermes("f", {"a": "b"}), "é", "\U0001f600",
])  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join) | st.text(max_size=20)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), text=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=8))
@example(name="hermes", text=hermes("f", {"a": 1}) + "\nso </tool_", cuts=[12, 30, 40, 50])
def test_calls_do_not_depend_on_how_the_text_is_cut(name: str, text: str, cuts: list[int]) -> None:
    whole = calls(FORMATS[name], text)
    assert calls(FORMATS[name], *pieces_of(text, cuts)) == whole
    assert calls(FORMATS[name], *text) == whole
    if not any(part[0] == "call" for part in whole):
        assert "".join(part[1] for part in whole) == text


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, opened=st.booleans(), cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_reasoning_does_not_depend_on_how_the_text_is_cut(text: str, opened: bool, cuts: list[int]) -> None:
    def reader() -> ThinkReader:
        return ThinkReader(THINK, opened, CallReader(HERMES, NAMES))

    whole = read(reader(), text)
    assert read(reader(), *pieces_of(text, cuts)) == whole
    assert read(reader(), *text) == whole
    one, other = reader(), reader()
    read(one, text), read(other, *text)
    assert one.reasoned == other.reasoned <= len(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3)
WRITTEN = {
    "hermes": lambda made: "\n".join(
        f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' for text in made
    ),
    "llama3": lambda made: "; ".join(f'{{"name": "f", "parameters": {text}}}' for text in made),
    "mistral": lambda made: "[TOOL_CALLS][" + ", ".join(f'{{"name": "f", "arguments": {text}}}' for text in made) + "]",
}


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    arguments=st.lists(ARGUMENTS, min_size=1, max_size=3),
    ascii=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    cuts=st.lists(st.integers(0, 5000), max_size=8),
)
def test_every_well_written_call_is_read_as_it_was_written(
    name: str, arguments: list[Any], ascii: bool, indent: int | None, cuts: list[int]
) -> None:
    made = [json.dumps(each, ensure_ascii=ascii, indent=indent) for each in arguments]
    text = WRITTEN[name](made)
    assert calls(FORMATS[name], *pieces_of(text, cuts)) == [("call", "f", each) for each in made]


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.push('<tool_call>{"name": "f", "arguments": ') == []
    assert reader.push('{"a": "so') == [CallStart(0, "f"), CallArguments(0, '{"a": "so')]
    assert reader.push(" far") == [CallArguments(0, " far")]
    assert reader.push(' and on"') == [CallArguments(0, ' and on"')]


def test_arguments_nested_too_deep_end_the_call() -> None:
    deep = MAX_DEPTH + 10
    (_, _, text), (kind, rest) = calls(HERMES, hermes("f", {}).replace("{}", '{"a": ' + "[" * deep + "]" * deep + "}"))
    assert (kind, text.count("[") + rest.count("[")) == ("content", deep)


THOUGHTS: list[tuple[str, bool, Said]] = [
    ("<think>\nhm </thin </think>\n\nYes.\n", False, [("thinks", "hm </thin"), ("content", "Yes.\n")]),
    ("hm\n</think>\n\nYes.", True, [("thinks", "hm"), ("content", "Yes.")]),
    ("<think>hm</think>Yes.", True, [("thinks", "hm"), ("content", "Yes.")]),
    ("\n\n</think>Yes.", True, [("content", "Yes.")]),
    ("Yes.</think>", False, [("content", "Yes.</think>")]),
    (" <thin", False, [("content", " <thin")]),
    ("<think>hm", False, [("thinks", "hm")]),
    ("hm", True, [("thinks", "hm")]),
    ("<think></think>", False, []),
    ("<think>a</think>" + hermes("f", {}), False, [("thinks", "a"), ("call", "f", "{}")]),
    ("<think>" + hermes("f", {}) + "</think>no", False, [("thinks", hermes("f", {})), ("content", "no")]),
    ("Yes <think>no</think>", False, [("content", "Yes <think>no</think>")]),
]


@pytest.mark.parametrize(("text", "opened", "wanted"), THOUGHTS)
def test_reasoning_comes_apart(text: str, opened: bool, wanted: Said) -> None:
    for parts in ([text], list(text)):
        assert read(ThinkReader(THINK, opened, CallReader(HERMES, NAMES)), *parts) == wanted
    plain = read(ThinkReader(THINK, opened, Plain()), text)
    assert [part for part in plain if part[0] == "thinks"] == [part for part in wanted if part[0] == "thinks"]


def test_reasoning_says_where_it_ended() -> None:
    reader = ThinkReader(THINK, False, Plain())
    assert reader.push("<think>a b</think>\n\nc") == [Reasoning("a b"), Content("c")]
    assert reader.reasoned == len("<think>a b</think>")
