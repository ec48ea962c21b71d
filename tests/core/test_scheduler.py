"""What the scheduler does with one or a few requests; entries of the fault collection replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_model import PagedModel, answer, ask, check_batch, drain, said, small, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ContextTooLong, RequestError, SettingError
from headrace.core.scheduler import LEAST, Limits, Outcome, Scheduled, Scheduler
from headrace.core.sequence import Finish, Sequence


def made(limits: Limits, *sequences: Sequence) -> tuple[Scheduler, PagedModel]:
    scheduler = Scheduler(limits)
    for s in sequences:
        scheduler.add(s)
    return scheduler, PagedModel(limits)


# -- chunks, order, modes


def test_decode_comes_before_prompt_chunks() -> None:
    a, b = ask([1] * 6, 8), ask([2] * 20, 2)
    scheduler, model = made(small(pages=16, max_num_batched_tokens=8), a, b)
    seen = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        seen.append([(i.sequence.id - a.id, i.start, i.count, i.sample) for i in batch.items])
        scheduler.commit(batch, model.run(batch))
    assert seen[:4] == [
        [(0, 0, 6, True), (1, 0, 2, False)],
        [(0, 6, 1, True), (1, 2, 7, False)],
        [(0, 7, 1, True), (1, 9, 7, False)],
        [(0, 8, 1, True), (1, 16, 4, True)],
    ]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 120), min_size=1, max_size=8),
    paces=st.lists(st.integers(-5, 60), min_size=1),
    most=st.integers(LEAST, 64),
)
def test_beside_decoding_chunks_keep_the_pace_and_yet_go_on(prompts: list[int], paces: list[int], most: int) -> None:
    asked: list[tuple[int, int]] = []  # single tokens, what the pace allowed

    def pace(singles: list[Scheduled], start: int) -> int:
        assert singles and all(i.count == 1 for i in singles) and start >= 0
        asked.append((len(singles), paces[len(asked) % len(paces)]))
        return asked[-1][1]

    limits = small(pages=400, max_model_len=128, max_num_batched_tokens=most)
    scheduler, model = Scheduler(limits, pace=pace), PagedModel(limits)
    sequences = [ask([n] * length, 6, seed=n) for n, length in enumerate(prompts)]
    for s in sequences:
        scheduler.add(s)
    while scheduler.has_work:
        asked.clear()
        lacking = {s.id: len(s.tokens) - s.computed for s in sequences if s.finish is None}
        free = scheduler.running < limits.max_num_seqs and scheduler.waiting > 0
        batch = scheduler.schedule()
        assert batch is not None
        check_batch(limits, batch)
        singles = [i for i in batch.items if lacking[i.sequence.id] == 1 and i.sequence.computed]
        rest = sum(i.count for i in batch.items) - (asked[0][0] if asked else 0)
        behind = free or any(lacking[i.sequence.id] > 1 for i in batch.items)
        assert len(asked) == bool(singles and behind), "asked once, when chunks might join single tokens"
        if asked and asked[0][0] < most:
            assert 1 <= rest <= max(asked[0][1], LEAST)
        scheduler.commit(batch, model.run(batch))
    assert all(said(s) == answer([n] * s.prompt_len, n, 6) for n, s in enumerate(sequences))


def test_without_anybody_decoding_a_prompt_takes_the_whole_step() -> None:
    s = ask([1] * 40, 1)
    scheduler = Scheduler(small(pages=16, max_num_batched_tokens=32), pace=lambda *_: 0)
    scheduler.add(s)
    batch = scheduler.schedule()
    assert batch is not None and [i.count for i in batch.items] == [32]


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    long, equal, short, late = (ask([n] * length, 2) for n, length in enumerate([200, 200, 3, 2]))
    scheduler, model = made(small(pages=64, max_model_len=256, max_num_batched_tokens=16), long, equal, short)
    seen = []
    for number in range(4):
        batch = scheduler.schedule()
        assert batch is not None
        seen.append([(i.sequence, i.count) for i in batch.items])
        scheduler.commit(batch, model.run(batch))
        if number == 0:
            scheduler.add(late)
    assert seen == [
        [(long, 13), (short, 3)],
        [(short, 1), (long, 13), (late, 2)],
        [(late, 1), (long, 15)],
        [(long, 16)],
    ]
    drain(scheduler, model)


@pytest.mark.parametrize("budget", [1, 2, 3, 31, 32, 33])
def test_chunks_may_be_cut_anywhere(budget: int) -> None:
    s = ask(range(33), 5)
    scheduler, model = made(Limits(4, budget, 64, 4), s)
    drain(scheduler, model)
    assert said(s) == answer(list(range(33)), 0, 5)


def test_smaller_priority_first_then_arrival() -> None:
    late, early, urgent = ask([1] * 4, 1, priority=1), ask([2] * 4, 1, priority=1), ask([3] * 4, 1, priority=0)
    scheduler, model = made(small(max_num_seqs=1), late, early, urgent)
    assert drain(scheduler, model) == [urgent, late, early]


def test_static_batching_lets_nobody_in_until_all_have_ended() -> None:
    limits = small(pages=32, max_num_seqs=2, batching="static")
    sequences = [ask([i], 2 + 3 * (i == 0)) for i in range(5)]
    scheduler, model = made(limits, *sequences[:4])
    together = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        together.append([sequences.index(i.sequence) for i in batch.items])
        scheduler.commit(batch, model.run(batch))
        if len(together) == 1:
            scheduler.add(sequences[4])
    assert together == [[0, 1], [0, 1], [0], [0], [0], [2, 3], [2, 3], [4], [4]]


def test_a_static_batch_is_filled_from_those_who_wait_when_it_starts() -> None:
    limits = small(max_num_seqs=3, batching="static")
    first, second = ask([1], 3), ask([2], 1)
    scheduler, model = made(limits, first)
    turn(scheduler, model)
    scheduler.add(second)
    assert drain(scheduler, model) == [first, second]


def test_nobody_is_admitted_who_would_be_preempted_at_once() -> None:
    scheduler, model = made(small(pages=4), ask([1] * 8, 3), ask([2] * 8, 3))
    turn(scheduler, model)
    assert (scheduler.running, scheduler.waiting) == (1, 1)
    drain(scheduler, model)
    assert scheduler.preemptions == 0


def test_the_room_of_a_preempted_sequence_in_the_step_is_used() -> None:
    """a lacks five tokens and a page; b, already scheduled for one, gives way with its page and its token."""
    limits = small(pages=7, max_num_batched_tokens=4)
    a, b = ask([1] * 8, 50), ask([2] * 9, 50)
    scheduler, _ = made(limits, a, b)
    burst = {a.id: 1, b.id: 1}
    for _ in range(50):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.check()
        if batch.preempted:
            break
        if b.computed >= 4:
            burst[a.id] = 5
        outcome = Outcome([[1] * burst[i.sequence.id] if i.sample else [] for i in batch.items])
        scheduler.commit(batch, outcome)
    assert batch.preempted == [b] and [(i.sequence, i.count) for i in batch.items] == [(a, 4)]


def test_a_sequence_that_gave_way_is_not_scheduled_in_the_same_step() -> None:
    """Both lack several tokens, as after drafts; the first takes the page of the second, whose turn comes later."""
    limits = small(pages=6)
    a, b = ask([1] * 8, 50), ask([2] * 9, 50)
    scheduler, _ = made(limits, a, b)
    burst = {a.id: 3, b.id: 2}
    for _ in range(50):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.check()
        if batch.preempted:
            break
        scheduler.commit(batch, Outcome([[1] * burst[i.sequence.id] if i.sample else [] for i in batch.items]))
    assert batch.preempted == [b] and [i.sequence for i in batch.items] == [a]


def test_without_a_cache_each_step_starts_at_zero() -> None:
    limits = small(pages=16, max_num_batched_tokens=64, kv_cache=False)
    a, b = ask([1] * 5, 3), ask([1] * 5, 3)
    scheduler, model = made(limits, a, b)
    starts = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None and len(batch.fresh) == scheduler.pool.used
        starts += [(i.start, i.count) for i in batch.items]
        scheduler.commit(batch, model.run(batch))
        assert scheduler.pool.used == scheduler.pool.cached == 0
    assert starts == [(0, 5), (0, 5), (0, 6), (0, 6), (0, 7), (0, 7)]
    assert said(a) == said(b) == answer([1] * 5, 0, 3) and a.cached == b.cached == 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pages", {"pages": 0}),
        ("max_num_seqs", {"max_num_seqs": 0}),
        ("batching", {"batching": "other"}),
        ("max_num_batched_tokens", {"kv_cache": False}),
    ],
)
def test_limits_that_cannot_work(name: str, changes: dict[str, object]) -> None:
    with pytest.raises(SettingError) as caught:
        small(**changes)  # type: ignore[arg-type]
    assert caught.value.param == name


# -- prefix cache


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 12])
def test_of_a_known_prompt_only_the_last_token_is_computed(length: int) -> None:
    """Faults entry 20: also where the prompt ends with a page."""
    prompt, known = list(range(length)), length - 1
    cold, warm = ask(prompt), ask(prompt)
    scheduler, model = made(small(pages=16), cold)
    drain(scheduler, model)
    scheduler.add(warm)
    batch = scheduler.schedule()
    assert batch is not None
    assert [(i.start, i.count, i.sample) for i in batch.items] == [(known, 1, True)]
    assert [(c.target, c.tokens) for c in batch.copies] == ([(warm.pages[-1], known % 4)] if known % 4 else [])
    scheduler.commit(batch, model.run(batch))
    drain(scheduler, model)
    assert (cold.cached, warm.cached, said(warm)) == (0, known, said(cold))
    assert (scheduler.prefix_hits, scheduler.prefix_queries) == (known, 2 * length)


def test_whoever_goes_on_otherwise_copies_what_is_alike() -> None:
    """From full pages and from what a sequence left at its end; both stay as they were."""
    first = ask(range(10), 5)
    scheduler, model = made(small(pages=16), first)
    drain(scheduler, model)
    prompts = [[*range(6), 30, 31, 32], [*range(10), 33, 34], first.tokens[:13], [*first.tokens, 35]]
    shared = [6, 10, 12, 14]
    others = [ask(prompt, 3, seed=i) for i, prompt in enumerate(prompts)]
    for s in others:
        scheduler.add(s)
    again = ask(range(10), 5)
    drain(scheduler, model)
    scheduler.add(again)
    drain(scheduler, model)
    assert [s.cached for s in others] == shared and again.cached == 9
    assert [said(s) for s in others] == [answer(p, i, 3) for i, p in enumerate(prompts)]
    assert said(again) == said(first)


def test_a_copy_is_made_although_its_source_is_taken_in_the_same_step() -> None:
    """The pool is so small that what the step takes next is the page that is to be copied."""
    scheduler, model = made(small(pages=2), ask([1, 2, 3], 2))
    drain(scheduler, model)
    warm = ask([1, 2, 9, 8, 7], 3)
    scheduler.add(warm)
    batch = scheduler.schedule()
    assert batch is not None and batch.copies[0].tokens == 2 and batch.copies[0].source in (*batch.fresh, *warm.pages)
    scheduler.commit(batch, model.run(batch))
    drain(scheduler, model)
    assert warm.cached == 2 and said(warm) == answer([1, 2, 9, 8, 7], 0, 3)


def test_a_copy_that_was_not_made_is_not_relied_on() -> None:
    """The step fails, or the sequence is aborted before it: what was to be copied is computed, by others too."""
    first = ask([1, 2, 3], 2)
    scheduler, model = made(small(pages=8), first)
    drain(scheduler, model)
    gone, warm = ask([1, 2, 3, 5]), ask([1, 2, 3, 6], 3)
    for s in (gone, warm):
        scheduler.add(s)
    batch = scheduler.schedule()
    assert batch is not None and [c.tokens for c in batch.copies] == [3, 3]
    model.memory[gone.pages[0]] = model.memory[warm.pages[0]] = [None] * 4
    scheduler.abort(gone.id)
    scheduler.undo(batch)
    scheduler.check()
    assert (warm.computed, warm.cached, scheduler.prefix_hits) == (0, 0, 3)
    again = ask([1, 2, 3, 5], 3, seed=1)
    scheduler.add(again)
    drain(scheduler, model)
    assert said(warm) == answer([1, 2, 3, 6], 0, 3) and said(again) == answer([1, 2, 3, 5], 1, 3)


def test_beginnings_of_pages_are_found_by_their_tenant_only() -> None:
    """Or one could guess another's prompt token by token, as `cached` tells how far one is right."""
    mine, other, guess = ask([1] * 9, tenant="a"), ask([1] * 6, tenant="b"), ask([1] * 6, tenant="a")
    scheduler, model = made(small(pages=32, max_num_seqs=1), mine, other, guess)
    drain(scheduler, model)
    assert (mine.cached, other.cached, guess.cached) == (0, 4, 5)


