"""What each step did, kept in a ring of bounded size.

Owes: one record a step, as data that can be written as JSON. Does not know: clocks; times are handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headrace.core.scheduler import Batch, Scheduler


@dataclass(slots=True)
class StepRecord:
    """One step.

    items: (sequence id, tokens computed) in batch order. decode_tokens: those at generated positions whose item starts
    there, and those that were guessed; prefill_tokens: all others. drafted_tokens: those that were guessed;
    accepted_tokens: and right. Times in seconds. waiting, running, pages: as they are when it is recorded.
    """

    number: int
    items: tuple[tuple[int, int], ...]
    decode_tokens: int
    prefill_tokens: int
    schedule_s: float
    run_s: float
    commit_s: float
    pages_used: int
    pages_cached: int
    preempted: tuple[int, ...]
    waiting: int
    running: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings."""
        return asdict(self)


class StepTrace:
    """The last `size` steps, oldest first."""

    def __init__(self, size: int = 1024) -> None:
        self._ring: deque[StepRecord] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._ring)

    def add(self, record: StepRecord) -> None:
        """Keep a record; the oldest goes when the ring is full."""
        self._ring.append(record)

    def since(self, number: int) -> list[StepRecord]:
        """Records of step `number` and later that are still kept."""
        return [record for record in self._ring if record.number >= number]

    def record(
        self,
        batch: Batch,
        scheduler: Scheduler,
        *,
        schedule_s: float,
        run_s: float,
        commit_s: float,
        again: bool = False,
        accepted: int = 0,
    ) -> StepRecord:
        """Add the record of a step that has been committed. again: the last one's items, each one row on.

        accepted: drafted tokens that were right.
        """
        if again:
            items = self._ring[-1].items
            tokens = decode = len(items)
            drafted = 0
        else:
            items = tuple([(item.sequence.id, item.count) for item in batch.items])
            tokens = sum([item.count for item in batch.items])
            decode = sum([i.count if i.start >= i.sequence.prompt_len else len(i.draft) for i in batch.items])
            drafted = sum([len(item.draft) for item in batch.items])
        record = StepRecord(
            number=batch.number,
            items=items,
            decode_tokens=decode,
            prefill_tokens=tokens - decode,
            schedule_s=schedule_s,
            run_s=run_s,
            commit_s=commit_s,
            pages_used=scheduler.pool.used,
            pages_cached=scheduler.pool.cached,
            preempted=tuple(sequence.id for sequence in batch.preempted),
            waiting=scheduler.waiting,
            running=scheduler.running,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        )
        self.add(record)
        return record
