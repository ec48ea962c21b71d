"""How bytes of a KV cache become pages and slots: for the engine, which allocates them, and for `headrace plan`.

Owes: both the same figures, to the byte. Does not know: models, requests, what lies in a page.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from headrace.backends import Backend
from headrace.base.settings import PAGE
from headrace.core.pages import pages_for
from headrace.core.windows import window_pages
from headrace.program import Program

LIKELY = 1024  # tokens of a sequence, where nothing else is known


class Room(NamedTuple):
    """Pages, and slots of the layers with windows; 0: these lie in the pages as well."""

    pages: int
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Cache:
    """A KV cache in pages. page_bytes: of one page of 32 tokens over all layers; window_bytes: what layers with windows
    have of that; window: tokens that the longest of them sees; 0: none has one. chunk: rows of a step at most.
    """

    page_bytes: int
    window_bytes: int = 0
    window: int = 0
    chunk: int = 0

    @property
    def token_bytes(self) -> float:
        return self.page_bytes / PAGE

    def slots(self, context: int) -> int:
        """Slots that a sequence of so many tokens holds at most, between steps; 0: it needs none."""
        pages = pages_for(context, PAGE)
        return min(window_pages(self.window, PAGE), pages) if self.window else 0

    def parted(self, context: int) -> bool:
        """Whether layers with windows have slots: with so long a context they let go of pages."""
        return 0 < self.slots(context) < pages_for(context, PAGE)

    def bytes(self, context: int, requests: int = 1) -> int:
        """Of so many requests of `context` tokens each, and of what a step's chunk needs besides."""
        return requests * self.least_bytes(context) + self._spare(context) * self.window_bytes

    def requests(self, memory: int, context: int) -> int:
        """How many requests of `context` tokens fit in `memory` bytes."""
        return max(memory - self._spare(context) * self.window_bytes, 0) // self.least_bytes(context)

    def longest(self, memory: int, context: int) -> int:
        """Tokens, in whole pages, up to `context`, of the longest sequence that fits."""
        return PAGE * bisect_right(range(1, pages_for(context, PAGE)), memory, key=lambda n: self.least_bytes(n * PAGE))

    def likely_bytes(self, sequences: int, context: int) -> int:
        """Of so many sequences of `LIKELY` tokens, and at least of one of `context`."""
        each = min(LIKELY, context)
        spare = self._spare(context) * self.window_bytes
        return max(sequences * self.least_bytes(each) + spare, self.bytes(context))

    def room(self, memory: int, sequences: int, context: int) -> Room | None:
        """The pages and slots that fit in `memory` bytes; None if not even one sequence of `context` tokens does.

        Slots are enough for all sequences and a chunk. But where memory is short they are no more than they would be if
        all had `LIKELY` tokens; and where it is plentiful no less than if all had `context`.
        """
        if memory < self.least_bytes(context):
            return None
        if not self.parted(context):
            return Room(memory // self.page_bytes)
        likely, longest, full = min(LIKELY, context), pages_for(context, PAGE), self.page_bytes - self.window_bytes
        slots = max(sequences * self.slots(likely) + self._spare(context), self._share(memory, context, context))
        slots = min(slots, self._share(memory, likely, context), (memory - longest * full) // self.window_bytes)
        pages = (memory - slots * self.window_bytes) // full if full else sequences * longest
        return Room(pages, slots)

    def least_bytes(self, tokens: int) -> int:
        """Of one sequence of so many tokens, alone."""
        pages = pages_for(tokens, PAGE)
        slots = self.slots(tokens) if self.window else pages
        return pages * (self.page_bytes - self.window_bytes) + slots * self.window_bytes

    def _spare(self, context: int) -> int:
        """Slots that the chunk of a step takes besides."""
        return pages_for(self.chunk, PAGE) if self.parted(context) else 0

    def _share(self, memory: int, tokens: int, context: int) -> int:
        """Slots, if all memory were taken by sequences of so many tokens."""
        spare = self._spare(context)
        return max(memory - spare * self.window_bytes, 0) * self.slots(tokens) // self.least_bytes(tokens) + spare


def cache_of(program: Program, backend: Backend, chunk: int) -> Cache:
    """What the KV cache of a program takes, in steps of up to `chunk` rows."""
    return Cache(backend.page_bytes(program), backend.window_bytes(program), program.window, chunk)