def test_generated_pages_are_found_too() -> None:
    first = ask([1] * 6, 11)
    scheduler, model = made(small(pages=16), first)
    drain(scheduler, model)
    follow_up = ask([*first.tokens, 3], 2)
    scheduler.add(follow_up)
    drain(scheduler, model)
    assert follow_up.cached == 16 and said(follow_up) == answer([*first.tokens, 3], 0, 2)


def test_a_cold_pair_shares_pages_from_its_first_step_on() -> None:
    prompt = [7] * 9
    a, b = ask(prompt, 8), ask(prompt, 8, seed=1)
    scheduler, model = made(small(pages=16, max_num_batched_tokens=32), a, b)
    moves = b.moves
    turn(scheduler, model)
    assert a.pages[:2] == b.pages[:2] and a.pages[2] != b.pages[2] and b.moves > moves
    drain(scheduler, model)
    assert said(b) == answer(prompt, 1, 8)


def test_further_choices_wait_for_the_prompt_of_the_first() -> None:
    prompt = list(range(10))
    choices = [ask(prompt, 3, request="r", choice=i, seed=i) for i in range(3)]
    scheduler, model = made(small(pages=16, max_num_batched_tokens=32), *choices)
    drain(scheduler, model)
    assert [c.cached for c in choices] == [0, 9, 9], "the last page too, while the first goes on writing to its own"
    assert [said(c) for c in choices] == [answer(prompt, i, 3) for i in range(3)]


