"""What each sequence took of the machine, and when: the time of every step, divided among those that were in it.

Owes: that the machine seconds of all accounts, with those of requests that were given up, add up to the seconds that
were charged; and little Python for a step. Does not know: prices, who asks, how a step is run.

While a sequence is open its sums are a row of one array, so that a step adds to all of its sequences at once. Only who
computes more than its next token is looked at by itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.core.scheduler import Scheduled
from headrace.core.sequence import Sequence
from headrace.engine.messages import Account, Chunk
from headrace.runtime.times import StepTimes

KEPT = 256  # chunks of a sequence that are told one by one; later ones are told as one

# Columns of the array: seconds of the machine; decoding steps and their seconds; all steps, and others in them, summed.
_PROMPT, _COMPLETION, _DECODES, _SECONDS, _STEPS, _MATES = range(6)
_NONE = -1
_EVERY = 16  # steps of the same items between looks at their shares, which change slowly

F64 = NDArray[np.float64]


class Open:
    """A sequence that has not ended. Times in time.monotonic seconds, 0: not yet.

    scheduled: when its first step began. first: when its first token was there. counted: its cached tokens have been.
    reached: positions computed before it was preempted. row: of the array, once it has run.
    """

    __slots__ = ("arrival", "chunks", "counted", "first", "most_mates", "reached", "recomputed", "row", "scheduled")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.scheduled = self.first = 0.0
        self.chunks: list[Chunk] = []
        self.most_mates = self.reached = self.recomputed = 0
        self.counted = False
        self.row = _NONE


class Ledger:
    """The accounts of all open sequences: `entries`, by their ids. prompt_seconds, completion_seconds: charged in all.

    aborted_seconds: of these, for sequences that were given up. recomputed: tokens computed again after preemptions.
    """

    def __init__(self, times: StepTimes) -> None:
        self.prompt_seconds = self.completion_seconds = self.aborted_seconds = 0.0
        self.recomputed = 0
        self._times = times
        self.entries: dict[int, Open] = {}
        self._table: F64 = np.zeros((16, 6))
        self._free = list(range(16))[::-1]
        # The step at hand, by item: its row of the array, what is added there, the extents that make its share.
        self._rows: NDArray[np.intp] = np.zeros(0, np.intp)
        self._added: F64 = np.zeros((0, 6))
        self._start = self._count = self._logits = self._shares = np.zeros(0)
        self._age = 0
        self._prompts = False

    def open(self, sequence: Sequence, arrival: float) -> None:
        """A sequence begins to wait. arrival: time.monotonic seconds."""
        self.entries[sequence.id] = Open(arrival)

    def preempted(self, sequence: Sequence) -> None:
        """A sequence has lost its pages: what it had computed, it computes again, or finds."""
        entry = self.entries[sequence.id]
        if sequence.generated:
            entry.reached = len(sequence.tokens) - 1
        elif entry.chunks:
            entry.reached = max(entry.reached, entry.chunks[-1][0] + entry.chunks[-1][1])

    def charge(self, items: list[Scheduled], began: float, seconds: float, owed: float, *, again: bool) -> None:
        """Divide a step's machine time, before its outcome is taken in. again: the last step's items, each one row on.

        began, seconds: when it began, and how long it has taken; owed: what is charged besides.
        """
        if again:
            self._start += 1
            self._age += 1
            if self._prompts:
                self._added[:, _PROMPT], self._added[:, _DECODES] = 0.0, 1.0
                self._prompts = False
        else:
            self._enter(items, began)
            self._age = 0
        if self._age % _EVERY == 0:
            self._shares = self._times.shares(self._start, self._count, self._logits)
        added, shares = self._added, self._shares
        added[:, _COMPLETION] = shares * (seconds + owed)
        added[:, _SECONDS] = seconds
        if self._prompts:
            prompts = self._note_prompts(items, shares, began, seconds)
            self.prompt_seconds += prompts
            self.completion_seconds += seconds + owed - prompts
        else:
            self.completion_seconds += seconds + owed
        self._table[self._rows] += added

    def drop(self, sequence: Sequence) -> None:
        """Nothing more is asked about a sequence, closed or never run."""
        self.entries.pop(sequence.id, None)

    @property
    def extents(self) -> tuple[F64, F64, F64]:
        """Of the step that was charged last, by item: first position, rows, rows of logits."""
        return self._start, self._count, self._logits

    def close(self, sequence: Sequence, now: float) -> Account:
        """The account of a sequence that has ended, told once."""
        entry = self.entries[sequence.id]
        sums = [0.0] * 6
        if entry.row != _NONE:
            sums = self._table[entry.row].tolist()
            self._table[entry.row] = 0.0
            self._free.append(entry.row)
        if sequence.finish is not None and sequence.finish.reason == "abort":
            self.aborted_seconds += sums[_PROMPT] + sums[_COMPLETION]
        first = entry.first or now
        scheduled = entry.scheduled or now
        return Account(
            queue=max(scheduled - entry.arrival, 0.0),
            prefill=first - scheduled,
            decode=now - first,
            chunks=entry.chunks,
            decode_steps=int(sums[_DECODES]),
            step_seconds=sums[_SECONDS],
            prompt_machine=sums[_PROMPT],
            completion_machine=sums[_COMPLETION],
            mean_mates=sums[_MATES] / max(sums[_STEPS], 1.0),
            most_mates=entry.most_mates,
            preemptions=sequence.preemptions,
            recomputed=entry.recomputed,
            cached=sequence.cached,
        )

    def _enter(self, items: list[Scheduled], began: float) -> None:
        """The arrays of a step whose items are not the last one's."""
        entries = [self.entries[item.sequence.id] for item in items]
        mates = len(items) - 1
        for entry in entries:
            if entry.row == _NONE:
                entry.row = self._row()
                entry.scheduled = began
            if entry.most_mates < mates:
                entry.most_mates = mates
        self._rows = np.array([entry.row for entry in entries], np.intp)
        self._start = np.array([item.start for item in items], np.float64)
        self._count = np.array([item.count for item in items], np.float64)
        self._logits = np.array([_logit_rows(item) for item in items], np.float64)
        self._added = np.zeros((len(items), 6))
        self._added[:, _DECODES] = decodes = [_decodes(item) for item in items]
        self._added[:, _STEPS] = 1.0
        self._added[:, _MATES] = mates
        self._prompts = not all(decodes)
        self._times.refresh()

    def _row(self) -> int:
        if not self._free:
            rows = len(self._table)
            self._table = np.concatenate((self._table, np.zeros_like(self._table)))
            self._free = list(range(rows, 2 * rows))[::-1]
        return self._free.pop()

    def _note_prompts(self, items: list[Scheduled], shares: F64, began: float, seconds: float) -> float:
        """Tell the step's chunks, and divide the share of each by its rows; what prompts have of the step in all."""
        added = self._added
        added[:, _SECONDS] *= added[:, _DECODES]
        for i, item in enumerate(items):
            if added[i, _DECODES]:
                continue
            entry = self.entries[item.sequence.id]
            end = item.start + item.count
            of_prompt = min(max(item.sequence.prompt_len - item.start, 0) / item.count, 1.0)
            added[i, _PROMPT] = of_prompt * added[i, _COMPLETION]
            added[i, _COMPLETION] -= added[i, _PROMPT]
            again = max(min(end, entry.reached) - item.start, 0)
            entry.recomputed += again
            self.recomputed += again
            if end >= entry.reached:
                entry.reached = 0
            at = max(began - entry.arrival, 0.0)
            _keep(entry.chunks, (item.start, item.count, seconds, float(shares[i]), len(items) - 1, at))
        return float(added[:, _PROMPT].sum())


def _decodes(item: Scheduled) -> bool:
    """Whether it computes the row of the token drawn last, and what is drafted after it, and nothing else."""
    own = item.count - len(item.draft)
    return own == 1 and item.sample and item.start >= item.sequence.prompt_len


def _logit_rows(item: Scheduled) -> int:
    sequence = item.sequence
    if sequence.wants_prompt_logprobs and item.start < sequence.prompt_len - 1:
        return min(item.count, sequence.prompt_len - 1 - item.start) + item.sample
    return int(item.sample) + len(item.draft)


def _keep(chunks: list[Chunk], chunk: Chunk) -> None:
    if len(chunks) < KEPT:
        chunks.append(chunk)
        return
    start, tokens, seconds, share, mates, at = chunks[-1]
    both = seconds + chunk[2]
    share = (share * seconds + chunk[3] * chunk[2]) / both if both else 0.0
    chunks[-1] = (start, tokens + chunk[1], both, share, max(mates, chunk[4]), at)
