"""Detokenizing piece by piece equals decoding at once; stop strings are found whatever the cuts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcases import SPACE, scored

from headrace.base.errors import RequestError
from headrace.text import Detokenizer, StopStrings, Tokenizer

FIXTURES = ("smollm2", "qwen_coder", "gemma3")


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool, size: int = 1) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(ids[at : at + size]) for at in range(0, len(ids), size)), stream.finish()]


@pytest.mark.parametrize("name", FIXTURES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans(), size=st.integers(1, 3))
def test_pieces_join_to_the_whole(
    real: dict[str, Tokenizer], name: str, data: st.DataObject, skip: bool, size: int
) -> None:
    tokenizer = real[name]
    common = st.integers(0, 600)  # byte tokens and control tokens lie at the low ids
    ids = data.draw(st.lists(common | st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(pieces(tokenizer, ids, skip, size)) == tokenizer.decode(ids, skip)


def test_a_character_is_never_split(real: dict[str, Tokenizer]) -> None:
    tokenizer = real["smollm2"]
    ids = tokenizer.encode("a\U0001f33db", add_special_tokens=False)
    assert [piece for piece in pieces(tokenizer, ids, True) if piece] == ["a", "\U0001f33d", "b"]


def test_an_unfinished_character_ends_as_one_replacement(real: dict[str, Tokenizer]) -> None:
    tokenizer = real["smollm2"]
    ids = tokenizer.encode("\U0001f33d", add_special_tokens=False)
    for count in range(1, len(ids)):
        assert "".join(pieces(tokenizer, ids[:count], True)) == "\ufffd"


def test_the_prompt_never_comes_out(real: dict[str, Tokenizer]) -> None:
    tokenizer = real["smollm2"]
    corn = tokenizer.encode("\U0001f33d", add_special_tokens=False)
    prompt = tokenizer.encode("Good day ", add_special_tokens=False)
    for count in range(1, len(corn)):
        stream = Detokenizer(tokenizer, prompt_tail=[*prompt, *corn[:count]])
        assert stream.push(corn[count:]) == "\U0001f33d"
    stream = Detokenizer(tokenizer, prompt_tail=[*prompt, corn[0]])
    assert stream.push(tokenizer.encode("x", add_special_tokens=False)) == "\ufffdx"
    lone = Detokenizer(tokenizer, prompt_tail=[*prompt, corn[-1]])
    assert lone.push(prompt) == "Good day "


def test_sentencepiece_spaces() -> None:
    words = {SPACE: -9.0, **dict.fromkeys("leadingx", -9.0), SPACE + "leading": -1.0, SPACE + "x": -2.0}
    tokenizer = Tokenizer.from_gguf(scored(words))
    id_of = {tokenizer.token_text(i): i for i in range(tokenizer.vocab_size)}
    ids = [id_of[" "], id_of[" leading"], id_of[" x"]]
    assert pieces(tokenizer, ids, True) == ["", " leading", " x", ""]
    assert tokenizer.decode(ids) == " leading x"
    assert Detokenizer(tokenizer, prompt_tail=ids).push([id_of[" x"]]) == " x"


def test_detokenizing_is_linear(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox \U0001f98a. ", add_special_tokens=False) * 8000
    begin = time.perf_counter()
    stream = Detokenizer(tokenizer)
    for at in ids[:100_000]:
        stream.push((at,))
    assert time.perf_counter() - begin < 3.0


# --- stop strings -----------------------------------------------------------------------------------------------------


def oracle(text: str, stops: list[str], include: bool, min_chars: int) -> tuple[str, str | None]:
    """What is to be emitted: the earliest end over all stops, the longest of those that end together."""
    for end in range(min_chars + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(stream: StopStrings, parts: list[str]) -> tuple[str, str | None]:
    out = ""
    for part in parts:
        text, stop = stream.push(part)
        out += text
        if stop is not None:
            return out, stop
    return out + stream.finish(), None


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stops_equal_the_oracle_whatever_the_cuts(parts: list[str], stops: list[str], include: bool) -> None:
    assert run(StopStrings(stops, include), parts) == oracle("".join(parts), stops, include, 0)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.text("ab", max_size=3), max_size=8),
    stop=st.text("ab", min_size=1, max_size=3),
    min_chars=st.integers(0, 8),
)
def test_early_stops_do_not_count(parts: list[str], stop: str, min_chars: int) -> None:
    expected = oracle("".join(parts), [stop], True, min_chars)
    assert run(StopStrings([stop], include=True, min_chars=min_chars), parts) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text("abx", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_only_a_real_beginning_is_held_back(text: str, stops: list[str]) -> None:
    emitted, found = StopStrings(stops).push(text)
    held = text[len(emitted) :]
    if found is None and held:
        assert any(stop.startswith(held) and stop != held for stop in stops)


def test_no_character_of_a_stop_is_seen_and_a_near_miss_is_released() -> None:
    stream = StopStrings(["OPQR"])
    assert [stream.push(c) for c in "MNOPQR"] == [("M", None), ("N", None), *[("", None)] * 3, ("", "OPQR")]
    stream = StopStrings(["OPQR"])
    assert [stream.push(c)[0] for c in "OPQx"] == ["", "", "", "OPQx"]


def test_held_text_is_delivered_at_the_end() -> None:
    stream = StopStrings(["is it so"])
    assert stream.push("bas") == ("bas", None)
    assert stream.push("is") == ("", None)
    assert stream.finish() == "is"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError) as error:
        StopStrings(["a", ""])
    assert error.value.param == "stop"
