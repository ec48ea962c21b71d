"""Random operations on tiny pools; the invariants are executed after each, and everything ends."""

from __future__ import annotations

import itertools

from core_model import Keeper, PagedModel, answer, ask, check_batch, drain, said
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.base.errors import RequestError
from headrace.core.pages import chain_hash
from headrace.core.scheduler import Batch, Limits, Scheduler
from headrace.core.sequence import Finish, Sequence
from headrace.core.windows import window_pages


class Operations(RuleBasedStateMachine):
    """add, abort, finish, schedule, commit (with errors and bursts), failed steps, in any order."""

    @initialize(
        pages=st.integers(1, 10),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        static=st.booleans(),
        cache=st.sampled_from([True, True, True, False]),
        constant_hash=st.booleans(),
        pace=st.none() | st.lists(st.integers(-3, 40), min_size=1, max_size=4),
        fails=st.none() | st.lists(st.booleans(), min_size=1, max_size=5),
        window=st.sampled_from([0, 0, 1, 2, 3, 4, 6, 7, 10]),
        spare=st.integers(0, 8),
    )
    def start(
        self, pages: int, seqs: int, budget: int, caching: bool, static: bool, cache: bool, constant_hash: bool,
        pace: list[int] | None, fails: list[bool] | None, window: int, spare: int,
    ) -> None:  # fmt: skip
        length = 30
        window = window if cache else 0
        limits = Limits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget if cache else budget + length,
            max_model_len=length,
            pages=pages,
            page_size=3,
            prefix_caching=caching,
            batching="static" if static else "continuous",
            kv_cache=cache,
            window=window,
            slots=window_pages(window, 3) + spare if window else 0,
        )
        self.limits = limits
        paces, failing = itertools.cycle(pace or []), itertools.cycle(fails or [])
        self.store = Keeper(lambda: next(failing)) if fails else None
        self.new = lambda: Scheduler(
            limits,
            hasher=(lambda *_: 7) if constant_hash else chain_hash,
            pace=(lambda *_: next(paces)) if pace else None,
            store=self.store,
        )
        self.extra = 1
        self.begin()
        self.sequences: list[Sequence] = []
        self.accepted: list[Sequence] = []

    def begin(self) -> None:
        self.scheduler = self.new()
        self.model = PagedModel(self.limits, lambda: self.extra, self.scheduler.slot_of)
        self.batch: Batch | None = None
        if self.store is not None:
            self.store.model = self.model

    @precondition(lambda self: self.store is not None)
    @rule()
    def write(self) -> None:
        assert self.store is not None
        self.store.write()

    @precondition(lambda self: self.store is not None)
    @rule()
    def restart(self) -> None:
        assert self.store is not None
        for s in self.accepted:
            self.scheduler.abort(s.id)
        self.store.waiting = []
        self.begin()

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(0, 9) | st.none(),
        stop=st.integers(0, 39),
        priority=st.integers(0, 2) | st.integers(-200, 200),
        tenant=st.sampled_from("abc"),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        scoring=st.booleans(),
        choices=st.sampled_from([1, 1, 3]),
        salt=st.sampled_from(["", "a"]),
    )
    def add(self, shared: int, own: list[int], max_tokens: int | None, stop: int, priority: int, tenant: str,
            weight: float, scoring: bool, choices: int, salt: str) -> None:  # fmt: skip
        request = f"q{len(self.sequences)}"
        for choice in range(choices):
            s = ask([*range(shared), *own], max_tokens, request=request, choice=choice, seed=choice, salt=salt,
                    stop_ids=[stop], priority=priority, tenant=tenant, weight=weight,
                    prompt_logprobs=0 if scoring else None)  # fmt: skip
            self.sequences.append(s)
            try:
                self.scheduler.add(s)
            except RequestError:
                room = min(30, self.limits.pages * 3)
                assert s.prompt_len == 0 or s.prompt_len > room or s.prompt_len == 30
            else:
                self.accepted.append(s)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), outside=st.booleans())
    def end(self, data: st.DataObject, outside: bool) -> None:
        s = data.draw(st.sampled_from(self.sequences))
        alive = s in self.accepted and s.finish is None
        if outside:
            assert self.scheduler.finish(s.id, Finish("stop", "END")) == alive
        else:
            assert self.scheduler.abort(s.id) == alive
        assert not self.scheduler.abort(s.id)

    @rule(guesses=st.lists(st.lists(st.integers(0, 39), max_size=4).map(tuple), max_size=5), known=st.booleans())
    def schedule(self, guesses: list[tuple[int, ...]], known: bool) -> None:
        self.batch = self.scheduler.schedule()
        assert (self.batch is None) == (not self.scheduler.has_work)
        if self.batch is not None:
            held = {s.id: s.pages.copy() for s in self.accepted}
            able = [i for i in self.batch.items if i.sample and i.count == 1 and self.limits.kv_cache]
            pairs = list(zip(able, guesses, strict=False))
            if known:
                pairs = [(item, tuple(answer(item.sequence.tokens, item.sequence.seed, len(g)))) for item, g in pairs]
            self.scheduler.draft(self.batch, pairs)
            assert all(s.pages[: len(held[s.id])] == held[s.id] for s in self.accepted), "a draft has taken a page"
            check_batch(self.limits, self.batch)

    @precondition(lambda self: self.batch is not None)
    @rule(data=st.data(), extra=st.integers(1, 3), trouble=st.booleans())
    def commit(self, data: st.DataObject, extra: int, trouble: bool) -> None:
        assert self.batch is not None
        self.extra = extra
        alive = [i for i in self.batch.items if i.sequence.finish is None]
        self.batch.items[:] = alive  # the model below cannot run those without pages
        outcome = self.model.run(self.batch)
        if trouble and alive:
            outcome.errors[data.draw(st.sampled_from(alive)).sequence.id] = "NaN"
        ended = self.scheduler.commit(self.batch, outcome)
        assert {s.id for s in ended} == {i.sequence.id for i in alive if i.sequence.finish is not None}
        assert all(s.finish is not None and s.finish.reason == "error" for s in ended if s.id in outcome.errors)
        self.batch = None

    @precondition(lambda self: self.batch is not None)
    @rule()
    def step_fails(self) -> None:
        assert self.batch is not None
        self.scheduler.undo(self.batch)
        self.batch = None

    @invariant()
    def holds(self) -> None:
        self.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.extra = 1
            drain(self.scheduler, self.model)
            assert all(s.finish is not None and s.pages == [] for s in self.accepted)
            assert all(said(s) == answer(s.tokens[: s.prompt_len], s.seed, s.generated) for s in self.accepted)


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