def test_prefix_caching_off() -> None:
    a, b = ask([1] * 9), ask([1] * 9)
    scheduler, model = made(small(max_num_seqs=1, prefix_caching=False), a, b)
    drain(scheduler, model)
    assert a.cached == b.cached == 0 and said(a) == said(b) and scheduler.pool.free == 8


def test_salts_keep_tenants_apart() -> None:
    """Faults entry 28."""
    same = [ask([1] * 9, salt=salt) for salt in ("X", "", "X", "Y")]
    scheduler, model = made(small(pages=32, max_num_seqs=1), *same)
    drain(scheduler, model)
    assert [s.cached for s in same] == [0, 0, 8, 0]


def test_a_constant_hash_changes_no_answer() -> None:
    """Faults entry 28."""
    limits = small(pages=16, max_num_seqs=2)
    scheduler, model = Scheduler(limits, hasher=lambda *_: 1), PagedModel(limits)
    sequences = [ask([i % 3] * 9, seed=i) for i in range(7)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler, model)
    assert [said(s) for s in sequences] == [answer([i % 3] * 9, i, 4) for i in range(7)]


@pytest.mark.parametrize("length", [3, 4, 5, 9])
def test_prompt_logprobs_take_nothing_from_the_cache(length: int) -> None:
    """Faults entry 20: every row's logits are needed, each time, in any order."""
    prompt = [1] * length
    scheduler, model = made(small(pages=16), ask(prompt))
    drain(scheduler, model)
    for _ in range(2):
        s = ask(prompt, 1, prompt_logprobs=1)
        scheduler.add(s)
        batch = scheduler.schedule()
        assert batch is not None
        assert [(i.start, i.count) for i in batch.items] == [(0, length)] and s.cached == 0
        scheduler.commit(batch, model.run(batch))
    after = ask(prompt)
    scheduler.add(after)
    drain(scheduler, model)
    assert after.cached == length - 1


