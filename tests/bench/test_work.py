"""What is asked: lengths, prompts, arrivals."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, median, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import SettingError
from headrace.bench.work import Ask, Lengths, asks

ONE = Lengths(1, 1)


@pytest.mark.parametrize("text", ["512", "64-1024", "256~0.8"])
def test_lengths_are_said_as_they_were_written(text: str) -> None:
    assert str(Lengths.of(text)) == text


@pytest.mark.parametrize("text", ["", "0", "-5", "9-8", "5~", "a", "1.5", "5-9~1"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="median~sigma"):
        Lengths.of(text)


@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_uniform_lengths_stay_within_bounds_that_both_occur(low: int, more: int, seed: int) -> None:
    lengths = Lengths.of(f"{low}-{low + more}")
    drawn = [lengths.draw(random.Random(seed + i)) for i in range(50)]
    assert low <= min(drawn) <= max(drawn) <= lengths.most == low + more


def test_log_normal_lengths_have_the_median_and_spread_that_were_asked_for() -> None:
    rng, lengths = random.Random(0), Lengths.of("200~0.5")
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert median(drawn) == pytest.approx(200, rel=0.05)
    assert pstdev(map(math.log, drawn)) == pytest.approx(0.5, rel=0.1)
    assert max(lengths.draw(rng) for lengths in [Lengths(10, 10, 50.0)] for _ in range(99)) == 160


def test_a_seed_gives_the_same_work_and_another_seed_other_work() -> None:
    inputs, outputs = Lengths.of("5-50"), Lengths.of("3-9")
    assert asks(20, inputs, outputs, rate=5) == asks(20, inputs, outputs, rate=5)
    assert asks(20, inputs, outputs) != asks(20, inputs, outputs, seed=2)


def test_a_prefix_is_what_prompts_share() -> None:
    first, second = asks(2, Lengths(10, 10), ONE, prefix=30)
    assert len(first.prompt) == 40
    assert first.prompt[:30] == second.prompt[:30]
    assert first.prompt[30:] != second.prompt[30:]


def gaps(work: list[Ask]) -> list[float]:
    return [b.at - a.at for a, b in itertools.pairwise(work)]


def test_arrivals() -> None:
    assert {ask.at for ask in asks(5, ONE, ONE)} == {0}
    assert gaps(asks(50, ONE, ONE, rate=4, burstiness=math.inf)) == pytest.approx([0.25] * 49)
    for burstiness in (0.25, 1.0, 16.0):
        between = gaps(asks(4000, ONE, ONE, rate=4, burstiness=burstiness))
        assert fmean(between) == pytest.approx(0.25, rel=0.1)
        assert pstdev(between) / fmean(between) == pytest.approx(burstiness**-0.5, rel=0.1)
    for wrong in ({"rate": 0}, {"rate": -1}, {"rate": 1, "burstiness": 0}):
        with pytest.raises(SettingError, match="above zero"):
            asks(2, ONE, ONE, **wrong)


def test_text_has_a_word_for_each_id() -> None:
    ask = asks(1, Lengths(33, 33), ONE)[0]
    assert len(ask.text.split()) == 33
