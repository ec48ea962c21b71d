"""Who runs next, on which pages, and what a step's outcome does to them.

Owes: `schedule` and `commit` around each step, admission, preemption by recompute, the ends of sequences, and the
invariants that `check` executes. Does not know: tensors, text, clocks, how a step is run.

A step has room for `max_num_batched_tokens`. Sequences that lack one token come first, in the order of their ranks:
that of admission, as far as priority leaves it. Then those that lack more get chunks; then waiting ones are admitted,
as `Waiting` orders them. A chunk that fills the step leaves up to half of it to shorter prompts behind, so that these
need not wait for the end of a long one. While some decode, a `Pace` may make the step smaller, so that they need not
wait long for their next token; `LEAST` tokens stay for the others. Whoever lacks a page takes it from the last in
order of rank, which starts again later, mostly from the prefix cache. Where layers have windows, a page is to be had
only with a slot (`core/windows.py`); a sequence alone needs no more of either than there are.

Every accepted sequence ends. The first in order never yields, so each step brings it nearer its end, unless one of
lower rank is admitted, and of those there are only so many: some sequence ends, time and again. Who waits is passed
over by so many at most, and then, if it lacks pages, nobody is admitted until the others' ends have freed them. So it
is admitted, again after each preemption; and as only so many ever rank before it, it is the first at last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Literal

from headrace.base.errors import ContextTooLong, RequestError, SettingError
from headrace.core.pages import ROOT, Hasher, PagePool, Salt, chain_hash, pack, pages_for
from headrace.core.sequence import Finish, Reason, Sequence
from headrace.core.store import PageStore, chain_digest
from headrace.core.waiting import Waiting
from headrace.core.windows import NONE, WindowedPool, window_pages

LOADS = 8  # pages that are filled from the store before a step, at most, if others run in it: they wait for that
LEAST = 16  # tokens of a step that stay for those who lack more than one, whatever the pace

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may use.

    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens in a step. max_model_len: tokens of a
    sequence. pages: pages of `page_size` tokens in the pool.
    batching: "static" fills a batch and starts the next when all of it has ended, for comparison.
    kv_cache: False keeps nothing between steps: each computes whole sequences from position 0, for comparison.
    window: tokens that the layers with the longest window see; they keep a page's part in one of `slots` slots, while
    it is seen. 0: all layers keep it in the page itself.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    pages: int
    page_size: int = 32
    prefix_caching: bool = True
    batching: Literal["continuous", "static"] = "continuous"
    kv_cache: bool = True
    window: int = 0
    slots: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "pages", "page_size"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}.", param=name)
        if self.batching not in ("continuous", "static"):
            raise SettingError(f'batching must be "continuous" or "static", got {self.batching!r}.', param="batching")
        if not self.kv_cache and self.max_num_batched_tokens < self.max_model_len:
            raise SettingError(
                f"Without a KV cache a step computes whole sequences: max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len ({self.max_model_len}).",
                param="max_num_batched_tokens",
            )
        if self.window and not (self.kv_cache and self.slots >= self.window_pages):
            raise SettingError(
                f"A window of {self.window} tokens needs at least {self.window_pages} slots and a KV cache, "
                f"got {self.slots}.",
                param="slots",
            )

    @property
    def window_pages(self) -> int:
        """Pages that a window and the next token lie in, at most."""
        return window_pages(self.window, self.page_size)

    @property
    def context(self) -> int:
        """The most tokens that can be computed for one sequence: the context, or the whole pool."""
        return min(self.max_model_len, self.pages * self.page_size)


@dataclass(slots=True)
class Scheduled:
    """`count` tokens of a sequence from position `start`; `sample`: the last row's logits yield a token.

    draft: the last of these tokens, if they are only guessed: the row before each of them, and its own, yield tokens.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool
    draft: tuple[int, ...] = ()


@dataclass(slots=True)
class Batch:
    """One step's work.

    copies: pages to be copied before the step, in order, before the fresh ones are zeroed.
    fresh: pages newly taken, to be zeroed before the step (one may be named twice).
    preempted: sequences that gave their pages back and wait again. number: counts steps from 0.
    """

    items: list[Scheduled]
    fresh: list[int]
    preempted: list[Sequence]
    number: int
    copies: list[Copy] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Copy:
    """The page `target` of a sequence shall hold what `source` does, whose first `tokens` go for it too.

    slots: of source and target, as they are when this copy's turn comes; () without windows.
    """

    sequence: Sequence
    source: int
    target: int
    tokens: int
    slots: tuple[int, int] | tuple[()] = ()