# -- ends


def ended(limits: Limits, s: Sequence, force: Callable[[int], int] = lambda i: i) -> Finish:
    """Run a sequence whose i-th token is `force(i)`."""
    scheduler, _ = made(limits, s)
    while (batch := scheduler.schedule()) is not None:
        scheduler.commit(batch, Outcome([[force(s.generated)] if i.sample else [] for i in batch.items]))
        scheduler.check()
    assert s.finish is not None
    return s.finish


def test_stop_ids() -> None:
    s = ask([1], 10, stop_ids=[3], stop_token_ids=[5])
    assert ended(small(), s) == Finish("stop") and said(s) == [0, 1, 2, 3]
    s = ask([1], 10, stop_ids=[7], stop_token_ids=[5])
    assert ended(small(), s) == Finish("stop", 5) and said(s) == [0, 1, 2, 3, 4, 5]


def test_ignore_eos_ignores_the_models_ids_only() -> None:
    s = ask([1], 10, stop_ids=[3], stop_token_ids=[5], ignore_eos=True)
    assert ended(small(), s) == Finish("stop", 5)
    assert ended(small(), ask([1], 10, stop_ids=[3], ignore_eos=True)) == Finish("length")


def test_min_tokens() -> None:
    s = ask([1], 10, stop_ids=[7], min_tokens=4)
    assert ended(small(), s, lambda _: 7) == Finish("stop") and len(said(s)) == 5


