"""Pages in a file: what comes back is what went, or nothing, whatever happened to the file."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import SettingError
from headrace.runtime import kvfile
from headrace.runtime.kvfile import BLOCK, FILE, Kept, PageFile, Shelf, open_store

pytestmark = pytest.mark.quick
BYTES = 5000


class Cache:
    """Pages of two parts each, as an executor has them, and what an index calls them."""

    def __init__(self, pages: int = 8) -> None:
        self.memory = [[bytearray(BYTES - 1000), bytearray(1000)] for _ in range(pages)]
        self.names: dict[int, object] = {}

    def view(self, page: int, slot: int = 0) -> list[memoryview]:
        return [memoryview(part) for part in self.memory[page]]

    def name(self, page: int) -> object | None:
        return self.names.get(page)

    def write(self, page: int, key: int) -> None:
        """What belongs to a key."""
        rng = random.Random(key)
        for part in self.memory[page]:
            part[:] = rng.randbytes(len(part))
        self.names[page] = object()

    def holds(self, page: int, key: int) -> bool:
        other = Cache(1)
        other.write(0, key)
        return self.memory[page] == other.memory[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def cache() -> Cache:
    return Cache()


Opener = Callable[..., PageFile]


@pytest.fixture
def opened(folder: Path, cache: Cache) -> Iterator[Opener]:
    stores: list[PageFile] = []

    def open_it(slots: int = 8, identity: str = "model") -> PageFile:
        store = open_store(folder, slots * 2 * BLOCK, identity, BYTES, cache.view)
        assert store is not None
        stores.append(store)
        return store

    yield open_it
    for store in stores:
        store.close()


def keep(store: PageFile, cache: Cache, *keys: int) -> None:
    """A chain of keys, on pages from the first on; returns when nothing waits."""
    for page, key in enumerate(keys):
        cache.write(page, key)
    store.offer([(key, b"") for key in keys], range(len(keys)), len(keys), cache.name)
    settle(store)


def settle(store: PageFile) -> None:
    end = time.monotonic() + 10
    while store.waiting:
        assert time.monotonic() < end
        time.sleep(0.001)


def found(store: PageFile, cache: Cache, *keys: int) -> list[int]:
    """Those of the keys that can be had; each is looked at."""
    had = []
    for key in keys:
        if key in store and store.load(key, 7):
            assert cache.holds(7, key), "another page came back"
            had.append(key)
    return had


def test_pages_come_back_in_another_process(opened: Opener, cache: Cache, folder: Path) -> None:
    first = opened()
    keep(first, cache, 1, 2, 3)
    assert first.traffic.stored == 3
    assert found(first, cache, 1, 2, 3, 4) == [1, 2, 3]
    first.close()
    second = opened()
    assert found(second, cache, 1, 2, 3, 4) == [1, 2, 3]
    assert second.traffic.loaded == 3
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600


def test_nothing_is_lost_without_a_good_end(opened: Opener, cache: Cache, folder: Path) -> None:
    keep(opened(), cache, 1, 2)
    there = (folder / FILE).read_bytes()
    copy = folder.parent / "copy"
    copy.mkdir(mode=0o700)
    (copy / FILE).write_bytes(there)
    store = open_store(copy, 8 * 2 * BLOCK, "model", BYTES, cache.view)
    assert store is not None
    assert found(store, cache, 1, 2) == [1, 2]
    store.close()


def test_a_page_that_was_given_up_is_not_kept(opened: Opener, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    write, calls = os.pwritev, []

    def slow(fd: int, views: Any, at: int) -> int:
        calls.append(at)
        if len(calls) == 2:  # while the second page is being written
            cache.write(1, 9)
        return write(fd, views, at)

    monkeypatch.setattr(os, "pwritev", slow)
    keep(store, cache, 1, 2, 3)
    assert found(store, cache, 1, 2, 3, 9) == [1]  # 3 could not be reached without 2
    keep(store, cache, 1, 2, 3)
    assert found(store, cache, 1, 2, 3) == [1, 2, 3]
    store.close()
    assert found(opened(), cache, 1, 2, 3, 9) == [1, 2, 3]


def test_the_leaf_that_was_used_longest_ago_goes_first(opened: Opener, cache: Cache) -> None:
    store = opened(slots=4)
    keep(store, cache, 1, 2)
    keep(store, cache, 3, 4)
    keep(store, cache, 1, 2)  # used again
    keep(store, cache, 5)
    assert found(store, cache, 1, 2, 3, 4, 5) == [1, 2, 3, 5]


def test_the_order_of_use_is_kept(opened: Opener, cache: Cache) -> None:
    store = opened(slots=4)
    keep(store, cache, 1, 2)
    keep(store, cache, 3)
    keep(store, cache, 1, 2)  # used again
    store.close()
    store = opened(slots=4)
    keep(store, cache, 4)
    keep(store, cache, 5)
    assert found(store, cache, 1, 2, 3, 4, 5) == [1, 2, 4, 5]


def test_a_chain_that_does_not_fit_keeps_its_beginning(opened: Opener, cache: Cache) -> None:
    store = opened(slots=3)
    keep(store, cache, 1, 2, 3, 4, 5)
    assert found(store, cache, 1, 2, 3, 4, 5) == [1, 2, 3]


@pytest.mark.parametrize("changed", ["model 2", "x" * 3000])
def test_what_another_model_left_is_dropped(
    opened: Opener, cache: Cache, changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    keep(store, cache, 1, 2)
    store.close()
    other = opened(identity=changed)
    assert "dropped" in caplog.text
    assert found(other, cache, 1, 2) == []
    other.close()
    assert found(opened(), cache, 1, 2) == []


def test_a_smaller_bound_drops_what_is_beyond_it(opened: Opener, cache: Cache, folder: Path) -> None:
    store = opened()
    keep(store, cache, 1, 2, 3, 4)
    store.close()
    store = opened(slots=2)
    assert found(store, cache, 1, 2, 3, 4) == [1, 2]
    assert (folder / FILE).stat().st_size <= kvfile._DATA + 4 * BLOCK
    store.close()
    store = opened(slots=8)
    keep(store, cache, 1, 2, 5, 6)
    assert found(store, cache, 1, 2, 3, 4, 5, 6) == [1, 2, 5, 6]


def test_only_one_process_has_it(
    opened: Opener, cache: Cache, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened()
    monkeypatch.setattr(kvfile, "LOCK_SECONDS", 0.1)
    assert open_store(folder, 1 << 20, "model", BYTES, cache.view) is None
    assert "another process" in caplog.text
    keep(first, cache, 1)
    assert found(first, cache, 1) == [1]
    first.close()
    opened()


def test_who_is_just_ending_is_waited_for(opened: Opener, cache: Cache) -> None:
    first = opened()
    keep(first, cache, 1)
    threading.Timer(0.2, first.close).start()
    assert found(opened(), cache, 1) == [1]


damage = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(damage=damage, cut=st.none() | st.integers(0, 1 << 30), where=st.sampled_from(["table", "data", "all"]))
def test_no_damage_gives_a_wrong_page(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]], cut: int | None, where: str
) -> None:
    folder, cache = tmp_path_factory.mktemp("kv") / "kv", Cache()
    store = open_store(folder, 8 * 2 * BLOCK, "model", BYTES, cache.view)
    assert store is not None
    keep(store, cache, 1, 2, 3, 4)
    store.close()
    file = folder / FILE
    size = file.stat().st_size
    places = {"table": (BLOCK, BLOCK + 320), "data": (kvfile._DATA, size), "all": (0, size)}
    low, high = places[where]
    with file.open("r+b") as raw:
        for at, value in damage:
            raw.seek(low + at % (high - low))
            raw.write(bytes([value]))
        if cut is not None:
            raw.truncate(low + cut % (high - low))
    store = open_store(folder, 8 * 2 * BLOCK, "model", BYTES, cache.view)
    assert store is not None
    found(store, cache, 1, 2, 3, 4)
    keep(store, cache, 1, 2, 3, 4)
    assert found(store, cache, 1, 2, 3, 4) == [1, 2, 3, 4]
    store.close()


def test_a_file_that_shrinks_while_it_is_used_forgets(opened: Opener, cache: Cache, folder: Path) -> None:
    store = opened()
    keep(store, cache, 1, 2)
    os.truncate(folder / FILE, kvfile._DATA + 100)
    assert found(store, cache, 1, 2) == []
    assert store.traffic.damaged == 2
    keep(store, cache, 1, 2)
    assert found(store, cache, 1, 2) == [1, 2]


@pytest.mark.parametrize("call", ["pwritev", "pwrite", "preadv"])
def test_where_the_disk_fails_it_ends_with_one_line(
    opened: Opener, cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    store = opened()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    for keys in (1, 2), (3, 4), (5,):
        keep(store, cache, *keys)
        assert found(store, cache, *keys) == []
    assert [r.levelno for r in caplog.records if "No space" in r.message] == [logging.WARNING]


def test_a_disk_that_takes_half_a_page(opened: Opener, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, views[:1], at))
    keep(store, cache, 1, 2)
    assert found(store, cache, 1, 2) == []


def _link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def _file_link(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder.parent / "precious").write_text("precious")
    (folder / FILE).symlink_to(folder.parent / "precious")


def _hard_link(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder.parent / "precious").write_text("precious")
    (folder / FILE).hardlink_to(folder.parent / "precious")


def _open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _pipe(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / FILE)


def _inner_folder(folder: Path) -> None:
    (folder / FILE).mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)


@pytest.mark.parametrize(
    "make", [_link, _file_link, _hard_link, _open_to_all, _pipe, _inner_folder, lambda folder: folder.write_text("a")]
)
def test_a_folder_that_is_not_ours_alone_is_refused(folder: Path, cache: Cache, make: Callable[[Path], None]) -> None:
    make(folder)
    with pytest.raises(SettingError) as refused:
        open_store(folder, 1 << 20, "model", BYTES, cache.view)
    assert refused.value.param == "kv_cache_dir"
    precious = folder.parent / "precious"
    assert not precious.exists() or precious.read_text() == "precious"


def test_a_bound_below_a_page_is_refused(folder: Path, cache: Cache) -> None:
    with pytest.raises(SettingError, match="8192 bytes"):
        open_store(folder, BYTES, "model", BYTES, cache.view)


def test_a_folder_that_cannot_be_made_is_done_without(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    assert open_store(Path("/proc/none/kv"), 1 << 20, "model", BYTES, cache.view) is None
    assert "not used" in caplog.text


rows = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 6), st.integers(0, 9)), max_size=12
)  # when it was used, key, slot, parent


@given(rows, st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=20))
def test_a_shelf_of_any_records_has_each_slot_once(
    rows: list[tuple[int, int, int, int]], more: list[tuple[int, int]]
) -> None:
    """Also of damaged ones: two for a slot, rings of parents."""
    shelf = Shelf(5)
    shelf.fill((used, key, Kept(slot, parent, 0)) for used, key, slot, parent in rows)
    for key, parent in more:
        if key not in shelf and (slot := shelf.room(parent)) is not None:
            shelf.put(key, Kept(slot, parent, 0))
        taken = [kept.slot for _, kept in shelf.in_order()]
        assert sorted([*taken, *shelf.free]) == list(range(5))


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=40))
def test_parents_stay_as_long_as_their_children(keys: list[tuple[int, bool]]) -> None:
    """Key k comes after k // 2."""
    shelf = Shelf(5)
    for key, restarted in keys:
        if key in shelf:
            shelf.use(key)
        elif (slot := shelf.room(key // 2)) is not None:
            shelf.put(key, Kept(slot, key // 2, 0))
        if restarted:
            again = Shelf(5)
            again.fill((used, k, kept) for used, (k, kept) in enumerate(shelf.in_order(), 1))
            assert again.in_order() == shelf.in_order()
            shelf = again
        assert all(k // 2 in shelf or k // 2 == 0 for k, _ in shelf.in_order())
        order = [k for k, _ in shelf.in_order()]
        assert all(order.index(k // 2) > order.index(k) for k in order if k // 2)
