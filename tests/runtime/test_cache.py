"""How bytes of a KV cache become pages and slots."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.core.pages import pages_for
from headrace.runtime.cache import LIKELY, Cache, Room

GEMMA = Cache(18 * 32_768, 15 * 32_768, window=512, chunk=512)  # Gemma 3 270M in float16

CACHES = st.builds(
    lambda full, windowed, window, chunk: Cache(full + windowed, windowed, window, chunk),
    st.integers(0, 5000),
    st.integers(1, 5000),
    st.integers(1, 3000),
    st.integers(1, 1000),
)


def taken(cache: Cache, room: Room) -> int:
    """Bytes that are allocated; pages of no layer are none."""
    return room.pages * (cache.page_bytes - (cache.window_bytes if room.slots else 0)) + room.slots * cache.window_bytes


def test_gemmas_conversations_of_4096_tokens() -> None:
    """128 pages of three layers and 17 slots of fifteen, where 128 pages of eighteen were: 3.6 times as many fit."""
    assert GEMMA.least_bytes(4096) == 32_768 * (128 * 3 + 17 * 15)
    assert GEMMA.room(GEMMA.bytes(4096, 64), 64, 4096) == Room(64 * 128, 64 * 17 + 16)
    every = Cache(GEMMA.page_bytes)
    assert [cache.requests(10**9, 4096) for cache in (every, GEMMA)] == [13, 47]


@given(CACHES, st.integers(1, 100), st.integers(1, 20_000), st.integers(0, 10**10))
def test_what_is_allocated_fits_and_holds_the_longest_sequence(
    cache: Cache, sequences: int, context: int, memory: int
) -> None:
    room = cache.room(memory, sequences, context)
    assert (room is None) == (memory < cache.least_bytes(context))
    if room is None:
        assert cache.longest(memory, context) < context
        return
    assert taken(cache, room) <= memory
    assert room.pages >= pages_for(context, 32)
    assert (room.slots > 0) == cache.parted(context)
    assert room.slots >= cache.slots(context) or not room.slots


@given(CACHES, st.integers(1, 100), st.integers(1, 20_000))
def test_so_many_requests_as_are_planned_get_what_they_need(cache: Cache, requests: int, context: int) -> None:
    memory = cache.bytes(context, requests)
    assert cache.requests(memory, context) == requests
    room = cache.room(memory, requests, context)
    assert room is not None
    assert room.pages >= requests * pages_for(context, 32)
    if room.slots:
        assert room.slots >= requests * cache.slots(context)
    if cache.page_bytes > cache.window_bytes and cache.slots(context) == cache.slots(min(LIKELY, context)):
        assert taken(cache, room) == memory, "to the byte"


@given(CACHES, st.integers(1, 20_000), st.integers(1, 10**9))
def test_the_longest_that_fits(cache: Cache, context: int, memory: int) -> None:
    assume(memory < cache.least_bytes(context))
    fits = cache.longest(memory, context)
    assert fits % 32 == 0 and (fits == 0 or cache.room(memory, 1, fits) is not None)
    assert cache.room(memory, 1, min(fits + 32, context)) is None


@given(st.integers(1, 10**6), st.integers(1, 100), st.integers(1, 20_000), st.integers(0, 10**10))
def test_without_windows_all_is_pages(page_bytes: int, sequences: int, context: int, memory: int) -> None:
    room = Cache(page_bytes, chunk=512).room(memory, sequences, context)
    assert room is None or room == Room(memory // page_bytes)


def test_a_window_as_long_as_the_context_needs_no_slots() -> None:
    assert not GEMMA.parted(512)
    assert GEMMA.room(10**9, 64, 512) == Room(10**9 // GEMMA.page_bytes)