@pytest.mark.parametrize("max_tokens", [1, 2, 10])
def test_max_tokens(max_tokens: int) -> None:
    s = ask([1, 2], max_tokens)
    assert ended(small(), s) == Finish("length") and s.generated == max_tokens


@pytest.mark.parametrize("new", [[7], []])
@pytest.mark.parametrize("room", [1, 5])
@pytest.mark.parametrize("cache", [True, False])
def test_what_nothing_can_follow_ends_with_a_stop(new: list[int], room: int, cache: bool) -> None:
    """Also where the last token that was drawn is the last that there is room for, or where none was drawn."""
    a, b = ask([1, 2, 3], room), ask([4, 5], 2)
    scheduler, model = made(small(kv_cache=cache, max_num_batched_tokens=64), a, b)
    batch = scheduler.schedule()
    assert batch is not None
    outcome = model.run(batch)
    outcome.tokens[0], outcome.stopped = new, {a.id}
    assert scheduler.commit(batch, outcome) == [a]
    assert a.finish == Finish("stop") and a.tokens == [1, 2, 3, *new] and b.finish is None
    scheduler.check()
    drain(scheduler, model)
    assert said(b) == answer([4, 5], b.seed, 2)


def test_a_stop_id_as_the_last_token_is_a_stop() -> None:
    assert ended(small(), ask([1], 4, stop_ids=[3])) == Finish("stop")


@pytest.mark.parametrize("length", [1, 7, 16])
def test_scoring_yields_no_token(length: int) -> None:
    """Faults entry 19: max_tokens 0, with a prompt of one token, of many, of the whole context."""
    limits = small(max_model_len=16, max_num_batched_tokens=5)
    s = ask([1] * length, 0, prompt_logprobs=1)
    rows = 0
    scheduler, model = made(limits, s)
    while (batch := scheduler.schedule()) is not None:
        assert not batch.items[0].sample
        rows += batch.items[0].count
        scheduler.commit(batch, model.run(batch))
    assert rows == length and s.finish == Finish("length") and said(s) == []


