"""Requests whose time is over: ended wherever they are, and nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.base.errors import CapacityError, DeadlinePassed
from headrace.core.sequence import TIMEOUT
from headrace.engine.engine import Engine
from headrace.engine.messages import Stats, Terms, Update
from headrace.engine.queue import SURE, Queue, Seat, first_token_seconds
from headrace.engine.requests import checked

LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)


class Clock:
    """The time that the engine reads, moved on by hand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._real, self.later = time.monotonic, 0.0
        patch.setattr(time, "monotonic", self)

    def __call__(self) -> float:
        return self._real() + self.later


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    settings = {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**20}
    with LLM(str(tiny), **settings) as made:
        yield made


def ask(llm: LLM, name: str, prompt: list[int], seconds: float = 0.0, n: int = 1) -> None:
    terms = Terms(deadline=time.monotonic() + seconds) if seconds else Terms()
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, n=n)
    llm.engine.add(checked(prompt, params, llm.info, llm.get_tokenizer(), request_id=name, terms=terms))


def run(engine: Engine, steps: int) -> dict[str, list[Update]]:
    heard: dict[str, list[Update]] = {}
    for _ in range(steps):
        for update in engine.step():
            heard.setdefault(update.request_id, []).append(update)
        engine.scheduler.check()
    return heard


def test_whatever_it_is_doing_it_ends_and_others_go_on(llm: LLM, clock: Clock) -> None:
    alone = llm.generate({"prompt_token_ids": [70] * 30}, LONG)[0].outputs[0].token_ids
    engine = llm.engine
    ask(llm, "other", [70] * 30)
    ask(llm, "running", [65] * 30, 100)
    ask(llm, "waiting", [66] * 30, 100)
    ask(llm, "patient", [67] * 30, 1000)
    before = run(engine, 10)
    assert set(before) == {"other", "running"}
    clock.later = 101
    after = run(engine, 1)
    for name in ("running", "waiting"):
        (update,) = after.pop(name)
        assert (update.reason, update.stop, update.tokens) == ("length", TIMEOUT, [])
    rest = run(engine, 700)
    assert not engine.has_work and engine.scheduler.pool.used == 0
    tokens = [t for u in before["other"] + after["other"] + rest["other"] for t in u.tokens]
    assert tokens == alone
    assert sum(len(u.tokens) for u in after["patient"] + rest["patient"]) == 300
    assert not engine._requests and not engine.ledger.entries


def test_in_the_middle_of_a_prompt(llm: LLM, clock: Clock) -> None:
    ask(llm, "long", [65] * 400, 5, n=3)
    assert run(llm.engine, 2) == {} and llm.engine.scheduler.pool.used > 0
    clock.later = 6
    assert sorted(u.choice for u in run(llm.engine, 1)["long"]) == [0, 1, 2]
    assert not llm.engine.has_work and llm.engine.scheduler.pool.used == 0


def test_a_preempted_one_keeps_what_it_said(tiny: Path, clock: Clock) -> None:
    info = LLM(str(tiny), max_model_len=64)
    page = info.info.page_bytes
    info.close()
    with LLM(str(tiny), max_model_len=288, max_num_seqs=4, kv_cache_memory_bytes=10 * page) as llm:
        for i in range(3):
            ask(llm, str(i), [65 + i] * 30, 50)
        said: dict[str, int] = {}
        while not llm.engine.scheduler.preemptions:
            for name, news in run(llm.engine, 1).items():
                said[name] = said.get(name, 0) + sum(len(u.tokens) for u in news)
        assert llm.engine.scheduler.waiting
        clock.later = 51
        assert set(run(llm.engine, 1)) == {"0", "1", "2"} == set(said)
        assert not llm.engine.has_work and llm.engine.scheduler.pool.used == 0


def test_a_name_that_is_used_again_has_its_own_time(llm: LLM, clock: Clock) -> None:
    ask(llm, "a", [65] * 30, 10)
    llm.engine.abort("a")
    ask(llm, "a", [65] * 30, 1000)
    clock.later = 11
    assert [u.reason for u in run(llm.engine, 1)["a"]] == [None]


