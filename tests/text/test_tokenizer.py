"""Ids equal the reference's; bytes are the tokens' own; hostile metadata and text are refused."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from textcases import SPACE, byte_level, golden, scored

from headrace.base.errors import BadModelFile, RequestError
from headrace.text import Tokenizer

FIXTURES = ("smollm2", "qwen_coder", "gemma3")
STOPS = {"smollm2": {0, 2}, "qwen_coder": {151643, 151645}, "gemma3": {1, 106}}
SIZES = {"smollm2": 49152, "qwen_coder": 151665, "gemma3": 262144}


@pytest.mark.parametrize("name", FIXTURES)
def test_ids_equal_the_reference(real: dict[str, Tokenizer], name: str) -> None:
    tokenizer, reference = real[name], golden(name)
    for case in reference["tokenizer"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    for case in reference["completion"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["prompt"]
    for case in reference["completion"] + reference["chat"]:
        assert tokenizer.decode(case["greedy_ids"]) == case["greedy_text"]
    for case in reference["chat"]:
        assert tokenizer.encode(case["rendered"], add_special_tokens=False) == case["prompt_ids"]


@pytest.mark.parametrize("name", FIXTURES)
def test_what_ends_a_generation_and_how_many_ids_there_are(real: dict[str, Tokenizer], name: str) -> None:
    assert real[name].stop_ids == STOPS[name]
    assert real[name].stop_ids <= real[name].special_ids
    assert real[name].vocab_size == SIZES[name]
    assert real[name].token_bytes(real[name].vocab_size) == b"" == real[name].token_bytes(-1)


@pytest.mark.parametrize("name", FIXTURES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[SPACE]), max_size=60))
def test_text_comes_back_and_bytes_join_to_it(real: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = real[name]
    known = {tokenizer.token_bytes(i) for i in range(1000)}
    assume(all(bytes([byte]) in known for byte in text.encode()))  # SmolLM2 has no token for 0xF1, as in the reference
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined == tokenizer.decode(ids)
    assert not tokenizer.special_ids & set(ids)
    if name != "qwen_coder":
        assert joined == text


def test_control_text_is_parsed_only_where_asked(real: dict[str, Tokenizer]) -> None:
    tokenizer = real["qwen_coder"]
    assert 151645 in tokenizer.encode("a<|im_end|>b")
    plain = tokenizer.encode("a<|im_end|>b", parse_special=False)
    assert 151645 not in plain
    assert tokenizer.decode(plain) == "a<|im_end|>b"
    assert tokenizer.decode([64, 151645], skip_special_tokens=True) == "a"
    assert 151657 in tokenizer.encode("<tool_call>", parse_special=False)  # a user-defined token is text


def test_bos_is_added_once(real: dict[str, Tokenizer]) -> None:
    gemma = real["gemma3"]
    assert gemma.encode("<bos>Hello") == gemma.encode("Hello") == [2, 9259]
    assert gemma.encode("", add_special_tokens=True) == [2]


def test_bytes_of_an_emoji_in_pieces(real: dict[str, Tokenizer]) -> None:
    smollm2 = real["smollm2"]
    ids = smollm2.encode("\U0001f33d", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(map(smollm2.token_bytes, ids)) == "\U0001f33d".encode()
    assert smollm2.token_text(ids[-1]) == "\ufffd"


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00 ok"])
def test_lone_surrogates_are_the_callers_mistake(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode(text)


@pytest.mark.parametrize("unit", ["a ", "a", "<", "\n", "\U0001f44d", " "])
def test_time_is_near_linear_in_the_text(tokenizer: Tokenizer, unit: str) -> None:
    def seconds(count: int) -> float:
        begin = time.process_time()  # of this process alone: the machine may be busy
        tokenizer.encode(unit * count)
        return time.process_time() - begin

    seconds(1000)
    short, long = min(seconds(20_000) for _ in range(2)), seconds(160_000)
    assert long < 8 * short * 4 + 0.2


def test_a_long_text_lets_other_threads_run() -> None:
    """A server reads prompts in a thread, and goes on serving."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    done, turns = threading.Event(), 0

    def encode() -> None:
        tokenizer.encode("hello there " * 50_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 15


def test_loading_is_quick(metadata: dict[str, dict[str, Any]]) -> None:
    for name, limit in (("smollm2", 0.15), ("qwen_coder", 0.5), ("gemma3", 1.0)):
        times = []
        for _ in range(2):
            begin = time.process_time()
            Tokenizer.from_gguf(metadata[name])
            times.append(time.process_time() - begin)
        assert min(times) < 3 * limit, name


# --- small vocabularies -----------------------------------------------------------------------------------------------


def slow_scored_bpe(text: str, scores: dict[str, float]) -> list[str]:
    """The definition: merge the best neighbours, the leftmost of equals, until none is left."""
    pieces = list(text)
    while True:
        pairs = [(-scores[a + b], n) for n, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@settings(max_examples=150, deadline=None)
@given(
    words=st.dictionaries(st.text(f"ab{SPACE}", min_size=2, max_size=5), st.integers(-9, 0).map(float), max_size=25),
    text=st.text("ab ", max_size=24),
)
def test_scored_merging_equals_its_definition(words: dict[str, float], text: str) -> None:
    vocabulary = {"a": -99.0, "b": -99.0, SPACE: -99.0} | words
    tokenizer = Tokenizer.from_gguf(scored(vocabulary, space=False))
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = slow_scored_bpe(text.replace(" ", SPACE), words)
    assert [tokenizer.token_text(i) for i in ids] == [piece.replace(SPACE, " ") for piece in pieces]


def test_sentencepiece_space_is_added_and_dropped_once() -> None:
    tokenizer = Tokenizer.from_gguf(scored({SPACE: -9.0, "h": -9.0, "i": -9.0, "hi": -2.0, SPACE + "hi": -1.0}))
    ids = tokenizer.encode("hi hi", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == [" hi", " hi"]
    assert tokenizer.decode(ids) == "hi hi"
    assert tokenizer.encode("hi")[0] == tokenizer.bos_id == 1
    assert tokenizer.decode(tokenizer.encode("  hi", add_special_tokens=False)) == "  hi"
    assert tokenizer.decode(tokenizer.encode("\U0001f33d", add_special_tokens=False)) == "\U0001f33d"


def test_declared_ends_and_padding() -> None:
    metadata = byte_level(("<|im_start|>", "<|im_end|>", "<stop>", "[PAD0]", "[PAD1]"))
    metadata["tokenizer.ggml.token_type"][-2:] = [5, 5]
    metadata |= {"tokenizer.ggml.eos_token_id": 259, "tokenizer.ggml.eot_token_id": 260}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.vocab_size == 261
    assert tokenizer.stop_ids == {259, 260}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.model": None}, "missing"),
        ({"tokenizer.ggml.pre": "never-heard-of"}, "never-heard-of"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["no way"]}, "merges"),
        ({"tokenizer.ggml.tokens": []}, "token"),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.bos_token_id": 10_000}, "bos_token_id"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id"),
    ],
)
def test_bad_metadata_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadModelFile, match=reason):
        Tokenizer.from_gguf(byte_level() | change)


def test_bad_scores_are_refused() -> None:
    for scores in ([0.0], [float("nan")] * 260, None):
        with pytest.raises(BadModelFile, match="scores"):
            Tokenizer.from_gguf(scored({"a": 0.0}) | {"tokenizer.ggml.scores": scores})