@pytest.mark.parametrize(
    ("length", "max_tokens", "drawn"),
    [
        *[(15, 0, 0), (15, 1, 1), (15, None, 1), (15, 5, 1), (16, 0, 0), (14, 10**18, 2)],
        *[(16, 1, None), (16, None, None), (17, 0, None), (17, 1, None), (17, None, None)],
    ],
)
def test_the_edge_of_the_context(length: int, max_tokens: int | None, drawn: int | None) -> None:
    """Faults entries 22 and 31: what fits runs to the last place, what does not is refused with the numbers."""
    limits = small(max_model_len=16, pages=9)
    s = ask([1] * length, max_tokens, max_len=16)
    if drawn is None:
        with pytest.raises(ContextTooLong, match="maximum context length is 16") as caught:
            Scheduler(limits).add(s)
        assert str(length) in str(caught.value) and caught.value.code == "context_length_exceeded"
    else:
        assert ended(limits, s) == Finish("length") and s.generated == drawn


def test_an_empty_prompt_is_refused() -> None:
    scheduler = Scheduler(small())
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(ask([]))
    assert not scheduler.has_work


def test_a_prompt_that_the_pool_cannot_hold_is_refused_and_the_next_runs() -> None:
    """Faults entry 23: 12 pages of 16, context 256, 193 ids."""
    limits = Limits(4, 512, 256, 12, page_size=16)
    scheduler, model = Scheduler(limits), PagedModel(limits)
    with pytest.raises(ContextTooLong, match="192 tokens here"):
        scheduler.add(ask([1] * 193))
    for prompt in ([1] * 192, [2] * 5):
        s = ask(prompt)
        scheduler.add(s)
        drain(scheduler, model)
        assert said(s) == answer(prompt, 0, 4)[: len(said(s))] and said(s)


def test_a_lone_sequence_that_fills_the_pool_ends_with_length() -> None:
    """Faults entry 23: the last token drawn needs no page, so there is one more than the pool holds."""
    s = ask([1] * 10, 100)
    scheduler, model = made(small(pages=4), s)
    drain(scheduler, model)
    assert s.finish == Finish("length") and len(s.tokens) == 17 and s.preemptions == 0


def test_filling_the_pool_ends_at_the_same_token_in_company() -> None:
    sequences = [ask([i] * 5, 100, request="r", choice=i, seed=i) for i in range(4)]
    scheduler, model = made(small(pages=4), *sequences)
    drain(scheduler, model)
    assert [said(s) for s in sequences] == [answer([i] * 5, i, 12) for i in range(4)]


def test_a_prefix_pinned_by_another_is_not_counted_as_room() -> None:
    """Faults entry 23, last variant."""
    first = ask([1] * 16, 8)
    scheduler, model = made(small(pages=6, max_num_batched_tokens=64), first)
    turn(scheduler, model)
    second = ask([1] * 16 + [2] * 8, 1)
    scheduler.add(second)
    drain(scheduler, model)
    assert said(first) == answer([1] * 16, 0, 8) and said(second) == answer([1] * 16 + [2] * 8, 0, 1)


# -- aborts and errors


def test_abort_anywhere_gives_everything_back() -> None:
    """Faults entry 25: waiting, first chunk, running, preempted, scheduled, twice, after the end."""
    limits = small(pages=10, max_num_seqs=3)
    for abort_at in range(25):
        scheduler, model = Scheduler(limits), PagedModel(limits)
        crowd = [ask([i % 5] * 12, 10, seed=i) for i in range(12)]
        for s in crowd:
            scheduler.add(s)
        for _ in range(abort_at):
            turn(scheduler, model)
        batch = scheduler.schedule() if abort_at % 2 else None
        for s in crowd:
            assert scheduler.abort(s.id) == (s.finish is None or s.finish.reason == "abort")
            assert not scheduler.abort(s.id)
            scheduler.check()
        if batch is not None:
            assert scheduler.commit(batch, Outcome([[1]] * len(batch.items))) == []
        assert scheduler.waiting == scheduler.running == scheduler.pool.used == 0
        assert scheduler.pool.available == 10 and all(s.pages == [] for s in crowd)
        last = ask([4] * 12, 3)
        scheduler.add(last)
        drain(scheduler, model)
        assert said(last) == answer([4] * 12, 0, 3)