def test_ended_requests_are_forgotten(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.engine._REMEMBERED", 10)
    for i in range(50):
        ask(llm, str(i), [65], 1000)
        llm.engine.abort(str(i))
        ask(llm, "x", [65])
        run(llm.engine, 1)
        llm.engine.abort("x")
    assert len(llm.engine._deadlines) <= 12


def test_the_engine_learns_what_a_prompt_takes(llm: LLM) -> None:
    assert (llm.engine.stats().prompt_token_time, llm.engine.stats().step_time) == (0, 0)
    ask(llm, "a", [65])
    run(llm.engine, 40)
    assert llm.engine.stats().prompt_token_time == 0, "no prompt of any size yet"
    for i in range(6):
        ask(llm, str(i), list(range(65 + i, 265 + i)))
    run(llm.engine, 400)
    stats = llm.engine.stats()
    assert 0 < stats.prompt_token_time < 1 and 0 < stats.step_time < 1


@given(
    tokens=st.integers(1, 1000),
    waiting=st.lists(st.tuples(st.integers(1, 900), st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 2))),
    token_time=st.sampled_from([0.0, 1e-4, 1e-2]),
    seconds=st.floats(0.01, 100),
    places=st.integers(1, 5),
)
def test_only_what_cannot_be_in_time_is_refused(
    tokens: int, waiting: list[tuple[int, int, str, int]], token_time: float, seconds: float, places: int
) -> None:
    queue = Queue(places, 1000, 10**6, 512)
    seats = [Seat(Terms(tenant=who, priority=p), size, set(), count) for size, count, who, p in waiting]
    stats = Stats(prompt_token_time=token_time, step_time=token_time * 3)
    terms = Terms(tenant="a", priority=1, deadline=time.monotonic() + seconds)
    own = [s for s in seats if s.terms.tenant == "a" and s.terms.priority <= 1]
    most = (tokens + sum(s.tokens * s.waiting for s in own)) * token_time
    try:
        queue.check_deadline(terms, tokens, seats, stats)
    except CapacityError as error:
        assert error.code == "deadline_infeasible" and error.retry_after is None
        assert token_time and seconds <= max(most, 3 * token_time) * SURE
    else:
        assert seconds > SURE * tokens * token_time - 0.1


def test_what_goes_before_a_request() -> None:
    stats = Stats(prompt_token_time=0.01, step_time=0.02)
    queue = Queue(places=2, most=9, most_tokens=10**6, step=100)
    seats = [Seat(Terms(), 90, {0}, 1), Seat(Terms(), 80, {0}, 1), Seat(Terms(), 70, {0}, 0), Seat(Terms(), 60, {0}, 1)]

    def refused(tokens: int, seconds: float) -> bool:
        try:
            queue.check_deadline(Terms(deadline=time.monotonic() + seconds), tokens, seats, stats)
        except CapacityError:
            return True
        return False

    # A long prompt comes after all three that wait, 230 tokens; a short one needs only that two get places and end.
    assert refused(60, SURE * 2.9 - 0.1) and not refused(60, SURE * 2.9 + 0.1)
    assert refused(50, SURE * 2.2 - 0.1) and not refused(50, SURE * 2.2 + 0.1)
    with pytest.raises(DeadlinePassed):
        queue.check_deadline(Terms(deadline=time.monotonic() - 1), 1, [], Stats())


def test_cached_prefixes_make_prompts_shorter() -> None:
    stats = Stats(prompt_token_time=0.01, step_time=0.001, prefix_queries=1000, prefix_hits=900)
    assert first_token_seconds(100, 100, stats) == pytest.approx(0.2)
    assert first_token_seconds(100, 100, Stats()) == 0


def test_learnt_times_are_not_added_up_when_an_engine_is_started_again() -> None:
    first = Stats(prompt_token_time=0.5, step_time=0.7, steps=3)
    again = Stats(prompt_token_time=0.2, step_time=0.1, steps=4).since(first.after_the_end())
    assert (again.prompt_token_time, again.step_time, again.steps) == (0.2, 0.1, 7)
    assert first.after_the_end().step_time == 0
