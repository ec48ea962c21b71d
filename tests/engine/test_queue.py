"""What may wait for the engine: exact counts, refusals, and how long until there is room."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.base.errors import CapacityError
from headrace.base.settings import EngineSettings
from headrace.engine.messages import NO_TERMS
from headrace.engine.queue import LONGEST, Queue, Seat


def sit(queue: Queue, sequences: int, tokens: int) -> Seat:
    with queue.room(sequences, sequences * tokens) as room:
        return room.seat(NO_TERMS, sequences, tokens)


class Counts(RuleBasedStateMachine):
    """Requests enter, begin, end and leave in any order; the queue counts as a list of them does."""

    @initialize(places=st.integers(1, 4), most=st.integers(0, 6), tokens=st.integers(1, 60))
    def start(self, places: int, most: int, tokens: int) -> None:
        self.queue = Queue(places, most, tokens)
        self.seats: list[tuple[Seat, int, set[int], set[int]]] = []  # seat, tokens, open choices, begun choices

    def live(self) -> int:
        return sum(len(alive) for _, _, alive, _ in self.seats)

    def tokens(self) -> int:
        return sum(tokens * len(alive - begun) for _, tokens, alive, begun in self.seats)

    @rule(prompts=st.lists(st.integers(1, 30), min_size=1, max_size=3), n=st.integers(1, 3), drops=st.booleans())
    def submit(self, prompts: list[int], n: int, drops: bool) -> None:
        q, live, waiting = self.queue, self.live(), self.tokens()
        full = live >= q.places and live + n * len(prompts) > q.places + q.most
        full = full or bool(waiting and waiting + n * sum(prompts) > q.most_tokens)
        refused = q.refused.total()
        try:
            room = q.room(n * len(prompts), n * sum(prompts))
        except CapacityError as error:
            assert full and error.code == "queue_full" and q.refused.total() == refused + 1
            assert error.retry_after is not None and 1 <= error.retry_after <= LONGEST
            return
        assert not full
        with contextlib.suppress(KeyError), room:
            for tokens in prompts:
                self.seats.append((room.seat(NO_TERMS, n, tokens), tokens, set(range(n)), set()))
                if drops:
                    raise KeyError

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        seat, _, alive, begun = data.draw(st.sampled_from(self.seats))
        if alive - begun:
            begun.add(min(alive - begun))
        self.queue.began(seat)

    @precondition(lambda self: self.seats)
    @rule(data=st.data(), choice=st.integers(0, 2))
    def end(self, data: st.DataObject, choice: int) -> None:
        seat, _, alive, begun = data.draw(st.sampled_from(self.seats))
        if choice in alive and (choice in begun or not begun):  # the engine ends those that run, or all
            alive.discard(choice)
            self.queue.ended(seat, choice)
            self.queue.ended(seat, choice)

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seat, _, alive, _ = data.draw(st.sampled_from(self.seats))
        alive.clear()
        self.queue.left(seat)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "queue"):
            assert self.queue.live == self.live()
            assert self.queue.waiting == sum(len(alive - begun) for _, _, alive, begun in self.seats)
            assert self.queue.tokens == self.tokens()


TestCounts = Counts.TestCase
TestCounts.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_an_empty_queue_takes_any_request() -> None:
    queue = Queue(places=2, most=0, most_tokens=10)
    big = sit(queue, 5, 100)
    with pytest.raises(CapacityError, match="max_num_queued_reqs"):
        queue.room(1, 1)
    queue.left(big)
    assert queue.live == queue.waiting == queue.tokens == 0
    sit(queue, 1, 11)
    with pytest.raises(CapacityError, match="max_num_queued_tokens"):
        queue.room(1, 1)


@given(done=st.integers(1, 100), over=st.integers(1, 500))
def test_how_long_to_wait_is_measured(done: int, over: int) -> None:
    now = 1000.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now)
        queue = Queue(places=1000, most=0, most_tokens=10**6)
        for _ in range(done):
            queue.began(sit(queue, 1, 7))
        now = 1010.0
        assert queue.seconds_until(over, 0) == pytest.approx(min(max(over / done * 10, 1), LONGEST))
        assert queue.seconds_until(over, 1) == pytest.approx(min(max(over / done / 7 * 10, 1), LONGEST))
        now = 1100.0
        assert queue.seconds_until(over, 0) == 30, "nothing moves"


def test_defaults_hold_the_largest_request() -> None:
    assert Queue.of(EngineSettings()).most >= 2048
    assert Queue.of(EngineSettings(max_num_seqs=1000)).most == 64_000
    small = Queue.of(EngineSettings(max_num_seqs=3, max_num_queued_reqs=0, max_num_queued_tokens=9))
    assert (small.places, small.most, small.most_tokens) == (3, 0, 9)