def test_abort_of_a_preempted_sequence() -> None:
    sequences = [ask([i] * 9, 20, seed=i) for i in range(4)]
    scheduler, model = made(small(pages=9), *sequences)
    while not (gone := [s for s in sequences if s.preemptions and not s.pages]):
        turn(scheduler, model)
    assert scheduler.abort(gone[0].id) and gone[0].finish == Finish("abort")
    drain(scheduler, model)
    kept = [i for i, s in enumerate(sequences) if s is not gone[0]]
    assert [said(sequences[i]) for i in kept] == [answer([i] * 9, i, 20) for i in kept]


def test_a_stop_string_found_outside_ends_a_sequence() -> None:
    s = ask([1] * 3, 50)
    scheduler, model = made(small(), s)
    turn(scheduler, model)
    assert scheduler.finish(s.id, Finish("stop", "END")) and not scheduler.finish(s.id, Finish("abort"))
    assert s.finish == Finish("stop", "END") and not scheduler.has_work and scheduler.schedule() is None


def test_an_error_ends_one_sequence_and_its_pages_are_not_found() -> None:
    """Faults entry 56: NaN in one request; the neighbour is untouched; the prefix cache stays clean."""
    limits = small(pages=32, max_num_batched_tokens=8, max_num_seqs=2)
    good, bad = ask([1] * 9, 6, seed=3), ask([1] * 4 + [2] * 13, 6)
    scheduler, model = made(limits, ask([1] * 5, 1))
    drain(scheduler, model)  # the page [1]*4 is known
    scheduler.add(good)
    scheduler.add(bad)
    while bad.finish is None:
        batch = scheduler.schedule()
        assert batch is not None
        outcome = model.run(batch)
        if any(i.sequence is bad and i.sample for i in batch.items):
            assert bad.computed >= 8, "full pages of its own are in the index by now"
            outcome.errors[bad.id] = "logits are not finite"
        scheduler.commit(batch, outcome)
        scheduler.check()
    assert bad.finish == Finish("error", message="logits are not finite") and said(bad) == []
    drain(scheduler, model)
    assert said(good) == answer([1] * 9, 3, 6)
    again = ask([1] * 4 + [2] * 13, 2)
    scheduler.add(again)
    drain(scheduler, model)
    assert again.cached == 4, "only what others had computed"


def test_what_an_error_left_in_a_page_is_not_copied() -> None:
    scheduler, model = made(small(max_num_batched_tokens=2), ask([1] * 4, 2))
    drain(scheduler, model)
    bad = ask([1] * 4 + [2] * 9)
    scheduler.add(bad)
    turn(scheduler, model)
    batch = scheduler.schedule()
    assert batch is not None and bad.computed == 6
    scheduler.commit(batch, Outcome([[]], {bad.id: "logits are not finite"}))
    first, second = ask([1] * 4 + [2] * 2, 1), ask([1] * 4 + [2] * 2 + [3], 1)
    for s, known in ((first, 4), (second, 6)):
        scheduler.add(s)
        drain(scheduler, model)
        assert s.cached == known, "only what others had computed"


def test_a_failed_step_leaves_everybody_where_they_were() -> None:
    sequences = [ask([i] * 7, 6, seed=i) for i in range(3)]
    scheduler, model = made(small(pages=12, max_num_batched_tokens=5), *sequences)
    for turns in range(40):
        if not scheduler.has_work:
            break
        before = [(s.computed, list(s.tokens)) for s in sequences]
        batch = scheduler.schedule()
        assert batch is not None
        if turns % 2:
            if turns % 4 == 1:
                scheduler.undo(batch)  # else the next schedule() does
                scheduler.check()
            assert [(s.computed, s.tokens) for s in sequences] == before
        else:
            scheduler.commit(batch, model.run(batch))
    assert [said(s) for s in sequences] == [answer([i] * 7, i, 6) for i in range(3)]
