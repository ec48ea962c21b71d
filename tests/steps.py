"""Steps for tests: a small world of sequences with their page tables, fed in any chunks to an executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.backends import Executor
from headrace.program import Sampled, Sampling, Step

PAGE = 32


def sampling(rows: int, vocab: int = 0, **columns: Any) -> Sampling:
    """Greedy for all rows, no lists, no masks, log-probability of the token alone; columns replace the defaults."""
    masks = np.zeros((0, -(-vocab // 32)), np.int32)
    return Sampling.greedy(rows, **{"logprobs": np.zeros(rows, np.int32), "masks": masks, **columns})


@dataclass
class World:
    """Sequences with pages in a shuffled order, fed step by step; every row yields logits, kept by sequence.

    slots: of layers that see `window` tokens; a slot goes back as soon as no row to come sees it, and its place in the
    table stays as it was.
    """

    executor: Executor
    sequences: Sequence[Sequence[int]]
    pages: int
    seed: int = 0
    computed: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    logits: list[list[np.ndarray]] = field(default_factory=list)
    slots: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        self._free = list(np.random.default_rng(self.seed).permutation(self.pages))
        self.computed = [0] * len(self.sequences)
        self._free_slots = list(np.random.default_rng(self.seed).permutation(self.slots))
        self.tables = [[] for _ in self.sequences]
        self.slot_tables: list[list[int]] = [[] for _ in self.sequences]
        self._seen = [0] * len(self.sequences)  # the first page that still has its slot
        self.logits = [[] for _ in self.sequences]

    def step(
        self, counts: Mapping[int, int], taps: tuple[str, ...] = (), copies: Sequence[tuple[int, int]] = ()
    ) -> Sampled:
        """Runs `counts[b]` more tokens of each sequence b named, after copies of pages."""
        tokens, positions, start, context, indptr, pages, fresh = [], [], [0], [], [0], [], []
        slots, new = [], []
        for b, n in counts.items():
            at = self.computed[b]
            tokens += self.sequences[b][at : at + n]
            positions += range(at, at + n)
            start.append(len(tokens))
            context.append(at + n)
            while len(self.tables[b]) * PAGE < at + n:
                self.tables[b].append(self._free.pop())
                fresh.append(self.tables[b][-1])
                if self.slots:
                    self.slot_tables[b].append(self._free_slots.pop())
                    new.append(self.slot_tables[b][-1])
            pages += self.tables[b]
            slots += self.slot_tables[b] if self.slots else []
            indptr.append(len(pages))
            self.computed[b] = at + n
        arrays = (np.asarray(a, np.int32) for a in (tokens, positions, start, context, indptr, pages, fresh))
        rows = np.arange(len(tokens), dtype=np.int32)
        moved = np.array(copies, np.int32).reshape(-1, 2)
        windows = {"window_pages": np.array(slots, np.int32), "window_fresh": np.array(new, np.int32)}
        out = self.executor.run(
            Step(*arrays, rows, sampling(len(rows)), keep_logits=True, taps=taps, copies=moved, **windows)
        )
        for b in counts if self.slots else ():
            self._let_go(b, max(self.computed[b] - self.window + 1, 0) // PAGE)
        assert out.logits is not None
        for b, first, last in zip(counts, start, start[1:], strict=False):
            self.logits[b] += list(out.logits[first:last])
        return out

    def _let_go(self, b: int, first: int) -> None:
        """Nothing to come sees the pages before `first`."""
        self._free_slots += self.slot_tables[b][self._seen[b] : first]
        self._seen[b] = first

    def spoil(self, token: int) -> None:
        """Fill all slots that are free with what `token` leaves there, 16 at a time."""
        free, self._free_slots, pages = self._free_slots, [], self._free
        for at in range(0, len(free), 16):
            some, self._free = free[at : at + 16], list(pages)
            count = len(some) * PAGE
            World(self.executor, [[token] * count], 0, slots=1, window=1)._run_in(self._free, some, count)
        self._free_slots, self._free = free, pages

    def _run_in(self, pages: list[int], slots: list[int], count: int) -> None:
        self._free, self._free_slots = list(pages), list(slots)
        self.step({0: count})

    def feed(self, chunks: Sequence[Mapping[int, int]]) -> list[np.ndarray]:
        """All steps in turn; the logits of each sequence, [its tokens, vocab]."""
        for counts in chunks:
            self.step(counts)
        return [np.stack(rows) for rows in self.logits]
