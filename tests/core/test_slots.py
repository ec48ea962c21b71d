"""Slots of layers with windows: who has them, when they come back, what a prefix hit needs of them."""

from __future__ import annotations

import pytest
from core_model import Keeper, PagedModel, answer, ask, drain, said, small, turn
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import SettingError
from headrace.core.pages import pack
from headrace.core.scheduler import Limits, Scheduler
from headrace.core.windows import NONE, WindowedPool, window_pages


def start(pages: int, slots: int, window: int = 6, **changes: object) -> tuple[Scheduler, PagedModel]:
    """Pages of 4 tokens: a window of 6 reaches back 2 pages."""
    scheduler = Scheduler(small(pages, window=window, slots=slots, **changes))
    return scheduler, PagedModel(scheduler.limits, slot_of=scheduler.slot_of)


@given(window=st.integers(1, 40), size=st.integers(1, 9), position=st.integers(0, 200))
def test_a_window_lies_in_so_many_pages_at_most(window: int, size: int, position: int) -> None:
    seen = position // size - max(position - window + 1, 0) // size + 1
    assert seen <= window_pages(window, size)
    if position >= window - 1 and (position - window + 1) % size == (size - 1) % size:
        assert seen == window_pages(window, size), "no less would do"


def test_a_sequence_needs_the_slots_of_its_window_only() -> None:
    """40 tokens lie in 10 pages, and never in more than 3 slots: between steps, and one page more with each chunk."""
    scheduler, model = start(pages=10, slots=3)
    s = ask(range(20), 21)
    scheduler.add(s)
    while scheduler.has_work:
        turn(scheduler, model)
        assert scheduler.slots[0] <= 3
    assert said(s) == answer([*range(20)], 0, 21) and s.preemptions == 0
    assert scheduler.slots == (0, 3), "what it saw last is kept for who goes on with it"


def test_more_sequences_fit_than_pages_over_all_layers_would_hold() -> None:
    scheduler, model = start(pages=30, slots=12, max_num_batched_tokens=64)
    crowd = [ask([7, n], 38, seed=n) for n in range(3)]
    for s in crowd:
        scheduler.add(s)
    drain(scheduler, model)
    assert [s.preemptions for s in crowd] == [0, 0, 0]
    assert [said(s) for s in crowd] == [answer([7, n], n, 38) for n in range(3)]


def test_a_hit_needs_the_slots_of_the_last_window_alone() -> None:
    scheduler, model = start(pages=20, slots=8)
    first = ask(range(30), 1)
    scheduler.add(first)
    drain(scheduler, model)
    again = ask(range(30), 1)
    scheduler.add(again)
    turn(scheduler, model)
    assert again.cached == 29, "28 in pages, and one of the next that was copied"
    drain(scheduler, model)
    assert said(again) == said(first)


def test_a_hit_is_cut_where_slots_are_gone_and_what_is_computed_again_gives_them_back() -> None:
    """The pages are there, but others have taken the slots."""
    scheduler, model = start(pages=40, slots=4)
    prompt = [*range(1, 31)]
    for tokens in (prompt, [*range(40, 70)]):
        scheduler.add(ask(tokens, 1))
        drain(scheduler, model)
    pages = scheduler.pool.cached
    again = ask(prompt, 1)
    scheduler.add(again)
    turn(scheduler, model)
    assert again.cached == 0
    drain(scheduler, model)
    assert said(again) == answer(prompt, 0, 1)
    assert scheduler.pool.cached == pages, "the pages that were there have taken the slots"
    hit = ask(prompt, 1)
    scheduler.add(hit)
    turn(scheduler, model)
    assert hit.cached >= 28
    drain(scheduler, model)


@pytest.mark.parametrize("missing", range(6))
def test_how_far_a_prefix_is_found_whichever_slot_is_missing(missing: int) -> None:
    """Windows reach back 2 pages: without page m's slot, depths m + 1 and m + 2 are lost, and the next is found."""
    pool = WindowedPool(6, 6, behind=2)
    links: list[tuple[int, bytes]] = []
    table = pool.take(6)
    for n, page in enumerate(table):
        ids = pack([n] * 4)
        links.append((pool.hasher(links[-1][0] if links else 0, ids, ("", "")), ids))
        assert pool.publish(page, *links[-1], table[n - 1] if n else -1, ("", "")) == page
    pool.unpin(table)
    assert pool.match(links, ("", "")) == table
    pool._lose(table[missing])
    depth = 6 if missing < 4 else missing
    assert pool.match(links, ("", "")) == table[:depth]
    pool.check([table])
    pool.check_slots([])


def test_no_copy_of_a_page_without_a_slot() -> None:
    scheduler, model = start(pages=40, slots=4)
    for tokens in ([1, 2, 3], [*range(10, 40)]):
        scheduler.add(ask(tokens, 1))
        drain(scheduler, model)
    s = ask([1, 2, 3], 1)
    scheduler.add(s)
    batch = scheduler.schedule()
    assert batch is not None and batch.copies == [] and s.cached == 0
    scheduler.commit(batch, model.run(batch))
    scheduler.check()


def test_a_copied_page_brings_what_all_layers_have() -> None:
    scheduler, model = start(pages=9, slots=3, max_num_seqs=1)
    scheduler.add(ask([1, 2, 3], 1))
    drain(scheduler, model)
    s = ask([1, 2, 3, 4, 5], 20)
    scheduler.add(s)
    drain(scheduler, model)
    assert s.cached == 3 and said(s) == answer([1, 2, 3, 4, 5], 0, 20)


