"""Who is admitted next: fair shares between tenants, bounded overtaking by priority, and an end for everybody."""

from __future__ import annotations

from itertools import count

import pytest
from core_model import PagedModel, answer, ask, drain, said, small, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import waiting as w
from headrace.core.scheduler import Scheduler
from headrace.core.sequence import Finish, Sequence

PAGE = 4
LONGEST = 11  # tokens of a prompt below
ANSWER = 6  # of an answer


class Served:
    """What tenants are given, counted from outside, and who is admitted when."""

    def __init__(self, scheduler: Scheduler, model: PagedModel) -> None:
        self.scheduler, self.model = scheduler, model
        self.sequences: list[Sequence] = []
        self.admitted: list[Sequence] = []

    def add(self, sequence: Sequence) -> Sequence:
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def step(self) -> None:
        new = {s.id for s in self.sequences} - {s.id for s in self.admitted}
        ranks = {s.id: s.rank for s in self.sequences}
        turn(self.scheduler, self.model)
        fresh = [s for s in self.sequences if s.id in new and s.rank != ranks[s.id]]
        self.admitted += sorted(fresh, key=lambda s: s.rank)

    def of(self, tenant: str) -> float:
        own = [s for s in self.sequences if s.tenant == tenant]
        prompts = sum(s.prompt_len - s.cached for s in self.admitted if s.tenant == tenant)
        return prompts + w.GENERATED * sum(s.generated for s in own)

    def waits(self, tenant: str) -> int:
        return sum(s.finish is None and not s.pages and s.tenant == tenant for s in self.sequences)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=3),
    seqs=st.integers(1, 4),
    pages=st.integers(5, 30),
    sizes=st.lists(st.tuples(st.integers(1, LONGEST), st.integers(1, ANSWER)), min_size=3, max_size=9),
    flood=st.integers(1, 60),
)
def test_what_is_given_to_tenants_that_wait_follows_their_weights(
    weights: list[float], seqs: int, pages: int, sizes: list[tuple[int, int]], flood: int
) -> None:
    """Whoever came first, whatever is asked, with preemptions: within a prompt and the answers of those that run."""
    limits = small(pages=pages, max_num_seqs=seqs, max_num_batched_tokens=8)
    served = Served(Scheduler(limits), PagedModel(limits))
    names = "abc"[: len(weights)]
    number = count()

    def one(tenant: str) -> None:
        i = next(number)
        # Tenants take the sizes from different places, and no two prompts share a page.
        size, length = sizes[(i + ord(tenant)) % len(sizes)]
        prompt = [i % 40, i // 40 % 40, i // 1600, *range(size)][:size]
        served.add(ask(prompt, length, seed=i, tenant=tenant, weight=weights[names.index(tenant)]))

    for _ in range(flood):
        one("a")
    for _ in range(150):
        for name in names:
            while served.waits(name) < seqs + 2:  # its line is never empty, at no moment of a step
                one(name)
        served.step()
        shares = {n: served.of(n) / weight for n, weight in zip(names, weights, strict=True)}
        # Each may be ahead of the others by one prompt and all answers that run, and that is all.
        slack = {n: (LONGEST + w.GENERATED * ANSWER * seqs) / weight for n, weight in zip(names, weights, strict=True)}
        for x in names:
            for y in names:
                assert shares[x] - shares[y] <= slack[x] + 1e-6, (shares, slack)
    assert sum(s.finish is not None for s in served.sequences) > 10


def test_one_tenant_alone_is_served_in_the_order_of_arrival() -> None:
    limits = small(pages=20, max_num_seqs=3)
    served = Served(Scheduler(limits), PagedModel(limits))
    asked = [served.add(ask([i] * (1 + i % 7), 1 + i % 5, seed=i, tenant="x", weight=0.1)) for i in range(40)]
    while served.scheduler.has_work:
        served.step()
    assert served.admitted == asked


def test_answers_count_while_they_grow() -> None:
    """Who has a long answer running gets fewer of the other places meanwhile."""
    limits = small(pages=30, max_num_seqs=2, prefix_caching=False)
    served = Served(Scheduler(limits), PagedModel(limits))
    long = served.add(ask([1] * 4, 60, tenant="a"))
    for i in range(60):
        for tenant in "ab":
            served.add(ask([i % 40] * 4, 2, tenant=tenant))
    while long.finish is None:
        served.step()
    names = [s.tenant for s in served.admitted]
    assert names.count("b") > 2 * names.count("a")


def test_idling_earns_no_credit() -> None:
    limits = small(pages=20, max_num_seqs=1, prefix_caching=False)
    served = Served(Scheduler(limits), PagedModel(limits))
    early = served.add(ask([1] * 3, 1, tenant="b"))
    for i in range(60):
        served.add(ask([i] * 4, 2, tenant="a"))
    while early.finish is None or len(served.admitted) < 40:
        served.step()
    for _ in range(20):
        served.add(ask([9] * 4, 2, tenant="b"))
    at = len(served.admitted)
    for _ in range(40):
        served.step()
    names = [s.tenant for s in served.admitted[at:]]
    assert abs(names[:16].count("a") - names[:16].count("b")) <= 2, names


def test_a_heavy_tenants_debt_is_not_forgotten_while_it_idles() -> None:
    limits = small(pages=20, max_num_seqs=1, prefix_caching=False)
    served = Served(Scheduler(limits), PagedModel(limits))
    light = [served.add(ask([i] * 4, 4, tenant="light")) for i in range(3)]
    for i in range(5):
        served.add(ask([i + 5] * 9, 9, tenant="heavy", weight=0.1))
    while served.scheduler.has_work and sum(s.tenant == "heavy" for s in served.admitted) < 1:
        served.step()
    for s in [s for s in served.sequences if s.tenant == "heavy"]:
        served.scheduler.abort(s.id)
    late = served.add(ask([1] * 4, 4, tenant="heavy", weight=0.1))
    while served.scheduler.has_work:
        served.step()
    assert served.admitted[-1] is late and all(s.finish == Finish("length") for s in light)


@settings(max_examples=40, deadline=None)
@given(
    lead=st.integers(0, 6),
    low=st.integers(-3, 150),
    high=st.integers(-150, 3),
    seqs=st.integers(1, 3),
    pages=st.integers(4, 12),
)
def test_a_tenants_urgent_requests_go_first_but_not_for_ever(
    lead: int, low: int, high: int, seqs: int, pages: int
) -> None:
    limits = small(pages=pages, max_num_seqs=seqs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(w, "LEAD", lead)
        patch.setattr(w, "LEVELS", 4)
        served = Served(Scheduler(limits), PagedModel(limits))
        patient = served.add(ask([1] * 5, 3, priority=low, seed=7))
        levels = max(0, min(low, 4) - max(high, -4))
        later = 0
        while patient.finish is None:
            while served.waits("") < 3 * seqs + 2:
                served.add(ask([2, later % 40, later // 40], 4, priority=high, seed=later))
                later += 1
            served.step()
            assert later < 40 * (lead * levels + 20)
        before = served.admitted.index(patient)
        assert before <= lead * levels + 1
        assert said(patient) == answer([1] * 5, 7, 3)


@settings(max_examples=30, deadline=None)
@given(ahead=st.sampled_from([0.0, 20.0, 100.0]), levels=st.integers(0, 3), others=st.integers(1, 3))
def test_urgent_tenants_go_first_but_not_for_ever(ahead: float, levels: int, others: int) -> None:
    limits = small(pages=20, max_num_seqs=2, prefix_caching=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(w, "AHEAD", ahead)
        served = Served(Scheduler(limits), PagedModel(limits))
        names = [f"urgent{i}" for i in range(others)]
        number = count()
        patient = ask([1] * 5, 3, priority=levels, tenant="patient")
        for name in names:
            served.add(ask([next(number) % 40] * 4, 3, tenant=name))
        served.add(patient)
        while patient.finish is None:
            assert len(served.sequences) < 500, "no end in sight"
            for name in names:
                while served.waits(name) < 3:
                    served.add(ask([next(number) % 40] * 4, 3, tenant=name))
            served.step()
        given_to = [sum(s.prompt_len for s in served.admitted[: served.admitted.index(patient)] if s.tenant == n)
                    for n in names]  # fmt: skip
        most = ahead * levels + 2 * (4 + w.GENERATED * 3 * 2)
        assert max(given_to) <= most
        if levels and ahead == 100:
            assert min(given_to) > 15, "priority does something"


def test_priorities_of_a_tenant_win_no_share() -> None:
    """Who calls all of its requests urgent is ahead once, not twice."""
    limits = small(pages=20, max_num_seqs=2, prefix_caching=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(w, "AHEAD", 30.0)
        served = Served(Scheduler(limits), PagedModel(limits))
        number = count()
        for _ in range(400):
            for name, priority in (("pushy", -3), ("calm", 0)):
                while served.waits(name) < 4:
                    served.add(ask([next(number) % 40] * 4, 3, tenant=name, priority=priority))
            served.step()
        assert 0 < served.of("pushy") - served.of("calm") <= 3 * 30 + 4 + w.GENERATED * 3 * 2


def test_preempted_ones_come_back_before_their_tenants_others() -> None:
    limits = small(pages=9, max_num_seqs=4)
    served = Served(Scheduler(limits), PagedModel(limits))
    for i in range(12):
        served.add(ask([i] * 6, 14, seed=i, tenant="ab"[i % 2]))
    while not (gone := [s for s in served.sequences if s.preemptions and not s.pages]):
        served.step()
    behind = [s for s in served.sequences if s.tenant == gone[0].tenant and s not in served.admitted]
    assert behind
    while not gone[0].pages:
        assert not any(s in served.admitted for s in behind)
        served.step()
    drain(served.scheduler, served.model)
    assert [said(s) for s in served.sequences] == [answer([i] * 6, i, 14) for i in range(12)]


def test_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w, "IDLE", 5)
    limits = small(pages=20, max_num_seqs=2)
    served = Served(Scheduler(limits), PagedModel(limits))
    served.add(ask([1], 40, tenant="stays"))
    for i in range(100):
        served.add(ask([2], 1, tenant=f"t{i}"))
        if i % 3 == 0:
            served.step()
    waiting = served.scheduler._waiting
    while served.scheduler.running > 1 or served.scheduler.waiting:
        served.step()
    assert len(waiting._tenants) <= 11
    drain(served.scheduler, served.model)
    assert not waiting._tenants
