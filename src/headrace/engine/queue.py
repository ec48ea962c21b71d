"""How much may wait for the engine, and how long until there is room for more.

Owes: counts of what was submitted and has neither ended nor begun to run, exact at any moment; a refusal, with a time
that was measured, of what goes beyond the limits. Does not know: texts, sockets; the engine tells what has begun.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

from headrace.base.errors import CapacityError, DeadlinePassed
from headrace.base.settings import EngineSettings
from headrace.engine.messages import Stats, Terms

REASONS = ("max_num_queued_reqs", "max_num_queued_tokens", "deadline_infeasible")
REQUESTS = 4096  # that may wait, or 64 for each place if that is more
TOKENS = 1 << 22  # of prompts: as Python lists some 150 MB in each of the two processes
SURE = 0.5  # of a predicted time, that it takes at least: the machine may have been slowed down when it was learnt
WINDOW = 30.0  # seconds over which is measured how fast the queue moves
LONGEST = 120.0  # seconds: OpenAI's clients obey no longer wait


@dataclass(slots=True)
class Seat:
    """One request in the queue. tokens: of its prompt. live: choices that have not ended; `waiting` have not begun."""

    terms: Terms
    tokens: int
    live: set[int]
    waiting: int


class Queue:
    """Counts sequences: a request with n = 4 is four.

    places: sequences that may run at once. most: sequences beyond those. most_tokens: prompt tokens of sequences that
    have not begun. A queue in which nothing waits takes any request, however large. step: tokens of a step.
    live, waiting, tokens: sequences that have not ended, not begun; prompt tokens of the latter. refused: by reason.
    """

    def __init__(self, places: int, most: int, most_tokens: int, step: int = 512) -> None:
        self.places, self.most, self.most_tokens, self.step = places, most, most_tokens, step
        self.live = self.waiting = self.tokens = 0
        self.refused: Counter[str] = Counter()
        self._begun: deque[tuple[int, list[int]]] = deque()  # a second, and sequences and tokens that began in it

    @classmethod
    def of(cls, settings: EngineSettings) -> Queue:
        """The queue that the settings ask for."""
        reqs, tokens = settings.max_num_queued_reqs, settings.max_num_queued_tokens
        places = settings.max_num_seqs
        return cls(
            places,
            max(REQUESTS, 64 * places) if reqs is None else reqs,
            TOKENS if tokens is None else tokens,
            settings.max_num_batched_tokens,
        )

    def room(self, sequences: int, tokens: int) -> Room:
        """Room for so many sequences with so many prompt tokens together, or CapacityError(retry_after)."""
        over = self.live + sequences - self.places - self.most
        if over > 0 and self.live >= self.places:
            raise self._full(REASONS[0], self.most, "requests beyond those that run", over, 0)
        over = self.tokens + tokens - self.most_tokens
        if over > 0 and self.tokens:
            raise self._full(REASONS[1], self.most_tokens, "prompt tokens", over, 1)
        self.live += sequences
        self.waiting += sequences
        self.tokens += tokens
        return Room(self, sequences, tokens)

    def _full(self, limit: str, most: int, what: str, over: int, unit: int) -> CapacityError:
        self.refused[limit] += 1
        seconds = self.seconds_until(over, unit)
        return CapacityError(
            f"The queue is full: no more than {most} {what} may wait ({limit}). Try again in {seconds:.0f} s.",
            code="queue_full",
            retry_after=seconds,
        )

    def seconds_until(self, over: int, unit: int) -> float:
        """Until so many sequences (unit 0) or prompt tokens (1) will have begun, at the pace of the last seconds."""
        now = time.monotonic()
        while self._begun and self._begun[0][0] < now - WINDOW:
            self._begun.popleft()
        done = sum(counts[unit] for _, counts in self._begun)
        seconds = over * max(now - self._begun[0][0], 1.0) / done if done else WINDOW
        return min(max(seconds, 1.0), LONGEST)

    def check_deadline(self, terms: Terms, tokens: int, others: Iterable[Seat], stats: Stats) -> None:
        """Refuse a request of so many prompt tokens whose first one cannot come in time; `others` are in the queue.

        DeadlinePassed when the time is over already; CapacityError, without a time to try again.
        """
        left = terms.deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("The request's time was over before it could be queued.")
        seconds = SURE * first_token_seconds(tokens, self._ahead(terms, tokens, others), stats)
        if seconds > left:
            self.refused[REASONS[2]] += 1
            raise CapacityError(
                f"The first token cannot be there in {left * 1000:.0f} ms: the prompt, and what goes before it, take "
                f"at least {seconds * 1000:.0f} ms. Give the request more time, or send it when less is queued.",
                code=REASONS[2],
            )

    def _ahead(self, terms: Terms, tokens: int, others: Iterable[Seat]) -> int:
        """Prompt tokens that are computed first in any case, of the same tenant's, which come in their order.

        A prompt of up to half a step may overtake those that have a place, so it waits only for places.
        """
        before = [s for s in others if s.terms.tenant == terms.tenant and s.terms.priority <= terms.priority]
        waiting = [s.tokens for s in before for _ in range(s.waiting)]
        places = self.places - 1 if 2 * tokens <= self.step else 0
        return sum(waiting[: max(len(waiting) - places, 0)])

    def began(self, seat: Seat) -> None:
        """One sequence of a request has begun to run."""
        if seat.waiting:
            self._release(seat, seat.waiting - 1)
            second = int(time.monotonic())
            if not self._begun or self._begun[-1][0] != second:
                self._begun.append((second, [0, 0]))
            counts = self._begun[-1][1]
            counts[0] += 1
            counts[1] += seat.tokens

    def ended(self, seat: Seat, choice: int) -> None:
        """A choice of a request has ended; both sides may say so."""
        if choice in seat.live:
            seat.live.remove(choice)
            self.live -= 1
            self._release(seat, min(seat.waiting, len(seat.live)))

    def left(self, seat: Seat) -> None:
        """A request is over, whatever it was doing; may be said again."""
        for choice in list(seat.live):
            self.ended(seat, choice)

    def _release(self, seat: Seat, waiting: int) -> None:
        gone = seat.waiting - waiting
        seat.waiting = waiting
        self.waiting -= gone
        self.tokens -= gone * seat.tokens


class Room:
    """Room that is held for the prompts of one request, until they are submitted; what is left is given back."""

    def __init__(self, queue: Queue, sequences: int, tokens: int) -> None:
        self._queue = queue
        self._sequences, self._tokens = sequences, tokens

    def seat(self, terms: Terms, sequences: int, tokens: int) -> Seat:
        """For one prompt of so many tokens and its choices."""
        self._sequences -= sequences
        self._tokens -= sequences * tokens
        assert self._sequences >= 0 and self._tokens >= 0, "more than was asked for"
        return Seat(terms, tokens, set(range(sequences)), sequences)

    def __enter__(self) -> Room:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        queue = self._queue
        queue.live -= self._sequences
        queue.waiting -= self._sequences
        queue.tokens -= self._tokens
        self._sequences = self._tokens = 0


def first_token_seconds(tokens: int, ahead: int, stats: Stats) -> float:
    """Until a prompt of so many tokens has its first one, when `ahead` prompt tokens are computed before it.

    By the rates that the engine has learnt, and the share of prompt tokens that it did not find in its prefix cache.
    0 while nothing is known.
    """
    new = 1 - stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 1.0
    return max(stats.step_time, (ahead + tokens) * new * stats.prompt_token_time)
