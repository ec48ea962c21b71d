"""Guesses: the longest match is found, chances follow what is seen, and nothing is drafted that cannot pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import SettingError
from headrace.base.settings import EngineSettings
from headrace.base.speculation import Speculation
from headrace.core.sampling import SamplingParams
from headrace.core.scheduler import Scheduled
from headrace.core.sequence import Sequence
from headrace.program.cost import Work
from headrace.runtime.draft import History, LookUps
from headrace.runtime.draft.past import END, Past
from headrace.runtime.times import StepTimes

pytestmark = pytest.mark.quick

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest(tokens: list[int], most: int) -> int:
    """The specification: how many of the last tokens, up to `most`, stand somewhere before."""
    for length in range(min(most, len(tokens) - 1), 0, -1):
        if any(tokens[at - length : at] == tokens[-length:] for at in range(length, len(tokens))):
            return length
    return 0


@given(TEXTS, st.integers(1, 12), st.integers(1, 4))
def test_the_longest_match_is_found(tokens: list[int], most: int, least: int) -> None:
    history = History(tokens)
    history.look_up(least, most)
    wanted = longest(tokens, most)
    assert history.length == (wanted if wanted >= least else 0)
    if history.length:
        assert tokens[history.place - history.length : history.place] == tokens[-history.length :]


@given(TEXTS.filter(bool), st.lists(st.integers(0, 3), max_size=80), st.integers(0, 20))
def test_a_text_that_goes_on_is_the_whole_text(tokens: list[int], more: list[int], cut: int) -> None:
    history, whole = History(tokens), History(tokens + more)
    history.look_up(1, 32)
    foreseen = history.next(1) if history.length else ()
    judged = history.follow(more[:cut]) + history.follow(more[cut:])
    assert bool(judged) == bool(foreseen and more)
    if judged:
        assert judged[0] == (longest(tokens, 32), foreseen == (more[0],))
    for each in (history, whole):
        each.look_up(1, 32)
    assert (history.length, history.place, history.size) == (whole.length, whole.place, len(tokens) + len(more))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(2, 5), st.integers(1, 20))
def test_what_goes_round_is_taken_to_go_on(pattern: list[int], times: int, count: int) -> None:
    history = History(pattern * times)
    history.look_up(1, 1000)
    assert list(history.next(count)) == (pattern * 20)[:count]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(1, 12))
def test_a_draft_that_is_followed_was_right(tokens: list[int], count: int) -> None:
    history = History(tokens)
    history.look_up(1, 8)
    if history.length:
        length = history.length
        assert history.follow(history.next(count)) == [(length + n, True) for n in range(count)]


@given(TEXTS.filter(bool), TEXTS.filter(bool), st.integers(1, 12), st.integers(1, 4))
def test_the_longest_match_in_another_text_is_found(other: list[int], tokens: list[int], most: int, least: int) -> None:
    history = History(tokens)
    history.look_in(np.array([*other, END], np.int32), least, most)
    ends = [at for at in range(1, len(other) + 1) if other[at - 1] == tokens[-1]]
    agreeing = [next((n for n in range(min(most, at, len(tokens))) if other[at - 1 - n] != tokens[-1 - n]),
                     min(most, at, len(tokens))) for at in ends]  # fmt: skip
    wanted = max(agreeing, default=0)
    assert history.length == (wanted if wanted >= least else 0)
    if history.length:
        after = other[history.place :]
        assert list(history.next(5)) == after[:5]
        assert [right for _, right in history.follow([*after, 9])] == [True] * len(after) + [False]
        assert history.length == 0
        whole = History([*tokens, *after, 9])
        for each in (history, whole):
            each.follow([1, *tokens])
            each.look_up(1, 32)
        assert (history.length, history.next(4)) == (whole.length, whole.next(4))


@given(st.integers(1, 60), st.lists(st.tuples(st.sampled_from("ab"), TEXTS), max_size=30))
def test_what_was_said_is_bounded_and_kept_apart(most: int, said: list[tuple[str, list[int]]]) -> None:
    past = Past(most)
    for at, (who, tokens) in enumerate(said):
        past.add((who, ""), [token + (100 if who == "b" else 0) for token in tokens])
        texts = {name: past.of((name, "")) for name in "ab"}
        assert sum(len(text) for text in texts.values() if text is not None) <= most
        for name, text in texts.items():
            assert text is None or set(text.tolist()) <= ({-1, 0, 1, 2, 3} if name == "a" else {-1, *range(100, 104)})
        if most >= 8 and tokens:
            newest = texts[who]
            assert newest is not None and newest[-2] % 100 == said[at][1][-1]


# -- how much is drafted

WORK = Work(weight_bytes=1e8, row=1e8, logit_row=3e7, attention=())


def priced(row: float) -> StepTimes:
    """Steps of 5 ms, and so much for each drafted row."""
    times = StepTimes(WORK)
    times.drafting = lambda _, most: [0.005 + row * n for n in range(most + 1)]  # type: ignore[method-assign]
    return times


def copying(speculator: LookUps, steps: int, *, right: bool, sequences: int = 1, row: float = 0.0) -> list[int]:
    """Tokens drafted in each of the steps of sequences whose text repeats itself, or only seems to.

    row: seconds that a drafted token really takes.
    """
    period = 40
    all_of_them = [
        Sequence(i, str(i), 0, SamplingParams(max_tokens=None), 0, list(range(period)) * 2) for i in range(sequences)
    ]
    drafted = []
    for step in range(steps):
        items = [Scheduled(s, len(s.tokens) - 1, 1, True) for s in all_of_them]
        guesses = speculator.guesses(items)
        drafted.append(sum(len(draft) for _, draft in guesses))
        for item, draft in guesses:
            item.draft, item.count = draft, 1 + len(draft)
        for item in items:
            s = item.sequence
            accepted = len(item.draft) if right else 0
            new = [len(s.tokens) + n for n in range(accepted + 1)]
            s.tokens += [n % period if right or step % 2 else 1000 + n for n in new]
        speculator.learn(items, 0.005 + row * sum(len(item.draft) for item in items))
    return drafted


def test_what_is_right_is_drafted_and_what_is_wrong_no_more() -> None:
    config = Speculation.of({"method": "suffix"})
    assert min(copying(LookUps(config, priced(0.0002)), 30, right=True)) == 8
    wrong = copying(LookUps(config, priced(0.0015)), 200, right=False)
    assert sum(wrong[:20]) > sum(wrong[-20:]) == 0


@pytest.mark.parametrize("sequences", [1, 8])
def test_rows_that_cost_as_much_as_a_step_are_not_drafted(sequences: int) -> None:
    speculator = LookUps(Speculation.of({"method": "suffix"}), priced(0.005 / sequences))
    assert sum(copying(speculator, 50, right=True, sequences=sequences)) == 0


def test_rows_that_cost_more_than_was_predicted_are_drafted_no_more() -> None:
    config = Speculation.of({"method": "suffix"})
    drafted = copying(LookUps(config, priced(0.0002)), 300, right=True, sequences=8, row=0.001)
    assert sum(drafted[:20]) > 200 and sum(drafted[-200:]) < sum(drafted[:20]), drafted
    drafted = copying(LookUps(config, priced(0.0002)), 300, right=True, sequences=8, row=0.0002)
    assert min(drafted[-200:]) > 30, drafted


def test_no_more_is_drafted_than_was_asked_for() -> None:
    speculator = LookUps(Speculation.of({"method": "suffix", "num_speculative_tokens": 3}), priced(0.0))
    assert set(copying(speculator, 20, right=True)) == {3}
    assert speculator.tally.told() == (20, 60, 60, [20, 20, 20])
    assert speculator.tally.of(Sequence(0, "", 0, SamplingParams(), 0, [1])) == (60, 60)


def test_while_a_prompt_is_computed_nothing_is_drafted() -> None:
    speculator = LookUps(Speculation.of({"method": "suffix"}), priced(0.0))
    s = Sequence(0, "", 0, SamplingParams(), 0, [1, 2] * 8)
    chunk = Scheduled(Sequence(1, "", 0, SamplingParams(), 0, [1] * 50), 0, 30, False)
    single = Scheduled(s, 15, 1, True)
    assert speculator.guesses([single]) and not speculator.guesses([single, chunk])


def test_what_one_caller_said_is_looked_up_for_the_same_caller_alone() -> None:
    config = Speculation.of({"method": "suffix", "shared_history_tokens": 1000})
    speculator = LookUps(config, priced(0.0))
    said = list(range(100, 160))

    def drafted(number: int, tenant: str, salt: str, most: int | None = None) -> list[int]:
        s = Sequence(number, "", 0, SamplingParams(), 0, said[:20], tenant=tenant, salt=salt, drafted=most)
        guesses = speculator.guesses([Scheduled(s, 19, 1, True)])
        s.tokens += said[20:]
        speculator.forget(s)
        return [token for _, draft in guesses for token in draft]

    assert drafted(0, "one", "") == []
    assert drafted(1, "one", "")[:1] == said[20:21]
    assert drafted(2, "two", "") == drafted(3, "one", "salt") == drafted(4, "three", "", 0) == []
    assert drafted(5, "three", "") == []  # who wants no guesses is not kept
    without = LookUps(Speculation.of({"method": "suffix"}), priced(0.0))
    speculator = without
    assert drafted(6, "one", "") == drafted(7, "one", "") == []


# -- settings


@pytest.mark.parametrize("config", [
    {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": 5},
    {"method": "suffix"},
    {"method": "draft_model", "model": "org/name", "num_speculative_tokens": 5},
])  # fmt: skip
def test_what_vllm_takes_is_taken(config: dict[str, object]) -> None:
    made = Speculation.of(config)
    assert all(getattr(made, name) == value for name, value in config.items())
    EngineSettings(speculative_config=config)


def test_one_bound_of_an_ngram_is_both() -> None:
    some = ({"prompt_lookup_max": 3}, {"prompt_lookup_min": 3}, {})
    both = [Speculation.of({"method": "ngram", **given}) for given in some]
    assert [(s.prompt_lookup_min, s.prompt_lookup_max) for s in both] == [(3, 3), (3, 3), (5, 5)]


def test_a_model_means_that_it_drafts() -> None:
    assert Speculation.of({"model": "org/name"}).method == "draft_model"


@pytest.mark.parametrize(("config", "param"), [
    ({}, "method"),
    ({"method": "draft_model"}, "model"),
    ({"method": "draft_model", "model": " "}, "model"),
    ({"method": "suffix", "model": "org/name"}, "model"),
    ({"model": ["org/name"]}, "model"),
    ({"model": "org/name", "quantization": "fp8"}, "quantization"),
    ({"model": "org/name", "quantization": [1]}, "quantization"),
    ({"method": "self", "quantization": "q4_0"}, "quantization"),
    ({"method": "suffix", "shared_history_tokens": -1}, "shared_history_tokens"),
    ({"method": "suffix", "shared_history_tokens": True}, "shared_history_tokens"),
    ({"method": "suffix", "shared_history_tokens": 1 << 40}, "shared_history_tokens"),
    ({"method": "ngram", "shared_history_tokens": 5}, "shared_history_tokens"),
    ({"method": "eagle3"}, "method"),
    ({"method": ["ngram"]}, "method"),
    ({"method": "suffix", "num_speculative_tokens": 0}, "num_speculative_tokens"),
    ({"method": "suffix", "num_speculative_tokens": True}, "num_speculative_tokens"),
    ({"method": "suffix", "num_speculative_tokens": 1000}, "num_speculative_tokens"),
    ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min"),
    ({"method": "ngram", "prompt_lookup_max": "4"}, "prompt_lookup_max"),
    ({"method": "ngram", "draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
])  # fmt: skip
def test_what_cannot_be_is_named(config: dict[str, object], param: str) -> None:
    with pytest.raises(SettingError) as caught:
        EngineSettings(speculative_config=config)
    assert caught.value.param == f"speculative_config.{param}"
