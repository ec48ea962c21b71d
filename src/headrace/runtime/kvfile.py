"""KV pages in a file, so that prefixes survive a restart: the `core.store.PageStore` behind ``--kv-cache-dir``.

Owes: a page that comes back is the one that went, bit for bit, or none: each has a checksum of its own, so a
file that was cut short, torn by a crash or damaged only forgets. Does not know: tokens, models, who asks.

    header    what the pages depend on (`identity`); a file with another one is started afresh
    records   key, parent's key, when it was used, checksum: 80 bytes for each slot; all that is read at the start
    slots     the bytes of pages

A page is copied out by a thread, straight from the cache. Nothing holds it meanwhile: if it was given up before its
bytes were written, its record isn't. Records are written after the bytes, and no order is asked of the disk, as the
checksum tells. One process has the file, by a lock. Where the disk fails, the store ends and serving goes on.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import stat
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from headrace.base.errors import SettingError
from headrace.base.log import log
from headrace.core.store import KEY_BYTES, Chain, Name

Views = list[memoryview]

FILE = "pages"
BLOCK = 4096  # slots begin at multiples of it; the header has one
MOST_SLOTS = 1 << 17
WAITING = 1024  # pages that may wait to be written; more are left out
FLUSH_SECONDS = 5.0  # for those that still wait at the end
LOCK_SECONDS = FLUSH_SECONDS + 1  # a process that is just ending may have the file as long as that

_NEVER = float("inf")
_MAGIC = b"headrace kv pages 1\n"
_RECORD = Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQQ")
_NO_RECORD = bytes(_RECORD.size)
_DATA = -(-(BLOCK + MOST_SLOTS * _RECORD.size) // BLOCK) * BLOCK


class Kept(NamedTuple):
    """A page in the file. parent: the key of the page before it; 0: none. check: of its bytes."""

    slot: int
    parent: int
    check: int


class Shelf:
    """Which page lies in which of `slots` slots, and which goes first: the leaf that was used longest ago.

    Using a page uses all before it, after it: so the first in the order is never the parent of another.
    """

    def __init__(self, slots: int) -> None:
        self.free = list(range(slots - 1, -1, -1))
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: int) -> bool:
        return key in self._kept

    def get(self, key: int) -> Kept | None:
        return self._kept.get(key)

    def in_order(self) -> list[tuple[int, Kept]]:
        """Pages by key, the first to go first."""
        return list(self._kept.items())

    def fill(self, found: Iterable[tuple[int, int, Kept]]) -> None:
        """Take in pages as (when it was last used, key, page); of those that want one slot or key, one."""
        free, rows = set(self.free), []
        for used, key, kept in sorted(found, key=lambda row: -row[0]):
            if kept.slot in free and key not in self._kept:
                free.remove(kept.slot)
                self._kept[key] = kept
                rows.append((used, key))
        self.free = sorted(free, reverse=True)
        last = {key: used for used, key in rows}  # of a page and those after it
        for _, key in rows:
            parent = self._kept[key].parent
            if parent in last:
                last[parent] = max(last[parent], last[key])
        for key in sorted((key for _, key in rows), key=last.__getitem__):  # stable: children before parents
            self._kept.move_to_end(key)

    def use(self, key: int) -> None:
        """A page and those before it go last."""
        for _ in range(len(self._kept)):  # a damaged file may hold a ring
            if key not in self._kept:
                return
            self._kept.move_to_end(key)
            key = self._kept[key].parent

    def room(self, parent: int) -> int | None:
        """A free slot for a page after `parent`, another page's if need be; None if the page could not be reached."""
        if parent:
            if parent not in self._kept:
                return None
            self.use(parent)
        if self.free:
            return self.free.pop()
        first = next(iter(self._kept))
        return None if first == parent else self._kept.pop(first).slot

    def put(self, key: int, kept: Kept) -> None:
        self._kept[key] = kept
        self.use(key)

    def drop(self, key: int) -> int | None:
        """Forget a page; its slot, if it was there."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return None
        self.free.append(kept.slot)
        return kept.slot


@dataclass(slots=True)
class Traffic:
    """Since the start: pages that came from the file and went there, and damaged ones that were found."""

    loaded: int = 0
    stored: int = 0
    damaged: int = 0

    def told(self) -> list[int]:
        return [self.loaded, self.stored, self.damaged]


class _Waiting(NamedTuple):
    key: int
    parent: int
    page: int
    name: object
    now: Name


class PageFile:
    """A `PageStore` in a folder of its own. See `open_store`.

    view: the bytes of a page of the cache and of its slot, `page_bytes` in all. slot_of: see `Scheduler.slot_of`, whose
    maker sets it.
    """

    def __init__(self, fd: int, slots: int, page_bytes: int, view: Callable[[int, int], Views]) -> None:
        self.slot_of: list[int] | None = None
        self.page_bytes = page_bytes
        self.slots = slots
        self.traffic = Traffic()
        self._fd = fd
        self._width = _slot_bytes(page_bytes)
        self._view = view
        self._shelf = Shelf(slots)
        found = _read_records(fd, slots)
        self._shelf.fill(found)
        self._used = max((used for used, *_ in found), default=0)
        self._waiting: deque[_Waiting] = deque()
        self._known: set[int] = set()  # keys of those that wait
        self._on = True
        self._end = _NEVER
        self._lock = threading.Lock()  # of all of this, and of records
        self._news = threading.Condition(self._lock)
        self._writer = threading.Thread(target=self._write_all, name="kv-cache-dir", daemon=True)
        self._writer.start()
        atexit.register(self.close)  # the thread would keep the cache

    def __len__(self) -> int:
        return len(self._shelf)

    @property
    def waiting(self) -> bool:
        """Whether a page is still to be written."""
        return bool(self._known)

    def __contains__(self, key: int) -> bool:
        return self._on and key in self._shelf

    def load(self, key: int, page: int) -> bool:
        """See `PageStore.load`."""
        with self._lock:
            kept = self._shelf.get(key)
        if kept is None:
            return False
        views = self._views(page)
        try:
            whole = os.preadv(self._fd, views, self._at(kept.slot)) == self.page_bytes
        except OSError as error:
            self._fail(error)
            return False
        if whole and _check(views) == kept.check:
            self.traffic.loaded += 1
            return True
        if self._shelf.get(key) is kept:  # else it was just given up
            self.traffic.damaged += 1
            self.forget(key)
        return False

    def offer(self, chain: Chain, pages: Sequence[int], count: int, name: Name) -> None:
        """See `PageStore.offer`."""
        if not self._on:
            return
        missing = [i for i in range(count) if not self._has(chain[i][0])]
        with self._lock:
            if not missing and count:
                self._shelf.use(chain[count - 1][0])
            for i in missing:
                named = name(pages[i])
                if named is None or len(self._waiting) >= WAITING:
                    break
                key = chain[i][0]
                self._waiting.append(_Waiting(key, chain[i - 1][0] if i else 0, pages[i], named, name))
                self._known.add(key)
            self._news.notify()

    def forget(self, key: int) -> None:
        """See `PageStore.forget`."""
        with self._lock:
            slot = self._shelf.drop(key)
            if slot is None or not self._on:
                return
        self._try(lambda: self._record(slot, _NO_RECORD))

    def close(self) -> None:
        """Write what waits, as far as `FLUSH_SECONDS` reach, and let others have the file. Twice is no error."""
        atexit.unregister(self.close)
        with self._lock:
            if self._end != _NEVER:
                return
            self._end = time.monotonic() + FLUSH_SECONDS
            self._news.notify()
        self._writer.join(FLUSH_SECONDS + 1)
        if self._on:
            self._try(self._write_order)
        self._on = False
        if not self._writer.is_alive():  # else the disk holds it
            os.close(self._fd)

    # -- the thread that writes

    def _write_all(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and self._end == _NEVER:
                    self._news.wait()
                if not self._waiting or time.monotonic() > self._end:
                    return
                job = self._waiting.popleft()
            self._try(lambda job=job: self._write(job))  # type: ignore[misc]
            with self._lock:
                self._known.discard(job.key)

    def _write(self, job: _Waiting) -> None:
        if job.now(job.page) is not job.name or not (views := self._views(job.page)):
            return
        with self._lock:
            slot = None if job.key in self._shelf else self._shelf.room(job.parent)
        if slot is None:
            return
        if os.pwritev(self._fd, views, self._at(slot)) != self.page_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        kept = Kept(slot, job.parent, _check(views))
        self._used += 1
        self._record(slot, _packed(job.key, kept, self._used))
        with self._lock:
            same = job.now(job.page) is job.name
            if same:
                self._shelf.put(job.key, kept)
            else:  # it was given up, so these bytes may be another page's
                self._shelf.free.append(slot)
        if same:
            self.traffic.stored += 1
        else:
            self._record(slot, _NO_RECORD)

    # -- the file

    def _views(self, page: int) -> Views:
        """The bytes of a page; [] if it has no slot any more."""
        slot = self.slot_of[page] if self.slot_of is not None else 0
        return self._view(page, slot) if slot >= 0 else []

    def _has(self, key: int) -> bool:
        return key in self._shelf or key in self._known

    def _at(self, slot: int) -> int:
        return _DATA + slot * self._width

    def _record(self, slot: int, record: bytes) -> None:
        os.pwrite(self._fd, record, BLOCK + slot * _RECORD.size)

    def _write_order(self) -> None:
        """In which order pages were used, for the next start."""
        table = bytearray(self.slots * _RECORD.size)
        for used, (key, kept) in enumerate(self._shelf.in_order(), 1):
            at = kept.slot * _RECORD.size
            table[at : at + _RECORD.size] = _packed(key, kept, used)
        os.pwrite(self._fd, table, BLOCK)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        with self._lock:
            if not self._on:
                return
            self._on = False
            self._waiting.clear()
            self._known.clear()
        log.warning("--kv-cache-dir is not used any more: %s", error)


def open_store(
    folder: Path, size: int, identity: str, page_bytes: int, view: Callable[[int, int], Views]
) -> PageFile | None:
    """The pages kept in a folder, at most `size` bytes of them; None, with a warning, where that cannot be now.

    identity: all that the pages' bytes depend on besides tokens and salt; of a file with another one nothing is used.
    view: see `PageFile`. SettingError for a folder that others may write to, a link, a size of no page.
    """
    slots = min(size // _slot_bytes(page_bytes), MOST_SLOTS)
    if slots < 1:
        least = _slot_bytes(page_bytes)
        raise SettingError(f"a KV page takes {least} bytes; kv_cache_dir_bytes is {size}", param="kv_cache_dir_bytes")
    try:
        fd = _open(folder)
    except OSError as error:
        log.warning("--kv-cache-dir is not used: %s: %s", folder, error.strerror)
        return None
    try:
        _lock(fd)
        _begin(fd, _header(identity), slots, page_bytes, folder)
        store = PageFile(fd, slots, page_bytes, view)
    except BlockingIOError:
        os.close(fd)
        log.warning("--kv-cache-dir is not used: another process has %s; give each a folder of its own", folder)
        return None
    except OSError as error:
        os.close(fd)
        log.warning("--kv-cache-dir is not used: %s", error)
        return None
    size = slots * _slot_bytes(page_bytes)
    log.info("%s holds %d KV pages of earlier runs, of at most %d (%.2f GiB)", folder, len(store), slots, size / 2**30)
    return store


def _open(folder: Path) -> int:
    """The file in the folder, both made if they are not there, both ours alone."""
    if not folder.exists() and not folder.is_symlink():
        folder.mkdir(mode=0o700, parents=True)
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _refused(folder, "is a link, or no folder") from None
        raise
    try:
        there = os.fstat(place)
        if there.st_uid not in (os.geteuid(), 0) or there.st_mode & 0o022:
            raise _refused(folder, "may be written to by others: give it a folder that is yours alone (chmod 700)")
        fd = os.open(FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=place)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _refused(folder / FILE, "is a link, or a folder: remove it") from None
        raise
    finally:
        os.close(place)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(fd)
        raise _refused(folder / FILE, "is no file of ours: remove it")
    os.fchmod(fd, 0o600)
    return fd


def _lock(fd: int) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _refused(path: Path, why: str) -> SettingError:
    return SettingError(f"kv_cache_dir: {str(path)!r} {why}", param="kv_cache_dir")


def _header(identity: str) -> bytes:
    header = _MAGIC + identity.encode()
    assert len(header) < BLOCK
    return header.ljust(BLOCK, b"\0")


def _begin(fd: int, header: bytes, slots: int, page_bytes: int, folder: Path) -> None:
    """A file with this header, no longer than its slots."""
    before = os.fstat(fd).st_size
    if before and os.pread(fd, BLOCK, 0) != header:
        log.warning("the KV pages in %s are of another model, format or version: they are dropped", folder)
        os.ftruncate(fd, 0)
        before = 0
    if not before:
        os.pwrite(fd, header, 0)
    most = _DATA + slots * _slot_bytes(page_bytes)
    if before > most:
        os.ftruncate(fd, most)


def _read_records(fd: int, slots: int) -> list[tuple[int, int, Kept]]:
    """(when it was used, key, page) of what the file holds from before."""
    table = os.pread(fd, slots * _RECORD.size, BLOCK)
    rows = enumerate(_RECORD.iter_unpack(table[: len(table) // _RECORD.size * _RECORD.size]))
    return [(used, _int(key), Kept(slot, _int(parent), check)) for slot, (key, parent, used, check) in rows if used]


def _packed(key: int, kept: Kept, used: int) -> bytes:
    return _RECORD.pack(_bytes(key), _bytes(kept.parent), used, kept.check)


def _slot_bytes(page_bytes: int) -> int:
    return -(-page_bytes // BLOCK) * BLOCK


def _check(views: Views) -> int:
    check = 0
    for view in views:
        check = zlib.crc32(view, check)
    return check


def _bytes(key: int) -> bytes:
    return key.to_bytes(KEY_BYTES, "little")


def _int(key: bytes) -> int:
    return int.from_bytes(key, "little")
