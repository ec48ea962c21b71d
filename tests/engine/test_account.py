"""Accounts: what all sequences took adds up to what the steps took, whatever happened to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.base.settings import EngineSettings
from headrace.core.sampling import SamplingParams as Params
from headrace.engine import account as ledgers
from headrace.engine import engine as engines
from headrace.engine.engine import Engine
from headrace.engine.messages import Account, Add, ModelInfo, Update
from headrace.program import Program, Sampled, Step
from headrace.program.cost import Attention, Work
from headrace.runtime.load import LoadedModel

WORK = Work(1e6, 1e6, 3e5, (Attention(None, 3e4, 2e4), Attention(40, 3e4, 2e4)))


class Clock:
    """Each look at it takes a moment of its own; time stands still between them."""

    def __init__(self) -> None:
        self.now, self.looks = 100.0, 0

    def monotonic(self) -> float:
        self.looks += 1
        self.now += 0.001 * (1 + self.looks % 7)
        return self.now


class Executor:
    """Writes tokens; fails when told to."""

    fails = False

    def run(self, step: Step) -> Sampled:
        if self.fails:
            raise RuntimeError("it was told to")
        rows = len(step.logit_rows)
        floats, ids = np.zeros(rows, np.float32), np.zeros(rows, np.int32)
        return Sampled(ids + 7, floats, ids, np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32), ids)


def build(
    monkeypatch: pytest.MonkeyPatch, *, seqs: int = 4, pages: int = 6, tokens: int = 40, **more: Any
) -> tuple[Engine, Executor, Clock]:
    clock, executor = Clock(), Executor()
    monkeypatch.setattr(engines, "time", clock)
    monkeypatch.setattr(engines, "work", lambda *_: WORK)
    made = EngineSettings(max_num_seqs=seqs, max_num_batched_tokens=tokens, **more)
    info = ModelInfo(name="", architecture="", max_model_len=160, vocab_size=100, page_tokens=32, pages=pages,
                     page_bytes=1, weight_bytes=1, max_logprobs=20, threads=1, isa="", load_seconds=0.0)  # fmt: skip
    program = Program((), {}, None)  # type: ignore[arg-type]
    model = LoadedModel(None, program, executor, "", {})  # type: ignore[arg-type]
    return Engine(model, made, info, tokens), executor, clock


def ask(engine: Engine, name: str, prompt: int, answer: int, n: int = 1, arrival: float = 0.0, **more: Any) -> None:
    params = Params(n=n, max_tokens=answer, ignore_eos=True, **more)
    engine.add(Add(name, [1 + i % 7 for i in range(prompt)], params, 1, [], arrival=arrival))


def accounts(updates: list[Update]) -> dict[tuple[str, int], Account]:
    return {(u.request_id, u.choice): u.account for u in updates if u.account is not None}


OPERATION = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 150), st.integers(1, 9), st.sampled_from([1, 1, 3])),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("stopped"), st.integers(0, 5)),
    st.tuples(st.just("fail")),
)


@settings(max_examples=100, deadline=None)
@given(
    operations=st.lists(OPERATION, min_size=1, max_size=40),
    tokens=st.sampled_from([16, 40, 200]),
    pages=st.sampled_from([5, 9, 60]),
    cache=st.sampled_from([True, True, False]),
)
def test_all_accounts_together_are_the_time_of_all_steps(
    operations: list[Any], tokens: int, pages: int, cache: bool
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine, executor, _ = build(monkeypatch, pages=pages, tokens=tokens if cache else 200, kv_cache=cache)
        news: list[Update] = []
        names: list[str] = []
        for kind, *values in operations:
            if kind == "add":
                names.append(f"r{len(names)}")
                ask(engine, names[-1], *values)
            elif kind == "step":
                for _ in range(values[0]):
                    news += engine.step()
            elif kind == "fail":
                executor.fails = True
                news += engine.step()
                executor.fails = False
            elif names and kind == "abort":
                news += engine.abort(names[values[0] % len(names)])
            elif names:
                news += engine.stopped(names[values[0] % len(names)], 0, "END")
        while engine.has_work:
            news += engine.step()
    told = accounts(news)
    ends = [u for u in news if u.reason is not None]
    assert len(ends) == len(told) == len({(u.request_id, u.choice) for u in ends}), "each end with its account, once"
    stats = engine.stats()
    charged = stats.prompt_machine + stats.completion_machine
    busy = stats.schedule_seconds + stats.run_seconds + stats.commit_seconds
    assert sum(a.machine for a in told.values()) == pytest.approx(charged, rel=1e-9, abs=1e-12)
    assert sum(a.prompt_machine for a in told.values()) == pytest.approx(stats.prompt_machine, rel=1e-9, abs=1e-12)
    aborted = sum(told[u.request_id, u.choice].machine for u in ends if u.reason == "abort")
    assert aborted == pytest.approx(stats.aborted_machine, rel=1e-9, abs=1e-12)
    assert busy - 0.06 < charged <= busy + 1e-9, "all but the last commit"
    assert sum(a.recomputed for a in told.values()) == stats.recomputed
    assert not engine.ledger.entries, "an ended sequence is kept"


def test_an_account_tells_the_steps_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts that need three steps; who is alone has the machine for itself."""
    engine, _, clock = build(monkeypatch, pages=20, tokens=40, max_inter_token_ms=0, enable_prefix_caching=False)
    arrival = clock.now
    ask(engine, "a", 50, 6, arrival=arrival)
    ask(engine, "b", 20, 3, arrival=arrival)
    news: list[Update] = []
    while engine.has_work:
        news += engine.step()
    told = accounts(news)
    a, b = told["a", 0], told["b", 0]
    assert [c[:2] + c[4:5] for c in a.chunks] == [(0, 20, 1), (20, 30, 1)]
    assert [c[:2] + c[4:5] for c in b.chunks] == [(0, 20, 1)]
    assert a.chunks[0][5] == pytest.approx(a.queue), "the first chunk begins where the queue ends"
    assert a.chunks[0][5] + a.chunks[0][2] <= a.chunks[1][5] + 1e-9 < a.queue + a.prefill
    assert a.chunks[0][2:3] == b.chunks[0][2:3] and a.chunks[0][3] + b.chunks[0][3] == pytest.approx(1)
    assert (a.decode_steps, b.decode_steps) == (5, 2)
    assert (a.most_mates, b.most_mates) == (1, 1) and a.mean_mates == 3 / 7 and b.mean_mates == 1
    for account in (a, b):
        assert account.queue + account.prefill + account.decode <= clock.now - arrival
        assert account.prefill >= sum(c[2] for c in account.chunks) - 0.01
        assert account.decode >= account.step_seconds - 0.05