@dataclass(slots=True)
class Outcome:
    """What a step yielded.

    tokens: a list for each of the batch's items, in order: new tokens of a sampling item (drafts accepted and the one
    after them), [] for others. errors: by sequence id, why that sequence cannot go on. stopped:
    ids of sequences that end with these tokens, as no other may follow; only they may have sampled none.
    """

    tokens: list[list[int]]
    errors: dict[int, str] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)


Pace = Callable[[list[Scheduled], int], int]
"""(single tokens of a step, position from which a chunk would go on) -> how many tokens of chunks may join them."""


class Scheduler:
    """Sequences over time on one pool of pages.

    salt: what the pages' content depends on besides tokens: model, adapter, formats. hasher: see `PagePool`. pace:
    asked when chunks would join single tokens; None leaves them all of the step. store: where full pages are kept too,
    under keys of `chain_digest`, whatever the hasher.
    preemptions, prefix_queries, prefix_hits, loaded: counts since the start; the last three of prompt tokens at first
    admission; loaded ones came from the store.
    """

    def __init__(
        self,
        limits: Limits,
        salt: str = "",
        *,
        hasher: Hasher = chain_hash,
        pace: Pace | None = None,
        store: PageStore | None = None,
    ) -> None:
        self.limits = limits
        self.salt = salt
        self._pace = pace
        known = hasher if store is None else chain_digest
        self._windows: WindowedPool | None = None
        if limits.window:
            self._windows = WindowedPool(limits.pages, limits.slots, limits.window_pages - 1, known)
        self.pool = self._windows or PagePool(limits.pages, known)
        self.preemptions = self.prefix_queries = self.prefix_hits = self.loaded = 0
        self._caching = limits.prefix_caching and limits.kv_cache
        self._store = store if self._caching else None
        self._waiting = Waiting()
        self._running: list[Sequence] = []  # in order of rank
        self._live: dict[int, Sequence] = {}
        self._steps = 0
        self._open: Batch | None = None  # scheduled, not committed
        self._left = 0  # tokens left in the step that is being scheduled
        self._loads = 0  # pages that may still be filled before it, if others run
        self._kept = 0  # of them, for short sequences alone: their ids, once a long chunk has been met
        self._short: set[int] | None = None
        self._places = 0  # admissions left in a static batch
        self._blocked = (-1, 0, 0)  # who did not fit, and how many pages and slots were to be had then

    @property
    def waiting(self) -> int:
        """Sequences without pages: new or preempted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that have been admitted."""
        return len(self._running)

    @property
    def slot_of(self) -> list[int] | None:
        """Of each page the slot of its layers with windows; None without windows."""
        return None if self._windows is None else self._windows.slot_of

    @property
    def slots(self) -> tuple[int, int]:
        """Slots in the windows of those that run, and those kept for prefix hits; none without windows."""
        windows = self._windows
        return (0, 0) if windows is None else (windows.slots - windows.slots_left, windows.slots_cached)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` will return a batch."""
        return bool(self._live)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; RequestError at once if it could never run. Lowers its `max_len` to what fits."""
        assert sequence.id not in self._live and sequence.finish is None and not sequence.pages
        self._refuse_misfit(sequence)
        # The last token drawn is never computed, so it needs no page.
        capacity = self.limits.pages * self.limits.page_size + 1
        sequence.max_len = min(sequence.max_len, self.limits.max_model_len, capacity)
        self._live[sequence.id] = sequence
        self._waiting.add(sequence, self._running)

    def abort(self, sequence_id: int, reason: Reason = "abort") -> bool:
        """End a sequence, whatever it is doing; False if there is none of that id, or no longer."""
        return self.finish(sequence_id, Finish(reason))

    def finish(self, sequence_id: int, finish: Finish) -> bool:
        """End a sequence from outside, as when the text side met a stop string; False if it had ended before."""
        sequence = self._live.get(sequence_id)
        if sequence is None:
            return False
        self._end(sequence, finish)
        return True

    def schedule(self) -> Batch | None:
        """The next step's work; None when there is none. A batch that was never committed is undone first."""
        if self._open is not None:
            self.undo(self._open)
        self._open = batch = Batch([], [], [], self._steps)
        self._left = self.limits.max_num_batched_tokens
        self._loads = LOADS
        others = self._schedule_single(batch)
        if self._pace is not None and batch.items and (others or self._may_admit()):
            rows = self._pace(batch.items, others[0].computed if others else 0)
            self._left = min(self._left, max(rows, LEAST))
        self._short, self._kept = None, 0
        for place, sequence in enumerate(others):
            if self._left and sequence not in batch.preempted:
                self._schedule_chunk(batch, sequence, others[place + 1 :])
        if not batch.preempted:
            self._admit(batch)
        if not batch.items:
            assert not batch.copies, "a page is to be copied, and no step will do so"
            self._open = None
            return None
        self._steps += 1
        return batch

    def draft(self, batch: Batch, guesses: Iterable[tuple[Scheduled, tuple[int, ...]]]) -> None:
        """Let items of the batch that was just scheduled compute guessed tokens besides, as many of each as fit.

        They get what the step has left of rows and pages, and nobody gives way to a guess. What would come after the
        end of a sequence is left out. Items: those that lack one token and draw; other guesses take the place of those
        that they have.
        """
        assert batch is self._open
        for item, tokens in guesses:
            sequence = item.sequence
            assert item.sample and item.count == 1 + len(item.draft) and self.limits.kv_cache
            self._left += len(item.draft)
            item.draft, item.count, end = (), 1, item.start + 1
            most = min(self._left, sequence.max_len - end - 1, self._room(sequence) - end)
            most = next(
                (n for n, token in enumerate(tokens[:most]) if token in sequence.stop_ids), min(most, len(tokens))
            )
            if most > 0:
                item.draft = tokens[:most]
                item.count += most
                self._left -= most
                self._grow(batch, sequence, end + most)
            self._trim(sequence, end + max(most, 0))

    def commit(self, batch: Batch, outcome: Outcome) -> list[Sequence]:
        """Take in a step's outcome; the sequences that ended by it. Those ended since `schedule` are left alone."""
        assert batch is self._open and len(outcome.tokens) == len(batch.items)
        self._open = None
        size = self.limits.page_size
        slow = not self.limits.kv_cache
        errors, stopped = outcome.errors, outcome.stopped
        ended: list[Sequence] = []
        for item, new in zip(batch.items, outcome.tokens, strict=True):
            sequence = item.sequence
            if sequence.finish is not None:
                continue
            if errors and sequence.id in errors:
                self._fail(sequence, errors[sequence.id])
                ended.append(sequence)
                continue
            sequence.computed = item.start + item.count
            if item.sample and item.count == 1 and len(new) == 1:  # the usual case, in place
                token = new[0]
                tokens = sequence.tokens
                tokens.append(token)
                stops = token in sequence.stop_ids or len(tokens) >= sequence.max_len or sequence.detects
                finish = sequence.ended_by(token) if stops else None
            else:
                assert new or not item.sample or sequence.id in stopped, "a sampling item yielded no token"
                finish = self._accept(sequence, item, new)
            if stopped and sequence.id in stopped and (finish is None or finish.reason == "length"):
                finish = Finish("stop")
            if sequence.computed // size > sequence.hashed:
                self._publish(sequence)
            if finish is not None:
                self._end(sequence, finish)
                ended.append(sequence)
            elif slow:
                self._drop(sequence)
        return ended

    def undo(self, batch: Batch) -> None:
        """Forget a batch whose step failed: nobody has advanced, and pages taken for it are given back."""
        assert batch is self._open
        self._open = None
        for copy in batch.copies:
            self._uncopy(copy)
        for item in batch.items:
            self._trim(item.sequence)

    def check(self) -> None:
        """AssertionError if an invariant does not hold. Numbers as in the design, section 4."""
        both = [*self._waiting, *self._running]
        assert {s.id: s for s in both} == self._live and len(both) == len(self._live), "a sequence is lost"
        assert all(s.finish is None for s in both), "an ended sequence is kept"
        self._waiting.check(self._running)
        assert all(a.rank < b.rank for a, b in pairwise(self._running)), "out of order"
        assert len(self._running) <= self.limits.max_num_seqs
        assert not any(s.pages or s.computed for s in self._waiting), "a waiting sequence holds pages"
        self.pool.check(s.pages for s in self._running)  # 1
        if self._windows is not None:
            self._windows.check_slots(self._seen(s) for s in self._running)
        planned = {id(i.sequence): i.count for i in self._open.items} if self._open else {}
        for copy in self._open.copies if self._open else ():
            assert copy.sequence.finish or copy.target in copy.sequence.pages, "a copy for nobody"
        for sequence in self._running:
            self._check_sequence(sequence, planned.get(id(sequence), 0))

    def _check_sequence(self, sequence: Sequence, planned: int) -> None:
        size = self.limits.page_size
        assert sequence.computed < len(sequence.tokens), "nothing left to compute"  # 2, 4
        assert sequence.prompt_len <= len(sequence.tokens) <= sequence.max_len
        assert len(sequence.pages) == pages_for(sequence.computed + planned, size), "pages held"  # 2
        assert len(set(sequence.pages)) == len(sequence.pages), "a page twice in a table"
        named = [self.pool.is_named(page, self._ids(sequence, i)) for i, page in enumerate(sequence.pages)]  # 3
        count = sum(named)
        assert count * size <= sequence.computed and all(named[:count]), "indexed pages lie wrong"  # 3
        if self._windows is not None:
            first = max(sequence.computed - self.limits.window + 1, 0) // size
            assert all(self._windows.whole(page) for page in sequence.pages[first:]), "a window lacks a page"

    # -- scheduling

    def _schedule_single(self, batch: Batch) -> list[Sequence]:
        """Sequences that lack one token, which decode or end a prompt; the others are returned."""
        others: list[Sequence] = []
        if not self.limits.kv_cache:
            return self._running.copy()
        size = self.limits.page_size
        left = self._left
        items = batch.items
        for sequence in self._running:  # may lose its tail meanwhile
            start = sequence.computed
            end = len(sequence.tokens)
            if end - start != 1:
                others.append(sequence)
                continue
            if start % size == 0 and not self._grow(batch, sequence, end):
                break
            items.append(Scheduled(sequence, start, 1, end < sequence.max_len))
            left -= 1
            if not left:
                break
        self._left = left
        return others

    def _keep_for_short(self, behind: list[Sequence]) -> None:
        """Keep up to half of the step for sequences further back, or waiting for a free place, that it can complete."""
        self._short = set()
        most = self._left // 2
        for sequence in [*behind, *self._waiting.likely(self.limits.max_num_seqs - len(self._running))]:
            needed = len(sequence.tokens) - sequence.computed
            if self._kept + needed <= most:
                self._kept += needed
                self._short.add(sequence.id)

    def _share(self, sequence: Sequence, behind: list[Sequence]) -> int:
        """Tokens of the step that a sequence may have."""
        if self._short is not None and sequence.id in self._short:
            return self._left
        if self._short is None and len(sequence.tokens) - sequence.computed > self._left and self.limits.kv_cache:
            self._keep_for_short(behind)
        return self._left - self._kept

    def _schedule_chunk(self, batch: Batch, sequence: Sequence, behind: list[Sequence]) -> None:
        """As many tokens of a sequence as the step, the pool and, without a cache, its whole length allow.

        behind: running sequences that get their chunks after it.
        """
        if not self._load_next(batch, sequence):
            return
        start = sequence.computed
        end = len(sequence.tokens)
        if not self.limits.kv_cache:
            if end > min(self._left, self._room(sequence)):
                return
        elif self._room(sequence) <= start and not self._grow(batch, sequence, start + 1):
            return
        stop = min(end, start + self._share(sequence, behind), self._room(sequence))
        if stop == start:
            return
        self._grow(batch, sequence, stop)
        self._left -= stop - start
        if self._short is not None and sequence.id in self._short:
            self._kept -= stop - start
        batch.items.append(Scheduled(sequence, start, stop - start, stop == end < sequence.max_len))

    def _room(self, sequence: Sequence) -> int:
        """Positions that its pages and those that nobody uses can hold."""
        return (len(sequence.pages) + self.pool.available) * self.limits.page_size

    def _grow(self, batch: Batch, sequence: Sequence, end: int) -> bool:
        """Give a sequence pages for `end` positions, from the last in order if need be; False if that was itself."""
        missing = pages_for(end, self.limits.page_size) - len(sequence.pages)
        while missing > self.pool.available:
            victim = self._running[-1]
            self._preempt(batch, victim)
            if victim is sequence:
                return False
        if missing > 0:
            taken = self.pool.take(missing)
            sequence.pages += taken
            batch.fresh += taken
        return True

    def _preempt(self, batch: Batch, victim: Sequence) -> None:
        assert len(self._running) > 1, "a sequence that fits the pool has nobody to yield to"
        self._running.pop()
        for place, item in enumerate(batch.items):
            if item.sequence is victim:
                self._left += item.count
                del batch.items[place]
                break
        self._drop(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self._places += 1
        self._waiting.put_back(victim)
        batch.preempted.append(victim)

    # -- admission

    def _admit(self, batch: Batch) -> None:
        static = self.limits.batching == "static"
        if static and not self._running:
            self._places = min(self.limits.max_num_seqs, len(self._waiting))
        while self._left and self._may_admit():
            sequence = self._waiting.first(self._running)
            if (static and not self._places) or not self._take_prefix(batch, sequence):
                break
            self._waiting.admit(sequence)
            self._places -= 1
            insort(self._running, sequence, key=_rank)
            self._schedule_chunk(batch, sequence, [])

    def _may_admit(self) -> bool:
        return bool(self._waiting) and len(self._running) < self.limits.max_num_seqs

    def _take_prefix(self, batch: Batch, sequence: Sequence) -> bool:
        """Give a sequence the pages that are there for it, and a copy of the next one, if there is room for all.

        One page for each running sequence is kept back, lest who is admitted now be preempted at once.
        """
        total = len(sequence.tokens)
        if not self.limits.kv_cache and total > self._left:
            return False
        pages, slots = self.pool.free + self.pool.cached, self._windows.slots_left if self._windows else 0
        blocked, *before = self._blocked
        if (sequence.id == blocked and pages <= before[0] and slots <= before[1]) or self._twin_ahead(sequence):
            return False
        found = self._find_prefix(sequence)
        if not self._fits(total, found):
            self._blocked = (sequence.id, pages, slots)
            return False
        if batch.copies and self._windows is not None and self._kept_after(sequence, len(found)):
            return False  # what it loads now could take a slot that is yet to be copied; to compute it takes longer
        self._blocked = (-1, 0, 0)
        self.pool.share(found)
        if self._windows is not None:
            self._windows.pin(found[self._windows.first_seen(len(found)) :])
        sequence.pages = found
        sequence.moves += 1
        sequence.hashed = len(found)
        sequence.computed = len(found) * self.limits.page_size
        if sequence.preemptions == 0:
            sequence.cached = sequence.computed
            self.prefix_queries += total * self._reuses(sequence)
            self.prefix_hits += sequence.computed
        if self._load_next(batch, sequence) and self._reuses(sequence):
            self._copy_next(batch, sequence)
        return True

    def _fits(self, total: int, found: list[int]) -> bool:
        """Whether `total` tokens, some of them in pages that were found, fit beside those that run."""
        pages, pool, windows = pages_for(total, self.limits.page_size), self.pool, self._windows
        if pool.free + pool.cached - pool.idle_among(found) < pages - len(found) + len(self._running):
            return False
        if windows is None:
            return True
        # Slots of what was found are among those that it will hold at once, whoever holds them now.
        size = self.limits.window_pages
        growing = sum(len(s.pages) < size for s in self._running)  # others let go of a slot for each that they take
        return windows.slots_left >= min(pages - windows.first_seen(len(found)), size) + growing

    def _reuses(self, sequence: Sequence) -> bool:
        return self._caching and not sequence.wants_prompt_logprobs

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        if not self._reuses(sequence):
            return []
        # One token is left to compute, for without it there are no logits.
        full = (len(sequence.tokens) - 1) // self.limits.page_size
        self._extend_chain(sequence, full)
        return self.pool.match(sequence.chain[:full], self._salt(sequence))

    def _kept_after(self, sequence: Sequence, held: int) -> bool:
        """Whether the store has the page of its prefix that comes after `held` pages."""
        if self._store is None or not self._reuses(sequence):
            return False
        full = (len(sequence.tokens) - 1) // self.limits.page_size
        return held < full and sequence.chain[held][0] in self._store

    def _load_next(self, batch: Batch, sequence: Sequence) -> bool:
        """Fill pages, at once, with those of its prefix that the store has next; whether that was all of them for now.

        A page that the step is to copy is never taken for that: one for each running sequence was kept back, and it
        would go last. That is not so of slots: with windows, who would load waits for the step after a copy.
        """
        size, store, held = self.limits.page_size, self._store, len(sequence.pages)
        if store is None or sequence.computed != held * size or not self._reuses(sequence):
            return True
        if batch.copies and self._windows is not None:
            return True
        more = False
        for key, _ in sequence.chain[held : (len(sequence.tokens) - 1) // size]:
            if key not in store or not self.pool.available:
                break
            if more := bool(batch.items) and self._loads == 0:
                break
            pages = self.pool.take(1)
            assert all(copy.source != pages[0] for copy in batch.copies), "a page was taken before it was copied"
            if not store.load(key, pages[0]):
                if self._windows is not None:
                    self._windows.unpin(pages)
                self.pool.give(pages)
                break
            sequence.pages += pages
            self._loads = max(self._loads - 1, 0)
            if self._windows is not None:  # lets go of a slot for the next
                sequence.computed = len(sequence.pages) * size
                self._publish(sequence)
        loaded = (len(sequence.pages) - held) * size
        sequence.computed = len(sequence.pages) * size
        if sequence.preemptions == 0:
            sequence.cached += loaded
            self.prefix_hits += loaded
            self.loaded += loaded
        self._publish(sequence)
        return not more

    def _copy_next(self, batch: Batch, sequence: Sequence) -> None:
        """Give a sequence that holds whole pages of its prefix a copy of one that begins with what comes next."""
        size = self.limits.page_size
        start = sequence.computed
        rest = sequence.tokens[start : min(start + size, len(sequence.tokens) - 1)]
        if not rest:
            return
        before = sequence.pages[-1] if sequence.pages else ROOT
        source, tokens = self.pool.nearest(before, pack(rest), self._salt(sequence), sequence.tenant)
        twin = self._twin_with(sequence, start + len(rest)) if tokens < len(rest) else None
        if twin is not None:
            source, tokens = twin.pages[start // size], len(rest)
        if tokens and self.pool.whole(source):
            slots = self.slot_of
            was = NONE if slots is None else slots[source]
            target = self.pool.take_copy(source)
            sequence.pages.append(target)
            sequence.computed += tokens
            if sequence.preemptions == 0:
                sequence.cached += tokens
                self.prefix_hits += tokens
            both = () if slots is None else (was, slots[target])
            batch.copies.append(Copy(sequence, source, target, tokens, both))

    def _twin_with(self, sequence: Sequence, count: int) -> Sequence | None:
        """Another choice of its request that has computed the same `count` tokens."""
        if sequence.choice == 0:
            return None
        ready = (s for s in self._running if s.request == sequence.request and s.computed >= count)
        return next((s for s in ready if s.tokens[:count] == sequence.tokens[:count]), None)

    def _uncopy(self, copy: Copy) -> None:
        """A copy was not made: its tokens are computed instead."""
        sequence = copy.sequence
        if sequence.finish is None:
            sequence.computed -= copy.tokens
            self._trim(sequence)
            if sequence.preemptions == 0:
                sequence.cached -= copy.tokens
                self.prefix_hits -= copy.tokens

    def _twin_ahead(self, sequence: Sequence) -> bool:
        """Whether another choice of its request is still computing the prompt, a page of it or more."""
        most = sequence.prompt_len - 1
        if sequence.choice == 0 or most < self.limits.page_size or not self._reuses(sequence):
            return False
        return any(s.request == sequence.request and s.computed < most for s in self._running)

    def _refuse_misfit(self, sequence: Sequence) -> None:
        prompt = sequence.prompt_len
        if prompt == 0:
            raise RequestError("The prompt is empty: it must have at least one token.", param="prompt")
        scores = sequence.params.max_tokens == 0
        fits = prompt <= self.limits.context and (scores or prompt < min(self.limits.max_model_len, sequence.max_len))
        if not fits:
            rest = "" if scores else ", and an answer needs room for at least one token more"
            raise ContextTooLong(
                f"This model's maximum context length is {self.limits.context} tokens here. The prompt has {prompt} "
                f"tokens{rest}. Shorten the prompt, or serve with a larger max_model_len and KV cache.",
                param="prompt",
                code="context_length_exceeded",
            )

    # -- after a step

    def _accept(self, sequence: Sequence, item: Scheduled, new: list[int]) -> Finish | None:
        """Append tokens up to the first that ends the sequence, and roll `computed` back over rejected drafts."""
        if not item.sample:
            done = sequence.computed == len(sequence.tokens)
            return Finish("length") if done else None
        finish = None
        for token in new:
            sequence.tokens.append(token)
            finish = sequence.ended_by(token)
            if finish is not None:
                break
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
        self._trim(sequence)
        return finish

    def _publish(self, sequence: Sequence) -> None:
        """Put the pages that have become full into the prefix index, each once."""
        full = sequence.computed // self.limits.page_size
        if self._caching:
            self._extend_chain(sequence, full)
            salt = self._salt(sequence)
            pages = sequence.pages
            for i in range(sequence.hashed, full):
                key, ids = sequence.chain[i]
                kept = self.pool.publish(pages[i], key, ids, pages[i - 1] if i else ROOT, salt, sequence.tenant)
                if kept != pages[i]:
                    pages[i] = kept
                    sequence.moves += 1
            if self._store is not None:
                self._store.offer(sequence.chain, pages, full, self.pool.name)
        if self._windows is not None:
            first, end = self._windows.first_seen(sequence.hashed), self._windows.first_seen(full)
            self._windows.unpin(sequence.pages[first:end])
        sequence.hashed = full

    def _publish_rest(self, sequence: Sequence) -> None:
        """Put the page after the full ones into the index, as its sequence is about to give it back."""
        size = self.limits.page_size
        full, rest = divmod(sequence.computed, size)
        if not rest or not self._caching or not sequence.pages:
            return
        pages, chain, salt = sequence.pages, sequence.chain, self._salt(sequence)
        before, parent = (chain[full - 1][0], pages[full - 1]) if full else (0, ROOT)
        ids = pack(sequence.tokens[full * size : sequence.computed])
        key = self.pool.hasher(before, ids, salt)
        pages[full] = self.pool.publish(pages[full], key, ids, parent, salt, sequence.tenant)

    def _extend_chain(self, sequence: Sequence, full: int) -> None:
        chain = sequence.chain
        salt = self._salt(sequence)
        for i in range(len(chain), full):
            ids = self._ids(sequence, i)
            chain.append((self.pool.hasher(chain[-1][0] if chain else 0, ids, salt), ids))

    def _ids(self, sequence: Sequence, page: int) -> bytes:
        size = self.limits.page_size
        return pack(sequence.tokens[page * size : (page + 1) * size])

    def _salt(self, sequence: Sequence) -> Salt:
        return (self.salt, sequence.salt)

    def _trim(self, sequence: Sequence, end: int | None = None) -> None:
        """Give back the pages beyond position `end`, by default `computed`."""
        held = pages_for(sequence.computed if end is None else end, self.limits.page_size)
        if held < len(sequence.pages):
            self._give(sequence, held)

    def _give(self, sequence: Sequence, held: int) -> None:
        """Give back all pages but the first `held`."""
        if self._windows is not None:
            self._windows.unpin(self._seen(sequence, held))
        self.pool.give(sequence.pages[held:])
        del sequence.pages[held:]
        sequence.moves += 1

    def _seen(self, sequence: Sequence, start: int = 0) -> list[int]:
        """Pages from number `start` on that a running sequence still sees, and so has pinned."""
        assert self._windows is not None
        return sequence.pages[max(self._windows.first_seen(sequence.hashed), start) :]

    def _drop(self, sequence: Sequence) -> None:
        """Give back all pages: the sequence starts again."""
        self._publish_rest(sequence)
        self._give(sequence, 0)
        sequence.computed = sequence.hashed = 0

    def _fail(self, sequence: Sequence, message: str) -> None:
        """End a sequence whose numbers went wrong; what it computed itself must not be found by others."""
        own = sequence.cached // self.limits.page_size
        if own < len(sequence.pages):
            self.pool.forget(sequence.pages[own])
        if self._store is not None:
            for key, _ in sequence.chain[own:]:
                self._store.forget(key)
        self._end(sequence, Finish("error", message=message))

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        sequence.finish = finish
        del self._live[sequence.id]
        if _holds(self._running, sequence):
            del self._running[bisect_left(self._running, sequence.rank, key=_rank)]
        else:
            self._waiting.remove(sequence)
        self._waiting.ended(sequence)
        if self._open is None and finish.reason != "error":  # in an open batch a copy may not have been made yet
            self._publish_rest(sequence)
        self._give(sequence, 0)


def _holds(line: list[Sequence], sequence: Sequence) -> bool:
    place = bisect_left(line, sequence.rank, key=_rank)
    return place < len(line) and line[place] is sequence
