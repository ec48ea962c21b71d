"""The page pool by itself: places, prefix index, order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.pages import ROOT, PagePool, Salt, alike, chain_hash, pack

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


ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)
kinds = st.sampled_from([("", ("", "")), ("", ("", "s")), ("b", ("", ""))])


@given(st.lists(st.tuples(ids, kinds, st.booleans()), max_size=20), ids, kinds)
def test_the_nearest_page_shares_the_longest_beginning(
    known: list[tuple[list[int], tuple[str, Salt], bool]], wanted: list[int], kind: tuple[str, Salt]
) -> None:
    pool = PagePool(20)
    held: dict[int, tuple[list[int], tuple[str, Salt]]] = {}
    for tokens, (owner, salt), stays in known:
        (page,) = pool.take(1)
        ((key, packed),) = chain(pool, tokens, salt=salt)
        if pool.publish(page, key, packed, ROOT, salt, owner) == page:
            held[page] = tokens, (owner, salt)
        pool.give([page]) if page in held else None
        if page in held and not stays:
            pool.forget(page)
            del held[page]
    page, most = pool.nearest(ROOT, pack(wanted), kind[1], kind[0])
    shared = {p: alike(pack(tokens), pack(wanted)) for p, (tokens, whose) in held.items() if whose == kind}
    assert most == max(shared.values(), default=0)
    assert shared[page] == most if most else page == ROOT


@given(ids, ids)
def test_how_much_is_alike(a: list[int], b: list[int]) -> None:
    most = alike(pack(a), pack(b))
    assert a[:most] == b[:most] and (most == min(len(a), len(b)) or a[most] != b[most])


def test_only_what_follows_the_same_page_is_near() -> None:
    pool = PagePool(8)
    stem = stored(pool, [1], [2, 3])
    assert pool.nearest(stem[0], pack([2, 4]), NOBODY) == (stem[1], 1)
    assert pool.nearest(ROOT, pack([2, 3]), NOBODY) == (ROOT, 0)
    assert pool.nearest(stem[1], pack([2, 3]), NOBODY) == (ROOT, 0)


def test_a_page_that_is_copied_is_the_last_to_go() -> None:
    pool = PagePool(3)
    (old,), (new,) = stored(pool, [1]), stored(pool, [2])
    (third,) = pool.take(1)
    assert pool.take_copy(old) == new, "it was used just now, the other one longer ago"
    pool.give([third])
    assert pool.take_copy(old) == third
    assert pool.take_copy(old) == old, "there was no other"
    assert pool.available == 0 and pool.nearest(ROOT, pack([1]), NOBODY) == (ROOT, 0)
