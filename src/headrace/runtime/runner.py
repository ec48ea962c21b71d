"""One step: a batch becomes arrays, the executor runs them, what was sampled becomes an outcome.

Owes: the arrays of `program.step.Step` for a `core.scheduler.Batch`, built in microseconds, and the log-probabilities
that requests asked for. Does not know: models, formats, text, requests, time.

A sequence that runs holds a slot: a row in arrays that keep what does not change from step to step (sampling settings,
the page table), so that a decoding step gathers rows instead of visiting attributes. Where a step is like the last one,
one row on, its arrays are the last one's, moved on: after a native step the caches are cold, and each call counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backends import Executor
from headrace.base.settings import PAGE
from headrace.core.scheduler import Batch, Outcome, Scheduled
from headrace.core.sequence import NONE_ALLOWED, TOO_COMPLEX, Constraint, Sequence
from headrace.program.step import NO_COPIES, NO_PAGES, Sampled, Sampling, Step

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
Tokens = tuple[int, ...]

NOT_FINITE = (
    "the model's logits are not finite numbers: the weights or the activations overflowed "
    "(keys and values above 65504 do so unless kv_cache_dtype is bfloat16)"
)
_ERRORS = {1: NOT_FINITE, 2: NONE_ALLOWED}

_NO_IDS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token in the raw distribution: log-probability, rank (1 is best); the best ids with theirs, descending."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class StepResult:
    """A step's outcome and, by sequence id, the log-probabilities asked for.

    prompt_logprobs: those of the prompt tokens that this step scored, by their position.
    logits: by (sequence id, position of the row), only if `keep_logits`.
    again: the batch was the last one, each sequence one row on.
    """

    outcome: Outcome
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, dict[int, TokenLogprobs]] = field(default_factory=dict)
    logits: dict[tuple[int, int], F32] = field(default_factory=dict)
    again: bool = field(default=False, compare=False)


class _Slot:
    """What the runner keeps of one running sequence besides its row of the arrays."""

    __slots__ = ("bans", "counted", "counts", "filled", "index", "mask", "moves", "sequence", "static")

    def __init__(self, index: int, sequence: Sequence) -> None:
        self.index = index
        self.sequence = sequence
        self.moves = -1
        self.filled = 0
        p = sequence.params
        self.counts: dict[int, int] | None = None  # of the penalties: id -> times in the output
        if p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty:
            self.counts = dict.fromkeys(sequence.tokens[: sequence.prompt_len], 0)
        self.counted = sequence.prompt_len
        words = p.bad_token_ids or []
        biases = dict(p.logit_bias or {}) | {w[0]: -np.inf for w in words if len(w) == 1}
        self.static = (
            np.fromiter(biases, np.int32, len(biases)),
            np.fromiter(biases.values(), np.float32, len(biases)),
        )
        self.bans = [w for w in words if len(w) > 1]
        self.mask: I32 | None = None  # of the ids that the request allows

    def changes(self) -> bool:
        """Whether what the sampler is told of it may differ at the next token."""
        return self.counts is not None or self.sequence.constraint is not None or self.biased()

    def masked(self) -> bool:
        """Whether some ids are not allowed at all."""
        return self.mask is not None or self.sequence.constraint is not None

    def allow(self, row: I32, constraint: Constraint | None) -> None:
        """Write what may come next as a row of masks: nothing, where the constraint has met a limit."""
        if constraint is None:
            row[:] = -1
        elif not constraint.mask(row):
            row[:] = 0
        if self.mask is not None:
            row &= self.mask

    def biased(self) -> bool:
        s = self.sequence
        return bool(len(self.static[0]) or self.bans or (s.generated < s.params.min_tokens and s.stop_ids))

    def biases(self, ahead: Tokens = ()) -> tuple[I32, F32]:
        """Ids and what their logits gain: the request's own, stop ids before min_tokens, ends of bad words.

        ahead: drafted tokens after the sequence's own.
        """
        s = self.sequence
        banned: set[int] = set(s.stop_ids) if s.generated + len(ahead) < s.params.min_tokens else set()
        for word in self.bans:
            before = len(word) - 1
            if [*s.tokens[max(len(s.tokens) - before, 0) :], *ahead][-before:] == word[:-1]:
                banned.add(word[-1])
        if not banned:
            return self.static
        ids, values = self.static
        keep = ~np.isin(ids, list(banned))
        extra = np.fromiter(sorted(banned), np.int32, len(banned))
        return np.concatenate((ids[keep], extra)), np.concatenate(
            (values[keep], np.full(len(extra), -np.inf, np.float32))
        )

    def penalties(self, ahead: Tokens = ()) -> tuple[I32, I32]:
        """Ids seen in prompt or output, and how often in the output; `ahead` as for `biases`."""
        assert self.counts is not None
        _count(self.sequence.tokens[self.counted :], self.counts)
        self.counted = len(self.sequence.tokens)
        counts = self.counts
        if ahead:
            _count(ahead, counts := counts.copy())
        n = len(counts)
        return np.fromiter(counts, np.int32, n), np.fromiter(counts.values(), np.int32, n)


_Draw = tuple[_Slot, Tokens]
"""A row that draws a token: for whom, and after which drafted tokens."""


class Runner:
    """Runs batches on an executor. vocab: ids that may be sampled. slot_of: see `Scheduler.slot_of`."""

    def __init__(
        self, executor: Executor, *, max_num_seqs: int, context: int, vocab: int, slot_of: list[int] | None = None
    ) -> None:
        self.executor = executor
        self._slot_of = slot_of
        self.keep_logits = False
        self._vocab = vocab
        self._slots: dict[int, _Slot] = {}
        self._free = list(range(max_num_seqs))[::-1]
        self._last: _Rows | None = None  # of a step that the next one may continue
        n = max_num_seqs
        self._table: I32 = np.zeros((n, -(-context // PAGE)), np.int32)
        self._windows: I32 | None = None if slot_of is None else np.zeros_like(self._table)
        f, i = np.float32, np.int32
        self._settings: dict[str, NDArray[Any]] = {
            "temperature": np.zeros(n, f), "top_k": np.zeros(n, i), "top_p": np.zeros(n, f), "min_p": np.zeros(n, f),
            "repetition": np.zeros(n, f), "presence": np.zeros(n, f), "frequency": np.zeros(n, f),
            "seed": np.zeros(n, np.uint64), "choice": np.zeros(n, i), "logprobs": np.zeros(n, i),
        }  # fmt: skip

    def run(self, batch: Batch) -> StepResult:
        """Run a batch that the scheduler made. On an exception no sequence has changed."""
        last, self._last = self._last, None
        again = last is not None and self._moves_on(last, batch)
        rows = last if last is not None and again else self._rows(batch)
        rows.step.keep_logits = self.keep_logits
        sampled = self.executor.run(rows.step)
        if rows.steady:
            self._last = rows
        result = self._result(batch, rows, sampled)
        result.again = again
        return result

    def guessing(self, items: list[Scheduled], fresh: list[int], ahead: int) -> Step:
        """A step of a model that guesses, whose cache has the same page tables.

        Items that sample draw by their settings but for what these say of tokens said before. ahead: positions after
        the items' own that the tables reach to, for the steps that go on from this one.
        """
        which = np.array([self._slot(item.sequence).index for item in items], np.int32)
        draws = np.array([item.sample for item in items])
        tokens: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for item in items:
            end = item.start + item.count
            tokens += item.sequence.tokens[item.start : end]
            positions += range(item.start, end)
            ends.append(len(tokens))
        query = np.array([0, *ends], np.int32)
        context = np.array([item.start + item.count for item in items], np.int32)
        width = -(-(int(context.max()) + ahead) // PAGE)
        table = self._table[which, :width]
        settings = {name: column[which[draws]] for name, column in self._settings.items()}
        settings["logprobs"] = none = np.full(int(draws.sum()), -1, np.int32)
        indptr = np.zeros(len(none) + 1, np.int32)
        return Step(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            query_start=query,
            context=context,
            page_indptr=np.arange(len(items) + 1, dtype=np.int32) * np.int32(table.shape[1]),
            pages=table.reshape(-1),
            fresh=np.array(fresh, np.int32),
            window_pages=NO_PAGES if self._windows is None else self._windows[which, :width].reshape(-1),
            window_fresh=self._fresh_slots(fresh),
            logit_rows=query[1:][draws] - np.int32(1),
            sampling=Sampling(
                **settings,
                position=context[draws],
                target=none,
                bias_indptr=indptr, bias_ids=_NO_IDS, bias_values=_NO_VALUES,
                penalty_indptr=indptr, penalty_ids=_NO_IDS, penalty_counts=_NO_IDS,
                mask_rows=none, masks=np.zeros((0, -(-self._vocab // 32)), np.int32),
            ),
        )  # fmt: skip

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or gives way: its slot is free."""
        slot = self._slots.pop(sequence.id, None)
        if slot is not None:
            self._free.append(slot.index)

    # -- arrays

    def _slot(self, sequence: Sequence) -> _Slot:
        slot = self._slots.get(sequence.id)
        if slot is None:
            slot = self._slots[sequence.id] = _Slot(self._free.pop(), sequence)
            self._fill(slot)
        pages = sequence.pages
        if slot.moves != sequence.moves:
            slot.moves, slot.filled = sequence.moves, 0
        if slot.filled < len(pages):
            self._table[slot.index, slot.filled : len(pages)] = pages[slot.filled :]
            if self._windows is not None and self._slot_of is not None:
                new = [self._slot_of[page] for page in pages[slot.filled :]]  # none: nobody sees the page
                self._windows[slot.index, slot.filled : len(pages)] = np.maximum(new, 0)
            slot.filled = len(pages)
        return slot

    def _fresh_slots(self, fresh: list[int]) -> I32:
        if self._slot_of is None or not fresh:
            return NO_PAGES
        return np.array([s for page in fresh if (s := self._slot_of[page]) >= 0], np.int32)

    def _fill(self, slot: _Slot) -> None:
        s = slot.sequence
        p = s.params
        values = {
            "temperature": p.temperature, "top_k": max(p.top_k, 0), "top_p": p.top_p, "min_p": p.min_p,
            "repetition": p.repetition_penalty, "presence": p.presence_penalty, "frequency": p.frequency_penalty,
            "seed": s.seed & (2**64 - 1), "choice": s.choice, "logprobs": self._wanted(p.logprobs),
        }  # fmt: skip
        for name, value in values.items():
            self._settings[name][slot.index] = value
        if p.allowed_token_ids is not None:
            slot.mask = _bitmask(p.allowed_token_ids, self._vocab)

    def _wanted(self, logprobs: int | None) -> int:
        """`Sampling.logprobs`: -1 for none; a request's -1 asks for all."""
        return -1 if logprobs is None else self._vocab if logprobs == -1 else min(logprobs, self._vocab)

    def _rows(self, batch: Batch) -> _Rows:
        items = batch.items
        slots = [self._slot(item.sequence) for item in items]
        tokens: list[int] = []
        starts: list[int] = []
        ends: list[int] = []  # of rows in the step
        for item in items:
            if item.count == 1:
                tokens.append(item.sequence.tokens[item.start])
            else:
                tokens += item.sequence.tokens[item.start : item.start + item.count]
                tokens += item.draft
            starts.append(item.start)
            ends.append(len(tokens))
        count = len(items)
        query = np.zeros(count + 1, np.int32)
        query[1:] = ends
        start = np.array(starts, np.int32)
        lengths = query[1:] - query[:-1]
        positions = start
        if len(tokens) > count:
            positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(start - query[:-1], lengths)
        context = start + lengths
        width = -(-int(context.max()) // PAGE)
        rows = _logit_rows(items, ends)
        which = [s.index for s in slots]
        rows.slots, rows.pages = slots, self._table[which, :width]
        rows.windows = NO_PAGES if self._windows is None else self._windows[which, :width]
        rows.step = Step(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            query_start=query,
            context=context,
            page_indptr=np.arange(count + 1, dtype=np.int32) * np.int32(width),
            pages=rows.pages.reshape(-1),
            fresh=np.array(batch.fresh, np.int32),
            logit_rows=np.array(rows.row, np.int32),
            sampling=self._sampling(slots, items, rows),
            copies=np.array([(c.source, c.target) for c in batch.copies], np.int32) if batch.copies else NO_COPIES,
            window_pages=rows.windows.reshape(-1),
            window_fresh=self._fresh_slots(batch.fresh),
            window_copies=np.array([c.slots for c in batch.copies if c.slots], np.int32).reshape(-1, 2),
        )
        draws = len(tokens) == len(rows.item) == count and max(rows.target) < 0
        rows.steady = draws and not any(s.changes() for s in slots)
        if rows.steady:
            rows.sequences = [item.sequence for item in items]
        return rows

    def _moves_on(self, last: _Rows, batch: Batch) -> bool:
        """Make the last step's arrays this one's, if the same sequences each compute one row more and draw again."""
        if batch.copies:
            return False
        starts = [item.start for item in batch.items if item.sample and item.count == 1]
        if [item.sequence for item in batch.items] != last.sequences or starts != [p + 1 for p in last.position]:
            return False
        for row, slot in enumerate(last.slots):
            sequence = slot.sequence
            if slot.moves != sequence.moves or slot.filled != len(sequence.pages):
                if len(sequence.pages) > last.pages.shape[1]:
                    return False
                index, width = self._slot(sequence).index, last.pages.shape[1]
                last.pages[row] = self._table[index, :width]
                if self._windows is not None:
                    last.windows[row] = self._windows[index, :width]
        step = last.step
        step.tokens[:] = [sequence.tokens[-1] for sequence in last.sequences]
        for counter in (step.positions, step.context, step.sampling.position):
            counter += 1
        step.fresh = np.array(batch.fresh, np.int32) if batch.fresh else _NO_IDS
        step.window_fresh = self._fresh_slots(batch.fresh)
        step.copies = step.window_copies = NO_COPIES
        last.position = starts
        return True

    def _sampling(self, slots: list[_Slot], items: list[Scheduled], rows: _Rows) -> Sampling:
        which = np.array([slots[i].index for i in rows.item], np.int32)
        settings: dict[str, NDArray[Any]] = {name: column[which] for name, column in self._settings.items()}
        target = np.full(len(which), -1, np.int32)
        for r, (i, token) in enumerate(zip(rows.item, rows.target, strict=True)):
            if token >= 0:
                target[r] = token
                settings["logprobs"][r] = self._wanted(items[i].sequence.params.prompt_logprobs)
        rows.scored = bool(len(which)) and int(settings["logprobs"].max()) >= 0
        own = [
            (slots[i], items[i].draft[:ahead]) if ahead >= 0 else None
            for i, ahead in zip(rows.item, rows.ahead, strict=True)
        ]
        bias = _csr([d[0].biases(d[1]) if d and d[0].biased() else None for d in own], np.float32)
        penalty = _csr([d[0].penalties(d[1]) if d and d[0].counts is not None else None for d in own], np.int32)
        mask_rows, masks = _masks(own, self._vocab)
        rows.constrained = [r for r, d in enumerate(own) if d and d[0].sequence.constraint is not None]
        return Sampling(
            **settings,
            position=np.array(rows.position, np.int32) + np.int32(1),
            target=target,
            bias_indptr=bias[0], bias_ids=bias[1], bias_values=bias[2],
            penalty_indptr=penalty[0], penalty_ids=penalty[1], penalty_counts=penalty[2],
            mask_rows=mask_rows, masks=masks,
        )  # fmt: skip

    # -- results

    def _result(self, batch: Batch, rows: _Rows, out: Sampled) -> StepResult:
        drawn = out.tokens.tolist()
        if rows.steady:
            tokens = [[token] for token in drawn]
        else:
            tokens = [[] for _ in batch.items]
            for r, i in enumerate(rows.item):
                if rows.target[r] < 0:
                    tokens[i].append(drawn[r])
        result = StepResult(Outcome(tokens))
        if rows.drafted:
            _drop_rejected(batch.items, rows, tokens, out.status.tolist())
        for r, status in enumerate(out.status.tolist()):
            if status and rows.counts(r, tokens):
                sequence = batch.items[rows.item[r]].sequence
                result.outcome.errors.setdefault(sequence.id, _ERRORS[status])
        for r in rows.constrained:
            i = rows.item[r]
            if rows.counts(r, tokens):
                _walk(batch.items[i].sequence, tokens[i], max(rows.ahead[r], 0), result.outcome)
        if rows.scored:
            self._logprobs(batch, rows, out, result)
        if out.logits is not None:
            for r, i in enumerate(rows.item):
                if rows.counts(r, tokens):
                    result.logits[batch.items[i].sequence.id, rows.position[r]] = out.logits[r]
        return result

    def _logprobs(self, batch: Batch, rows: _Rows, out: Sampled, result: StepResult) -> None:
        wanted = rows.step.sampling.logprobs.tolist()
        for r, i in enumerate(rows.item):
            if wanted[r] < 0 or not rows.counts(r, result.outcome.tokens):
                continue
            n = wanted[r]
            top = zip(out.top_ids[r, :n].tolist(), out.top_logprobs[r, :n].tolist(), strict=True)
            entry = TokenLogprobs(
                int(out.tokens[r]), float(out.logprob[r]), int(out.rank[r]), tuple((t, x) for t, x in top if t >= 0)
            )
            sequence = batch.items[i].sequence
            if rows.target[r] >= 0:
                result.prompt_logprobs.setdefault(sequence.id, {})[rows.position[r] + 1] = entry
            else:
                result.logprobs.setdefault(sequence.id, []).append(entry)


class _Rows:
    """The rows whose logits are wanted: place in the step, item, position, and the token to score (-1: sample).

    ahead: drafted tokens that the row comes after; -1 where a token is scored. drafted: some row has any. slots,
    pages, windows [items, width]: of the items. steady: each item has one row and draws by settings that stay, so that
    the next step may continue this one, with the same `sequences`. scored: somebody wants log-probabilities.
    constrained: rows whose sequences have a constraint.
    """

    __slots__ = (
        "ahead",
        "constrained",
        "drafted",
        "item",
        "pages",
        "position",
        "row",
        "scored",
        "sequences",
        "slots",
        "steady",
        "step",
        "target",
        "windows",
    )

    def __init__(self) -> None:
        self.scored = self.steady = self.drafted = False
        self.constrained: list[int] = []
        self.sequences: list[Sequence] = []
        self.slots: list[_Slot]
        self.pages: I32
        self.windows: I32
        self.row: list[int] = []
        self.item: list[int] = []
        self.position: list[int] = []
        self.target: list[int] = []
        self.ahead: list[int] = []
        self.step: Step

    def add(self, row: int, item: int, position: int, target: int, ahead: int) -> None:
        self.row.append(row)
        self.item.append(item)
        self.position.append(position)
        self.target.append(target)
        self.ahead.append(ahead)

    def counts(self, r: int, tokens: list[list[int]]) -> bool:
        """Whether what the row gave is of use: all that was drafted before it was right. tokens: left of each item."""
        ahead = self.ahead[r]
        return ahead <= 0 or ahead < len(tokens[self.item[r]])


def _drop_rejected(items: list[Scheduled], rows: _Rows, tokens: list[list[int]], status: list[int]) -> None:
    """Leave of each item's tokens those whose row came after right guesses only.

    A row without a right token ends them too: it will be the first of the next step, and speak for itself.
    """
    for r, (i, ahead) in enumerate(zip(rows.item, rows.ahead, strict=True)):
        if (
            ahead > 0
            and ahead < len(tokens[i])
            and (status[r] or status[r - 1] or tokens[i][ahead - 1] != items[i].draft[ahead - 1])
        ):
            del tokens[i][ahead:]


def _walk(sequence: Sequence, tokens: list[int], at: int, outcome: Outcome) -> None:
    """Take the token at `at` of those that were drawn into the sequence's constraint; drop what cannot follow.

    None is left where only an end was possible.
    """
    constraint = sequence.constraint
    assert constraint is not None
    error = outcome.errors.get(sequence.id)
    if error == NONE_ALLOWED and constraint.error is None and constraint.complete:
        del outcome.errors[sequence.id]
        outcome.stopped.add(sequence.id)
        tokens.clear()
        return
    if error is None and tokens[at] not in sequence.stop_ids:
        constraint.accept(tokens[at])
        if constraint.stopped:
            outcome.stopped.add(sequence.id)
            del tokens[at + 1 :]
    if constraint.error is not None:
        if at:  # the tokens before it stand; the next step meets the error at once
            del tokens[at:]
        else:
            outcome.errors[sequence.id] = TOO_COMPLEX


def _logit_rows(items: list[Scheduled], ends: list[int]) -> _Rows:
    rows = _Rows()
    for i, item in enumerate(items):
        sequence = item.sequence
        if sequence.wants_prompt_logprobs and item.start < sequence.prompt_len - 1:
            first = ends[i] - item.count - item.start
            for position in range(item.start, min(item.start + item.count, sequence.prompt_len - 1)):
                rows.add(first + position, i, position, sequence.tokens[position + 1], -1)
        if item.draft:
            rows.drafted = True
            for ahead in range(item.count):
                rows.add(ends[i] - item.count + ahead, i, item.start + ahead, -1, ahead)
        elif item.sample:
            rows.add(ends[i] - 1, i, item.start + item.count - 1, -1, 0)
    return rows


def _csr(lists: Iterable[tuple[I32, NDArray[Any]] | None], dtype: type) -> tuple[I32, I32, NDArray[Any]]:
    """(indptr, ids, values) of one list a row; None is empty."""
    lists = list(lists)
    indptr = np.zeros(len(lists) + 1, np.int32)
    if not any(x is not None for x in lists):
        return indptr, _NO_IDS, np.zeros(0, dtype)
    some = [x for x in lists if x is not None]
    np.cumsum([0 if x is None else len(x[0]) for x in lists], out=indptr[1:])
    return indptr, np.concatenate([x[0] for x in some]), np.concatenate([x[1] for x in some]).astype(dtype)


def _masks(draws: list[_Draw | None], vocab: int) -> tuple[I32, I32]:
    rows = np.full(len(draws), -1, np.int32)
    some = [(r, d) for r, d in enumerate(draws) if d is not None and d[0].masked()]
    masks = np.zeros((len(some), -(-vocab // 32)), np.int32)
    walk: Constraint | None = None
    for at, (r, (slot, ahead)) in enumerate(some):
        rows[r] = at
        walk = _follow(slot.sequence.constraint, walk, ahead)
        slot.allow(masks[at], walk)
    return rows, masks


def _follow(constraint: Constraint | None, walk: Constraint | None, ahead: Tokens) -> Constraint | None:
    """The constraint after drafted tokens. walk: the same after all of them but the last.

    A copy goes on where a draft begins: what a wrong draft meets must not stay with the sequence.
    """
    if constraint is None or not ahead:
        return constraint
    if len(ahead) == 1:
        walk = constraint.copy()
    assert walk is not None
    walk.accept(ahead[-1])
    return walk


def _count(tokens: Iterable[int], counts: dict[int, int]) -> None:
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1


def _bitmask(ids: list[int], vocab: int) -> I32:
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
