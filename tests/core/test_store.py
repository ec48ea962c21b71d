"""Pages that outlive the scheduler that had them computed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from core_model import Keeper, PagedModel, answer, ask, drain, said, small, turn
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.pages import pack
from headrace.core.scheduler import LOADS, Limits, Outcome, Scheduler
from headrace.core.sequence import Sequence
from headrace.core.store import chain_digest

pytestmark = pytest.mark.quick
PROMPT = [*range(14)]  # three pages of four, and two tokens

salts = st.tuples(st.text(max_size=3), st.text(max_size=3))
links = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=4).map(pack), salts)


def started(store: Keeper, limits: Limits | None = None) -> tuple[Scheduler, PagedModel]:
    limits = limits or small()
    scheduler, model = Scheduler(limits, "model", store=store), PagedModel(limits)
    store.model = model
    return scheduler, model


def ran(store: Keeper, prompt: list[int] = PROMPT, limits: Limits | None = None, **asked: Any) -> Sequence:
    """A prompt's answer by a scheduler that has just begun, whose pages are all written at its end."""
    scheduler, model = started(store, limits)
    sequence = ask(prompt, **asked)
    scheduler.add(sequence)
    drain(scheduler, model)
    store.write()
    assert said(sequence) == answer(prompt, 0, 4)
    assert scheduler.loaded == sequence.cached
    return sequence


def test_another_scheduler_finds_the_pages() -> None:
    store = Keeper()
    assert ran(store).cached == 0
    assert len(store.pages) == 4  # 17 tokens were computed
    assert chain_digest(0, pack(PROMPT[:4]), ("model", "")) in store.pages
    assert ran(store).cached == 12
    assert ran(store, [*PROMPT[:9], 7, 7, 7, 7]).cached == 8
    assert ran(store, PROMPT[:12]).cached == 8  # its last token is computed
    assert ran(store, [7, *PROMPT[1:]]).cached == 0


def test_what_is_in_memory_is_not_loaded() -> None:
    store = Keeper()
    ran(store)
    scheduler, model = started(store)
    for count in 12, 12:
        scheduler.add(ask(PROMPT))
        drain(scheduler, model)
        assert scheduler.loaded == count


def test_two_that_come_at_once_load_a_prefix_once() -> None:
    store = Keeper()
    ran(store)
    scheduler, model = started(store, small(pages=16))
    sequences = [ask([*PROMPT, own]) for own in (1, 2)]
    for sequence in sequences:
        scheduler.add(sequence)
    turn(scheduler, model)
    assert sequences[0].pages[:3] == sequences[1].pages[:3]
    assert (scheduler.loaded, [s.cached for s in sequences]) == (12, [12, 12])
    drain(scheduler, model)


def test_a_page_that_cannot_be_had_is_computed_with_those_after_it() -> None:
    fails = iter([False, True])
    store = Keeper()
    ran(store)
    store.fails = lambda: next(fails)
    assert ran(store).cached == 4


def test_who_decodes_waits_for_few_pages_at_a_time() -> None:
    """And the prompt whose pages they are computes nothing before it has them all."""
    prompt, limits = [*range(14)] * 8, small(pages=64, max_model_len=256, max_num_batched_tokens=300)
    store = Keeper()
    ran(store, prompt, limits)
    scheduler, model = started(store, limits)
    stream = ask([1, 2], 30)
    scheduler.add(stream)
    turn(scheduler, model)
    late = ask([*prompt[:-1], 5])
    scheduler.add(late)
    computed = []
    while not late.generated:
        turn(scheduler, model)
        computed.append(late.computed)
    assert computed == [LOADS * 4, 2 * LOADS * 4, 3 * LOADS * 4, 112]
    assert stream.generated == 5
    assert (late.cached, scheduler.loaded, scheduler.prefix_hits) == (108, 108, 108)
    drain(scheduler, model)
    assert said(stream) == answer([1, 2], 0, 30)
    assert said(late) == answer([*prompt[:-1], 5], 0, 4)
    alone = ask([*prompt[:-1], 6])
    scheduler, model = started(store, limits)
    scheduler.add(alone)
    turn(scheduler, model)
    assert alone.computed == 112, "nobody waits"


def test_salts_keep_apart() -> None:
    store = Keeper()
    ran(store)
    assert ran(store, salt="other").cached == 0
    assert ran(store, salt="other").cached == 12


def test_who_wants_logprobs_of_the_prompt_computes_it() -> None:
    store = Keeper()
    ran(store)
    assert ran(store, prompt_logprobs=0).cached == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    store = Keeper()
    ran(store, limits=small(prefix_caching=False))
    assert not store.pages


def test_a_failed_step_leaves_what_was_loaded() -> None:
    store = Keeper()
    ran(store)
    scheduler, model = started(store)
    sequence = ask(PROMPT)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.undo(batch)
    scheduler.check()
    assert sequence.computed == 12
    drain(scheduler, model)
    assert said(sequence) == answer(PROMPT, 0, 4)


def test_numbers_that_went_wrong_are_forgotten_there_too() -> None:
    store = Keeper()
    scheduler, model = started(store)
    sequence = ask(PROMPT)
    scheduler.add(sequence)
    turn(scheduler, model)
    store.write()
    assert store.pages
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, Outcome([[]], {sequence.id: "NaN"}))
    assert not store.pages


@given(links, links)
def test_keys_are_equal_only_for_equal_pages(a: tuple[int, bytes, Any], b: tuple[int, bytes, Any]) -> None:
    assert (chain_digest(*a) == chain_digest(*b)) == (a == b)


def test_keys_are_the_same_in_each_process() -> None:
    code = "from headrace.core.store import chain_digest; print(chain_digest(5, b'abcd', ('m', chr(0xd800))))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == chain_digest(5, b"abcd", ("m", chr(0xD800)))
