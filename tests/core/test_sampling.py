"""Each illegal value is refused by the name of its field; each legal edge passes."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import RequestError
from headrace.core.sampling import SamplingParams
from headrace.core.sequence import Sequence
from headrace.core.structured import StructuredOutputs

VOCAB = 1000
NAN = math.nan

REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 129, 10**6, 10**18, 1.0, True, "1", None],
    "presence_penalty": [-3, 3, NAN, math.inf, "1", True, None],
    "frequency_penalty": [-2.0001, 2.0001, NAN, -math.inf, [1]],
    "repetition_penalty": [0, -1, 1e-45, NAN, 1e308, math.inf, False],
    "temperature": [-1, -1e-9, NAN, math.inf, -math.inf, "0.7", True, None, [0.7], 10**400, "NaN"],
    "top_p": [0, -1, 1.0000001, NAN, True, "1"],
    "top_k": [-2, 1.5, 10**18, True, "5", None],
    "min_p": [-0.1, 1.5, NAN, None],
    "seed": [1.5, "1", True, 2**64, -(2**63) - 1],
    "stop": ["", [""], ["a", ""], 5, [5], [None], {"a": 1}, ["x"] * 20_000, "x" * 5000, "\ud83d", True],
    "stop_token_ids": [[10_000_000], [-1], [2**63], ["5"], [True], 5, [1.0], [VOCAB], [None], [1] * 5000],
    "ignore_eos": [1, None, "true"],
    "max_tokens": [-1, 2.5, "5", True, 10**30, NAN],
    "min_tokens": [-1, 1.5, True, None, 17],
    "logprobs": [-2, 21, -1, True, 1.5, "1"],
    "prompt_logprobs": [-2, 21, -1, True, 10**6],
    "detokenize": [0, None],
    "skip_special_tokens": ["no"],
    "spaces_between_special_tokens": [False, 1],
    "include_stop_str_in_output": [1],
    "logit_bias": [
        {10_000_000: -100}, {-1: 5}, {"abc": 1}, {5: "x"}, {5: NAN}, {5: 1000}, {5: -100.1}, {True: 1}, {5: True},
        {VOCAB: 1}, {1.0: 1}, [5], 5, dict.fromkeys(range(10**5), 1), {5: 10**400}, {5: None},
    ],
    "allowed_token_ids": [[], [VOCAB], [-1], ["1"], [True], 5, {1}],
    "bad_words": [[""], [5], "word", ["x"] * 5000, ["x" * 129], ["\udc00"]],
    "structured_outputs": [{"regex": "a"}, "a", True, StructuredOutputs()],
    "repetition_detection": [
        {}, 5, [], True, {"max_pattern_size": 2}, {"min_count": 2}, {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 33, "min_count": 2}, {"max_pattern_size": 2, "min_count": 2, "min_pattern_size": 3},
        {"max_pattern_size": 2, "min_count": 2, "more": 1}, {"max_pattern_size": NAN, "min_count": 2},
    ],
    "bad_token_ids": [[[]], [5], [[VOCAB]], [[-1]], [["a"]], [None], [[True]]],
    "shown_token_ids": [5, [VOCAB], [-1], ["a"], [True]],
}  # fmt: skip

LEGAL: dict[str, list[Any]] = {
    "n": [1, 128],
    "presence_penalty": [-2, 2, 0.5],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [0.5, 2, 1e-4],
    "temperature": [0, -0.0, 1e-3, 1e-4, 1e-5, 1e-6, 1e-30, 5e-324, 2, 2.0001, 1e308, 1],
    "top_p": [1, 1e-30, 5e-324],
    "top_k": [-1, 0, 1, VOCAB * 2],
    "min_p": [0, 1, 1.0],
    "seed": [None, 0, 2**64 - 1, -1],
    "stop": [None, "a", [], ["a", "\U0001f33d", "\n"], ("a",)],
    "stop_token_ids": [None, [], [0, VOCAB - 1]],
    "max_tokens": [None, 0, 1, 10**18],
    "min_tokens": [0, 16],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "logit_bias": [None, {}, {0: -100, VOCAB - 1: 100, 5: 0.5}],
    "allowed_token_ids": [None, [0], list(range(VOCAB))],
    "bad_words": [None, [], ["word"], ["x" * 128]],
    "repetition_detection": [None, {"max_pattern_size": 32, "min_count": 32, "min_pattern_size": None}],
    "bad_token_ids": [None, [], [[1], [2, 3]]],
    "structured_outputs": [None, StructuredOutputs(json={}), StructuredOutputs(choice=["a"])],
    "shown_token_ids": [None, [], [0, VOCAB - 1]],
}


def field_of(error: RequestError) -> str:
    """The field of a path such as ``stop[0]``."""
    assert error.param is not None
    return re.split(r"[.\[]", error.param)[0]


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(k, v, id=f"{k}-{i}") for k, values in table.items() for i, v in enumerate(values)]


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value}).validate(VOCAB)
    assert field_of(caught.value) == name
    assert name in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(("name", "value"), cases(LEGAL))
def test_legal_edges(name: str, value: Any) -> None:
    SamplingParams(**{name: value}).validate(VOCAB)


@given(st.sampled_from([f.name for f in fields(SamplingParams)]), st.data())
def test_any_value_is_legal_or_refused_by_its_name(name: str, data: st.DataObject) -> None:
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    value = data.draw(plain | st.lists(plain, max_size=3) | st.dictionaries(plain, plain, max_size=3)
                      | st.lists(st.lists(plain, max_size=2), max_size=2))  # fmt: skip
    try:
        SamplingParams(**{name: value}).validate(VOCAB)
    except RequestError as error:
        assert field_of(error) == name or (name, error.param) == ("max_tokens", "min_tokens")


def test_order_and_defaults_are_vllms() -> None:
    names = [f.name for f in fields(SamplingParams)]
    assert names[:9] == [
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "seed",
    ]  # fmt: skip
    p = SamplingParams()
    assert (p.temperature, p.top_p, p.top_k, p.max_tokens, p.logprobs) == (1.0, 1.0, 0, 16, None)
    p.validate()


def test_every_field_is_checked() -> None:
    assert set(REFUSED) == {f.name for f in fields(SamplingParams)}


def test_fields_that_contradict_each_other() -> None:
    contradictions = {
        "stop": SamplingParams(stop="a", detokenize=False),
        "min_tokens": SamplingParams(max_tokens=3, min_tokens=4),
        "allowed_token_ids": SamplingParams(allowed_token_ids=[5], bad_token_ids=[[5]]),
    }
    for name, params in contradictions.items():
        with pytest.raises(RequestError) as caught:
            params.validate(VOCAB)
        assert caught.value.param == name
    with pytest.raises(RequestError, match="leaves no token"):
        SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1).validate(VOCAB)
    SamplingParams(allowed_token_ids=[5], stop_token_ids=[5]).validate(VOCAB)
    SamplingParams(allowed_token_ids=[5], bad_token_ids=[[5, 5]]).validate(VOCAB)


def test_all_logprobs_only_where_allowed() -> None:
    SamplingParams(logprobs=-1, prompt_logprobs=500).validate(VOCAB, max_logprobs=-1)
    SamplingParams(logprobs=30).validate(VOCAB, max_logprobs=30)


def test_tiny_temperatures_are_greedy() -> None:
    assert [SamplingParams(temperature=t).greedy for t in (0, -0.0, 5e-324, 1e-6, 1e-4, 1)] == [True] * 4 + [False] * 2


def test_stop_strings_in_either_form() -> None:
    assert [SamplingParams(stop=s).stop_strings for s in (None, "ab", ["a", "b"])] == [(), ("ab",), ("a", "b")]


@given(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 4), st.integers(0, 4), st.integers(2, 4))
def test_repetition_is_what_it_says(said: list[int], most: int, least: int, count: int) -> None:
    asked = {"max_pattern_size": most, "min_pattern_size": min(least, most), "min_count": count}
    sequence = Sequence(0, "r", 0, SamplingParams(max_tokens=None, repetition_detection=asked), 0, [1, 1, 1])
    for number, token in enumerate(said, 1):
        sequence.tokens.append(token)
        sizes = [size for size in range(max(min(least, most), 1), most + 1) if size * count <= number]
        repeats = any(said[number - size * count : number] == said[number - size : number] * count for size in sizes)
        finish = sequence.ended_by(token)
        assert (finish is not None and finish.reason == "repetition") == repeats