def test_who_is_alone_pays_for_all_and_a_longer_context_pays_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = build(monkeypatch, pages=30, tokens=200)
    ask(engine, "long", 140, 10)
    ask(engine, "short", 5, 10)
    told = accounts([update for _ in range(40) for update in engine.step()])
    long, short = told["long", 0], told["short", 0]
    assert long.completion_machine > 1.5 * short.completion_machine and long.prompt_machine > 5 * short.prompt_machine
    ask(engine, "alone", 5, 10)
    before = engine.stats()
    alone = accounts([update for _ in range(40) for update in engine.step()])["alone", 0]
    after = engine.stats()
    assert alone.prompt_machine == pytest.approx(after.prompt_machine - before.prompt_machine)
    assert alone.completion_machine == pytest.approx(after.completion_machine - before.completion_machine)
    assert alone.most_mates == 0 and alone.mean_mates == 0


def test_preempted_sequences_say_what_they_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = build(monkeypatch, pages=5, tokens=160, enable_prefix_caching=False)
    ask(engine, "a", 60, 60)
    ask(engine, "b", 60, 60)
    news: list[Update] = []
    while engine.has_work:
        news += engine.step()
    told = accounts(news)
    assert told["a", 0].preemptions == told["a", 0].recomputed == 0
    b = told["b", 0]
    assert b.preemptions > 0 and b.recomputed >= 60
    assert sum(c[1] for c in b.chunks) == 60 + b.recomputed + b.preemptions  # and the row that was to come


def test_all_news_of_a_sequence_say_what_it_found_and_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady steps too, whose news are made apart."""
    engine, _, _ = build(monkeypatch, pages=4, tokens=160)
    ask(engine, "first", 40, 2)
    while engine.has_work:
        engine.step()
    ask(engine, "a", 60, 60)
    ask(engine, "b", 60, 60)
    news: dict[str, list[Update]] = {"a": [], "b": []}
    while engine.has_work:
        for update in engine.step():
            news[update.request_id].append(update)
    for updates in news.values():
        assert sum(len(update.tokens) for update in updates) == 60
        assert {update.cached for update in updates} == {40}
    lost = [update.preemptions for update in news["b"]]
    assert lost == sorted(lost) and lost[0] == 0 < lost[-1]


def test_many_chunks_are_told_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "KEPT", 8)
    engine, _, _ = build(monkeypatch, pages=5, tokens=160, kv_cache=False)
    ask(engine, "r", 2, 50)
    news: list[Update] = []
    while engine.has_work:
        news += engine.step()
    account = accounts(news)["r", 0]
    assert len(account.chunks) == 8 and account.chunks[-1][3] == pytest.approx(1)
    assert sum(c[1] for c in account.chunks) == sum(range(2, 52))
    assert sum(c[2] for c in account.chunks) == pytest.approx(sum(r.schedule_s + r.run_s for r in engine.trace))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64) as opened:
        yield opened


def test_the_parts_of_a_life_add_up_to_what_the_caller_waited(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [5 + i] * 100} for i in range(6)]
    start = time.monotonic()
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    waited = time.monotonic() - start
    lives = []
    for out in outs:
        (account,) = out.metrics.accounts.values()
        life = account.queue + account.prefill + account.decode
        lives.append(life)
        seen = out.metrics.finished - out.metrics.arrival
        assert 0 < life <= seen + 1e-6 and account.decode_steps == 19
        assert sum(c[2] for c in account.chunks) <= account.prefill + 1e-6 and account.queue >= 0
        assert account.step_seconds <= account.decode + 1e-6
        assert sum(c[1] for c in account.chunks) == 100
        assert 0 < account.machine < life
    assert max(lives) <= waited and max(lives) > 0.5 * waited
    assert sum(next(iter(out.metrics.accounts.values())).machine for out in outs) <= waited
