"""What of a sequence a drafting model has in its KV cache.

A draft model has pages of its own under the same numbers as the model's: page p of its cache holds the keys and values
of the same tokens as the model's page p, as far as it has computed them. So the scheduler's tables are its tables, a
prefix that is found is found for both, and a rejected guess is taken back by saying less. Does not know: models, steps,
why a page was given to whom.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from headrace.base.settings import PAGE
from headrace.core.pages import PagePool
from headrace.core.scheduler import Batch, Scheduled
from headrace.core.sequence import Sequence


class Held(Protocol):
    """length: tokens of a sequence, from the first, that are there. wrote: those up to position `end` are now, and they
    are the sequence's own. unused: pages that are to be zeroed before these items run, with so many positions after
    theirs."""

    def length(self, sequence: Sequence) -> int: ...

    def wrote(self, sequence: Sequence, end: int) -> None: ...

    def unused(self, batch: Batch, items: Iterable[Scheduled], ahead: int) -> list[int]: ...

    def forget(self, sequence: Sequence) -> None: ...


class Shared:
    """The model's own pages, in which whatever it has computed is there."""

    def length(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - 1

    def wrote(self, sequence: Sequence, end: int) -> None:
        """The model writes the same again."""

    def unused(self, batch: Batch, items: Iterable[Scheduled], ahead: int) -> list[int]:
        return batch.fresh

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class Apart:
    """Pages of its own. pool: whose numbers they go by; what a page held counts until it is taken anew."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._tokens = bytearray(pool.pages)  # of each page, from its first
        self._since = [0] * pool.pages  # the page's `taken` when they were written
        self._whole: dict[int, tuple[int, int]] = {}  # of a sequence: its `moves`, pages known to be full

    def length(self, sequence: Sequence) -> int:
        moves, whole = self._whole.get(sequence.id, (-1, 0))
        if moves != sequence.moves:
            whole = 0
        pages = sequence.pages
        while whole < len(pages) and self._of(pages[whole]) == PAGE:
            whole += 1
        self._whole[sequence.id] = sequence.moves, whole
        return whole * PAGE + (self._of(pages[whole]) if whole < len(pages) else 0)

    def wrote(self, sequence: Sequence, end: int) -> None:
        pages = sequence.pages
        for place in range(self.length(sequence) // PAGE, min(-(-end // PAGE), len(pages))):
            page = pages[place]
            self._tokens[page] = max(self._of(page), min(end - place * PAGE, PAGE))
            self._since[page] = self._pool.taken[page]

    def unused(self, batch: Batch, items: Iterable[Scheduled], ahead: int) -> list[int]:
        """Of the pages that they will write to those that hold nothing."""
        pages: list[int] = []
        for item in items:
            some = item.sequence.pages[item.start // PAGE : (item.start + item.count + ahead - 1) // PAGE + 1]
            pages += [page for page in some if not self._of(page)]
        return pages

    def forget(self, sequence: Sequence) -> None:
        self._whole.pop(sequence.id, None)

    def _of(self, page: int) -> int:
        return self._tokens[page] if self._since[page] == self._pool.taken[page] else 0
