"""The page pool by itself: places, prefix index, order of eviction."""

from __future__ import annotations

import pytest

from headrace.core.pages import ROOT, PagePool, Salt, chain_hash, pack

NOBODY: Salt = ("", "")


def chain(pool: PagePool, *pages: list[int], salt: Salt = NOBODY) -> list[tuple[int, bytes]]:
    links: list[tuple[int, bytes]] = []
    for ids in pages:
        packed = pack(ids)
        links.append((pool.hasher(links[-1][0] if links else 0, packed, salt), packed))
    return links


def publish(pool: PagePool, table: list[int], links: list[tuple[int, bytes]], salt: Salt = NOBODY) -> list[int]:
    kept: list[int] = []
    for page, (key, ids) in zip(table, links, strict=True):
        kept.append(pool.publish(page, key, ids, kept[-1] if kept else ROOT, salt))
    return kept


def stored(pool: PagePool, *pages: list[int], salt: Salt = NOBODY) -> list[int]:
    """Pages computed, published and given back."""
    table = publish(pool, pool.take(len(pages)), chain(pool, *pages, salt=salt), salt)
    pool.give(table)
    return table


def test_a_page_is_in_one_place() -> None:
    pool = PagePool(3)
    table = pool.take(2)
    assert (pool.free, pool.cached, pool.used) == (1, 0, 2)
    pool.check([table])
    pool.give(table)
    assert (pool.free, pool.cached, pool.used) == (3, 0, 0)
    with pytest.raises(AssertionError):
        pool.give(table)
    with pytest.raises(AssertionError):
        pool.take(4)


def test_check_finds_a_leak() -> None:
    pool = PagePool(3)
    table = pool.take(2)
    with pytest.raises(AssertionError, match="references"):
        pool.check([table[:1]])


def test_freed_pages_keep_their_content_until_taken() -> None:
    pool = PagePool(4)
    table = stored(pool, [1], [2])
    links = chain(pool, [1], [2])
    assert pool.cached == 2 and pool.match(links, NOBODY) == table
    blank = pool.take(2)
    assert pool.match(links, NOBODY) == table, "blank pages are taken first"
    more = pool.take(1)
    assert more == table[1:], "then the leaf"
    assert pool.match(links, NOBODY) == table[:1]
    pool.check([blank, more])


def test_the_least_recently_used_branch_goes_first() -> None:
    pool = PagePool(4)
    old = stored(pool, [1], [2])
    new = stored(pool, [3], [4])
    pool.share(old)
    pool.give(old)
    assert pool.take(2) == [new[1], new[0]]


def test_a_shared_page_stays_until_the_last_gives_it() -> None:
    pool = PagePool(2)
    table = stored(pool, [1])
    pool.share(table)
    pool.share(table)
    pool.give(table)
    assert pool.used == 1
    pool.check([table])
    pool.give(table)
    assert pool.used == 0


def test_twins_become_one() -> None:
    pool = PagePool(4)
    first, second = pool.take(2), pool.take(2)
    links = chain(pool, [1], [2])
    assert publish(pool, first, links) == first
    assert publish(pool, second, links) == first
    pool.check([first, first])
    assert pool.free == 2


def test_salts_do_not_share() -> None:
    """Faults entry 28: a tenant's salt, a model of the same name, and joined strings all differ."""
    pool = PagePool(8)
    stored(pool, [1], salt=("X", ""))
    for salt in (("", "X"), ("", ""), ("X", "X")):
        assert pool.match(chain(pool, [1], salt=salt), salt) == []
    assert pool.match(chain(pool, [1], salt=("X", "")), ("X", "")) != []
    assert chain_hash(0, b"a", ("X", "")) != chain_hash(0, b"a", ("", "X"))


def test_a_hit_compares_what_the_hash_stands_for() -> None:
    """Faults entry 28: with a constant hash there may be fewer hits, never a wrong one."""
    pool = PagePool(8, hasher=lambda *_: 7)
    (page,) = stored(pool, [1])
    assert pool.match(chain(pool, [1]), NOBODY) == [page]
    assert pool.match(chain(pool, [2]), NOBODY) == [], "other tokens"
    assert pool.match(chain(pool, [1], salt=("", "b")), ("", "b")) == [], "another tenant"
    assert pool.match(chain(pool, [1], [1]), NOBODY) == [page], "the same tokens at another position"
    (clash,) = stored(pool, [2])
    assert pool.match(chain(pool, [2]), NOBODY) == []
    pool.check([])
    assert clash != page and pool.cached == 1


def test_forgetting_a_page_forgets_what_follows() -> None:
    pool = PagePool(6)
    stem = stored(pool, [1], [2], [3])
    side = pool.take(1)
    pool.share(stem[:1])
    links = chain(pool, [1], [9])
    side = [stem[0], pool.publish(side[0], *links[1], stem[0], NOBODY)]
    pool.forget(stem[1])
    pool.check([side])
    assert pool.match(chain(pool, [1], [2], [3]), NOBODY) == stem[:1]
    pool.forget(stem[0])
    pool.check([side])
    assert pool.match(links, NOBODY) == [] and pool.cached == 0
    later = pool.publish(pool.take(1)[0], *chain(pool, [1], [9], [4])[2], side[1], NOBODY)
    pool.check([[*side, later]])
    pool.give([*side, later])
    assert pool.free == 6, "what follows a forgotten page cannot be found, so it is not kept"