def test_who_would_find_no_slots_waits() -> None:
    """Two would take slots from each other; one after the other, none starts again."""
    scheduler, model = start(pages=40, slots=4)
    both = [ask([n] * 12, 8, seed=n) for n in range(2)]
    for s in both:
        scheduler.add(s)
    turn(scheduler, model)
    assert (scheduler.running, scheduler.waiting) == (1, 1)
    drain(scheduler, model)
    assert [s.preemptions for s in both] == [0, 0]


def test_a_step_that_fails_gives_its_slots_back() -> None:
    scheduler, model = start(pages=20, slots=8)
    scheduler.add(ask(range(12), 4))
    for _ in range(3):
        before = scheduler.slots
        batch = scheduler.schedule()
        assert batch is not None and scheduler.slots != before
        scheduler.undo(batch)
        scheduler.check()
    drain(scheduler, model)


def test_rejected_drafts_leave_the_window_of_what_was_accepted() -> None:
    scheduler, model = start(pages=12, slots=8)
    s = ask(range(7), 12)
    scheduler.add(s)
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.draft(batch, [(i, (39,) * 7) for i in batch.items if i.sample and i.count == 1])
        scheduler.check()
        scheduler.commit(batch, model.run(batch))
        scheduler.check()
    assert said(s) == answer([*range(7)], 0, 12)


@pytest.mark.parametrize("changes", [{"slots": 2}, {"slots": 0}, {"slots": 9, "kv_cache": False}])
def test_windows_that_cannot_be_kept_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(SettingError) as caught:
        small(8, **{"window": 6, "max_num_batched_tokens": 64, **changes})
    assert caught.value.param == "slots"
    assert small(8, window=6, slots=3).window_pages == 3


def test_models_without_windows_know_no_slots() -> None:
    scheduler = Scheduler(Limits(4, 16, 64, 8))
    assert scheduler.slot_of is None and scheduler.slots == (0, 0) and type(scheduler.pool) is not WindowedPool
    assert NONE < 0


def test_a_prefix_comes_from_the_store_through_few_slots() -> None:
    """Of a prompt of seven pages all lie in the store; three slots do, as those before the window let go of theirs."""
    store, prompt = Keeper(), [*range(1, 30)]
    limits = small(20, window=6, slots=3)
    for _ in range(2):
        scheduler = Scheduler(limits, store=store)
        store.model = model = PagedModel(limits, slot_of=scheduler.slot_of)
        s = ask(prompt, 8)
        scheduler.add(s)
        while scheduler.has_work:
            turn(scheduler, model)
            store.write()
        assert said(s) == answer(prompt, 0, 8)
    assert (s.cached, scheduler.loaded) == (28, 28)


def test_a_page_that_lost_its_slot_is_not_kept() -> None:
    scheduler, model = start(pages=20, slots=3)
    pool = scheduler.pool
    assert isinstance(pool, WindowedPool)
    s = ask(range(8), 30)
    scheduler.add(s)
    turn(scheduler, model)
    first, name = s.pages[0], pool.name(s.pages[0])
    assert name is not None and pool.name(first) is name
    while pool.slot_of[first] != NONE:
        turn(scheduler, model)
    assert pool.name(first) is None
    drain(scheduler, model)
    again = ask([*range(8), 1], 1)
    scheduler.add(again)
    drain(scheduler, model)
    assert pool.whole(first) and pool.name(first) not in (None, name), "in another slot it has another name"


def test_who_still_grows_into_its_window_has_slots_kept_back() -> None:
    """The second would find slots for its prompt, and lose them to the first one's next page."""
    scheduler, model = start(pages=40, slots=4)
    both = [ask([1, 2], 8), ask([9] * 12, 8)]
    for s in both:
        scheduler.add(s)
    drain(scheduler, model)
    assert [s.preemptions for s in both] == [0, 0]


def test_who_has_a_whole_window_gives_a_slot_for_each_that_it_takes() -> None:
    """So nothing is kept back for it: all slots but one chunk's are in windows."""
    scheduler, model = start(pages=60, slots=4 * 3 + 1, max_num_batched_tokens=64)
    crowd = [ask([n] * 16, 20, seed=n) for n in range(4)]
    for s in crowd[:3]:
        scheduler.add(s)
    turn(scheduler, model)
    scheduler.add(crowd[3])
    turn(scheduler, model)
    assert scheduler.running == 4
    drain(scheduler, model)
    assert [s.preemptions for s in crowd] == [0, 0, 0, 0]


def test_nothing_is_loaded_into_a_slot_that_is_still_to_be_copied() -> None:
    """A page is copied in the step, and what comes from the store is written before it: so it waits for the next."""
    store, prompt = Keeper(), [*range(1, 30)]
    limits = small(40, window=6, slots=6)
    for last in (False, True):
        scheduler = Scheduler(limits, store=store)
        store.model = model = PagedModel(limits, slot_of=scheduler.slot_of)
        if not last:
            scheduler.add(ask(prompt, 2))
        else:
            scheduler.add(ask([31, 32, 33], 1))
            drain(scheduler, model)
            both = [ask([31, 32, 33, 34, 35], 6), ask(prompt, 6)]
            for s in both:
                scheduler.add(s)
            batch = scheduler.schedule()
            assert batch is not None and len(batch.copies) == 1 and len(batch.items) == 1
            scheduler.commit(batch, model.run(batch))
        while scheduler.has_work:
            turn(scheduler, model)
            store.write()
    assert [said(s) for s in both] == [answer([31, 32, 33, 34, 35], 0, 6), answer(prompt, 0, 6)]
    assert both[1].cached == 28, "nothing of it is computed again"
