"""What the scheduler asks of a place where full pages outlive the pool.

Owes: the names that pages have there. Does not know: where that is, what lies in a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from headrace.core.pages import Salt

KEY_BYTES = 32
Chain = Sequence[tuple[int, bytes]]  # of each page, from the first: its key, its ids
Name = Callable[[int], object | None]


def chain_digest(parent: int, ids: bytes, salt: Salt) -> int:
    """Key of a page in its chain: BLAKE2b of all that it depends on, so that equal keys mean equal pages, anywhere."""
    digest = blake2b(parent.to_bytes(KEY_BYTES, "little"), digest_size=KEY_BYTES)
    for part in (ids, *(text.encode("utf-8", "surrogatepass") for text in salt)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


class PageStore(Protocol):
    """Full pages by the keys of their chains. It may lose any of them at any time."""

    def __contains__(self, key: int) -> bool:
        """Whether a page may be had."""
        ...

    def load(self, key: int, page: int) -> bool:
        """Fill a page that nobody else holds; False if that cannot be had any more: anything may lie in it then.

        What fills it is what was offered under `key`, bit for bit.
        """
        ...

    def offer(self, chain: Chain, pages: Sequence[int], count: int, name: Name) -> None:
        """The first `count` pages of a chain are full and in use; what is not there yet may be kept, now or later.

        name: of a page, what the index knows it by: as long as that is the same object, the page has not changed.
        """
        ...

    def forget(self, key: int) -> None:
        """Something is wrong with this page."""
        ...
