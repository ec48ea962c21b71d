"""Pages of models some of whose layers see only a window of the last tokens.

Owes: which pages have a slot, the place where those layers keep a page's part. A page is taken with a slot, which stays
while a running sequence has it in its window (it is pinned); then it is kept as long as the page is in the prefix index
and nobody else needs the slot. The page itself, with the part of layers that see everything, goes its own way: see
`PagePool`. Does not know: positions, what lies in a slot.

    pinned  in the window of as many running sequences as it has pins     --unpin-->  idle if in the index, else free
    idle    may be found by a prefix hit, least recently pinned first     --pin-->    pinned (or, taken by others, none)
    none    the page is shared for its other layers only; never pinned again
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from headrace.core.pages import Hasher, PagePool, Salt, chain_hash, pages_for

NONE = -1


def window_pages(window: int, size: int) -> int:
    """Pages of `size` tokens in which a token and all that it sees lie, at most."""
    return pages_for(window - 1, size) + 1


class WindowedPool(PagePool):
    """A pool of pages with `slots` slots.

    behind: pages that a window reaches back from the beginning of a page. slot_of: of each page; NONE if it has none.
    A page's slot stays the same while it is pinned.
    """

    def __init__(self, pages: int, slots: int, behind: int, hasher: Hasher = chain_hash) -> None:
        super().__init__(pages, hasher)
        self.slots = slots
        self.behind = behind
        self.slot_of = [NONE] * pages
        self._pins = [0] * pages
        self._marks = [object() for _ in range(pages)]  # of each page another one after it lost its name or slot
        self._free_slots = list(range(slots - 1, -1, -1))
        self._idle_slots: OrderedDict[int, None] = OrderedDict()  # pages whose slot nobody needs

    @property
    def available(self) -> int:
        return min(super().available, self.slots_left)

    @property
    def slots_left(self) -> int:
        """Slots that can be had."""
        return len(self._free_slots) + len(self._idle_slots)

    @property
    def slots_cached(self) -> int:
        """Slots that are kept for prefix hits only."""
        return len(self._idle_slots)

    def first_seen(self, depth: int) -> int:
        """The first page that who goes on after `depth` pages still sees."""
        return max(depth - self.behind, 0)

    def take(self, count: int) -> list[int]:
        """As `PagePool.take`, with a pinned slot each."""
        taken = super().take(count)
        for page in taken:
            if not self._free_slots:
                self._lose(next(iter(self._idle_slots)))
            self.slot_of[page] = self._free_slots.pop()
            self._pins[page] = 1
        return taken

    def pin(self, pages: Iterable[int]) -> None:
        """One more that sees `pages`; all have slots."""
        for page in pages:
            assert self.slot_of[page] != NONE, "pinned a page without a slot"
            if self._pins[page] == 0:
                del self._idle_slots[page]
            self._pins[page] += 1

    def unpin(self, pages: Iterable[int]) -> None:
        """One less that sees `pages`; before their references are given back."""
        for page in pages:
            assert self._pins[page] > 0, "unpinned a page that nobody had pinned"
            self._pins[page] -= 1
            if self._pins[page] == 0:
                self._idle_slots[page] = None
                if self._keys[page] is None:
                    self._lose(page)

    def match(self, chain: list[tuple[int, bytes]], salt: Salt) -> list[int]:
        """As `PagePool.match`, no further than to where all that would be seen still has its slots."""
        found = super().match(chain, salt)
        depth = run = 0  # run: pages with slots up to here
        for n, page in enumerate(found, 1):
            run = run + 1 if self.slot_of[page] != NONE else 0
            if run >= n - self.first_seen(n):
                depth = n
        return found[:depth]

    def whole(self, page: int) -> bool:
        return self.slot_of[page] != NONE

    def name(self, page: int) -> object | None:
        """As `PagePool.name`, only as long as the page keeps its slot, too."""
        return self._marks[page] if self._keys[page] is not None and self.slot_of[page] != NONE else None

    def take_copy(self, source: int) -> int:
        if source in self._idle_slots:
            self._idle_slots.move_to_end(source)
        return super().take_copy(source)

    def publish(self, page: int, key: int, ids: bytes, parent: int, salt: Salt, owner: str = "") -> int:
        """As `PagePool.publish`, of a page that its holder alone has pinned: the pin goes along."""
        kept = super().publish(page, key, ids, parent, salt, owner)
        if kept != page:
            self._merge(page, kept)
        return kept

    def check_slots(self, seen: Iterable[list[int]]) -> None:
        """AssertionError unless slots and pins agree with the index and with what running sequences see."""
        pins = Counter(page for pages in seen for page in pages)
        assert all(pins[page] == count for page, count in enumerate(self._pins)), "pins differ from what is seen"
        used = [slot for slot in self.slot_of if slot != NONE]
        assert sorted([*used, *self._free_slots]) == list(range(self.slots)), "a slot is lost, or in two places"
        idle = {page for page, slot in enumerate(self.slot_of) if slot != NONE and not pins[page]}
        assert idle == set(self._idle_slots), "idle slots are others than those without pins"
        assert all(self.slot_of[page] != NONE for page in pins), "what is seen has no slot"
        assert all(self._keys[page] is not None for page in idle), "a slot is kept that nobody can find"

    def _unname(self, page: int) -> None:
        super()._unname(page)
        self._marks[page] = object()
        if page in self._idle_slots:
            self._lose(page)

    def _lose(self, page: int) -> None:
        del self._idle_slots[page]
        self._marks[page] = object()
        self._free_slots.append(self.slot_of[page])
        self.slot_of[page] = NONE

    def _merge(self, page: int, kept: int) -> None:
        """`kept` has what `page` has: it takes its pin, and its slot if it lacks one."""
        self._pins[page] -= 1
        assert self._pins[page] == 0 and self._refs[page] == 0, "a page that others see was taken for another"
        if self.slot_of[kept] == NONE:
            self.slot_of[kept] = self.slot_of[page]
        else:
            self._free_slots.append(self.slot_of[page])
            if self._pins[kept] == 0:
                del self._idle_slots[kept]
        self.slot_of[page] = NONE
        self._pins[kept] += 1
