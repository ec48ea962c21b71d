"""Pages of the KV cache: who holds them, which are free, and which hold a prefix that can be shared.

Owes: reference counts, and an index from (salt, tokens so far) to the page that holds the last 32 of them, or fewer,
where a sequence ended. Whoever goes on with all of a page's tokens shares it; whoever goes on with the first of them
copies it (`nearest`, `take_copy`). Does not know: what lies in a page, sequences, when to give up a page (it takes the
least recently used idle leaf).

    blank   no reference, nothing worth keeping        --take-->   used, one reference
    idle    no reference, in the prefix index, LRU     --share-->  used     (or --take-->, which forgets it)
    used    as many references as tables hold it       --give-->   idle if in the index, else blank

A sequence's indexed pages are a prefix of its table, and each one's parent is the page before it. So a page in use has
its parent in use, and since tables are given back from their end, children stand before parents in the LRU order:
the oldest idle page is always a leaf.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

Salt = tuple[str, str]
Hasher = Callable[[int, bytes, Salt], int]
ROOT = -1


def chain_hash(parent: int, ids: bytes, salt: Salt) -> int:
    """Hash of a page in its chain: SipHash under a key of the process, as Python does it. A clash only costs a hit."""
    return hash((parent, ids, salt))


def pages_for(tokens: int, size: int) -> int:
    """Pages of `size` tokens that a sequence of so many tokens takes."""
    return -(-tokens // size)


def pack(ids: Iterable[int]) -> bytes:
    """Token ids as int32 bytes: small to keep, quick to compare."""
    return array("i", ids).tobytes()


def alike(a: bytes, b: bytes) -> int:
    """How many token ids two packed lists have in common at their beginning."""
    pairs = zip(memoryview(a).cast("i"), memoryview(b).cast("i"), strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)) // array("i").itemsize)


class PagePool:
    """`pages` pages with reference counts and a prefix index.

    hasher: (parent hash, 4 * 32 bytes of ids, salt) -> int. It only has to be good for speed: a hit also compares
    ids, salt and parent page. taken: how often each page was: while that stays, what was written to it stays of use.
    """

    def __init__(self, pages: int, hasher: Hasher = chain_hash) -> None:
        self.pages = pages
        self.hasher = hasher
        self.taken = [0] * pages
        self._refs = [0] * pages
        self._blank = list(range(pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index: dict[int, int] = {}
        self._keys: list[int | None] = [None] * pages
        self._named: dict[int, tuple[bytes, int, Salt]] = {}  # indexed page -> ids, parent page, salt
        self._owners = [""] * pages
        # Of each page, what follows it: in this order the neighbours of a list of ids begin most like it.
        self._children: dict[int, list[tuple[str, Salt, bytes, int]]] = {}

    @property
    def free(self) -> int:
        """Pages without references that hold nothing."""
        return len(self._blank)

    @property
    def cached(self) -> int:
        """Pages without references that a prefix hit may still find."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Pages that some sequence holds."""
        return self.pages - len(self._blank) - len(self._idle)

    @property
    def available(self) -> int:
        """Pages that `take` can hand out."""
        return len(self._blank) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference each and stale content; the caller has looked at `available`."""
        assert count <= len(self._blank) + len(self._idle), "took more pages than there are"
        taken = []
        for _ in range(count):
            page = self._blank.pop() if self._blank else self._evict()
            self._refs[page] = 1
            self.taken[page] += 1
            taken.append(page)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each of `pages`, which are in use or idle."""
        for page in pages:
            if self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1

    def give(self, pages: list[int]) -> None:
        """One reference less to each page of a table or of its tail; the last page goes first."""
        for page in reversed(pages):
            assert self._refs[page] > 0, "gave a page that nobody holds"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._rest(page)

    def match(self, chain: list[tuple[int, bytes]], salt: Salt) -> list[int]:
        """The pages with the longest known prefix of `chain`, a list of (hash, ids). Takes no reference."""
        found: list[int] = []
        parent = ROOT
        for key, ids in chain:
            page = self._index.get(key)
            if page is None or self._named[page] != (ids, parent, salt):
                break
            found.append(page)
            parent = page
        return found

    def nearest(self, parent: int, ids: bytes, salt: Salt, owner: str = "") -> tuple[int, int]:
        """The page after `parent` that begins most like `ids`, and how many of them it has; (ROOT, 0) if none.

        Only among pages that `owner` published: else one could find out what others wrote, token by token, by asking
        for beginnings of it. Takes no reference.
        """
        children = self._children.get(parent, [])
        at = bisect_left(children, (owner, salt, ids, ROOT))
        best, most = ROOT, 0
        for whose, kind, known, page in children[max(at - 1, 0) : at + 1]:
            if whose == owner and kind == salt and (common := alike(known, ids)) > most:
                best, most = page, common
        return best, most

    def whole(self, page: int) -> bool:
        """Whether all layers have their part of a page, so that it can be copied."""
        return True

    def take_copy(self, source: int) -> int:
        """A page with one reference that is to hold what `source` does; `source` itself if no other was left."""
        if source in self._idle:
            self._idle.move_to_end(source)
        return self.take(1)[0]

    def idle_among(self, pages: Iterable[int]) -> int:
        """How many of `pages` nobody holds: sharing them makes that many less available."""
        return sum(self._refs[page] == 0 for page in pages)

    def publish(self, page: int, key: int, ids: bytes, parent: int, salt: Salt, owner: str = "") -> int:
        """Put a page in use into the index; the page that the caller must hold from now on in its place.

        Its holder writes no more to it: it is full, or about to be given back. owner: see `nearest`. What comes back is
        `page` itself, or one with the same prefix that was there before: then the caller's reference has moved to it. A
        page whose hash clashes, or whose parent is not in the index, stays out of it.
        """
        if parent != ROOT and self._keys[parent] is None:
            return page
        other = self._index.setdefault(key, page)
        if other == page:
            self._keys[page] = key
            self._named[page] = (ids, parent, salt)
            self._owners[page] = owner
            insort(self._children.setdefault(parent, []), (owner, salt, ids, page))
        elif self._named[other] == (ids, parent, salt):
            self.share((other,))
            self.give([page])
            return other
        return page

    def forget(self, page: int) -> None:
        """Take a page, if it is there, and all that follow it out of the index, whoever holds them."""
        doomed = [page] if self._keys[page] is not None else []
        for each in doomed:
            doomed.extend(page for *_, page in self._children.get(each, ()))
        for each in reversed(doomed):
            self._unname(each)
            if self._refs[each] == 0:
                del self._idle[each]
                self._blank.append(each)

    def check(self, tables: Iterable[list[int]]) -> None:
        """AssertionError unless pages, references, index and LRU order agree with each other and with `tables`."""
        held = Counter(page for table in tables for page in table)
        assert all(held[page] == refs for page, refs in enumerate(self._refs)), "references differ from tables"
        away = sorted([*self._blank, *self._idle])
        assert away == [page for page, refs in enumerate(self._refs) if refs == 0], "a page is lost, or in two places"
        assert all((key is not None) == (page in self._named) for page, key in enumerate(self._keys))
        assert {key: page for page, key in enumerate(self._keys) if key is not None} == self._index, "stale index"
        assert not any(page in self._named for page in self._blank), "a blank page is in the index"
        assert all(page in self._named for page in self._idle), "an idle page is not in the index"
        self._check_family()

    def name(self, page: int) -> object | None:
        """What the index knows a page by, None if it does not: the same object only as long as it stays there."""
        return self._named.get(page)

    def is_named(self, page: int, ids: bytes) -> bool:
        """Whether the index holds `page`; asserts that it then does so for `ids`."""
        named = self._named.get(page)
        assert named is None or named[0] == ids, "the index knows a page by other tokens than it holds"
        return named is not None

    def _check_family(self) -> None:
        family: dict[int, list[tuple[str, Salt, bytes, int]]] = {}
        order = {page: place for place, page in enumerate(self._idle)}
        for page, (ids, parent, salt) in self._named.items():
            insort(family.setdefault(parent, []), (self._owners[page], salt, ids, page))
            if parent != ROOT:
                assert parent in self._named, "an indexed page has lost its parent"
                assert self._refs[parent] >= self._refs[page], "a page in use has an idle parent"
                assert order.get(page, -1) < order.get(parent, self.pages), "a parent would go before its child"
        assert family == self._children, "children differ from parents"

    def _rest(self, page: int) -> None:
        if self._keys[page] is None:
            self._blank.append(page)
        else:
            self._idle[page] = None

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._unname(page)
        return page

    def _unname(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        assert page not in self._children, "a page goes before its children"
        self._keys[page] = None
        del self._index[key]
        ids, parent, salt = self._named.pop(page)
        siblings = self._children[parent]
        del siblings[bisect_left(siblings, (self._owners[page], salt, ids, page))]
        if not siblings:
            del self._children[parent]
