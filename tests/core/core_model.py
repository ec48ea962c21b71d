"""A model of a dozen lines whose memory lies in pages, so that a wrong page shows in the tokens.

Position p leaves a number in its page: a checksum of the token and of the number that the page table holds for p - 1.
The next token is a function of all those numbers, read through the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import count
from zlib import crc32

from headrace.core.sampling import SamplingParams
from headrace.core.scheduler import Batch, Limits, Outcome, Scheduled, Scheduler
from headrace.core.sequence import Sequence
from headrace.core.store import Chain, Name

VOCAB = 40
_ids = count()


def step(before: int, token: int) -> int:
    return crc32(token.to_bytes(4, "little"), before)


def draw(numbers: Iterable[int], seed: int) -> int:
    return crc32(b"".join(n.to_bytes(4, "little") for n in numbers), seed) % VOCAB


def answer(prompt: list[int], seed: int, length: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What the model says by itself, no scheduler involved."""
    numbers: list[int] = []
    for token in prompt:
        numbers.append(step(numbers[-1] if numbers else 1, token))
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(draw(numbers, seed))
        numbers.append(step(numbers[-1], tokens[-1]))
        if tokens[-1] in stops:
            break
    return tokens


class PagedModel:
    """Runs batches; `burst` says how many tokens a sampling item yields at once.

    slot_of: of the scheduler that makes them, if it has windows: then what a position sees within its window must lie
    in the slots as well, as they were when the sequence's table was last read.
    """

    def __init__(self, limits: Limits, burst: Callable[[], int] = lambda: 1, slot_of: list[int] | None = None) -> None:
        self.size = limits.page_size
        self.window = limits.window
        self.memory: list[list[int | None]] = [[None] * self.size for _ in range(limits.pages)]
        self.slots: list[list[int | None]] = [[None] * self.size for _ in range(limits.slots)]
        self.slot_of = slot_of
        self.burst = burst
        self.tables: dict[int, tuple[int, list[int]]] = {}
        self.slot_tables: dict[int, list[int]] = {}

    def run(self, batch: Batch) -> Outcome:
        for copy in batch.copies:
            self.memory[copy.target] = self.memory[copy.source].copy()
            if self.slot_of is not None:
                source, target = copy.slots
                self.slots[target] = self.slots[source].copy()
        for page in batch.fresh:
            self.memory[page] = [None] * self.size
            if self.slot_of is not None and self.slot_of[page] >= 0:
                self.slots[self.slot_of[page]] = [None] * self.size
        return Outcome([self._item(item) for item in batch.items])

    def places(self, page: int) -> list[list[int | None]]:
        """What lies in a page: in its own memory, and in its slot."""
        return [self.memory[page], *([] if self.slot_of is None else [self.slots[self.slot_of[page]]])]

    def _item(self, item: Scheduled) -> list[int]:
        s = item.sequence
        self._look_at_table(s)
        tokens = [*s.tokens, *item.draft]
        for p in range(item.start, item.start + item.count):
            before = self._at(s, p - 1) if p else 1
            page = self.memory[s.pages[p // self.size]]
            assert p % self.size or page == [None] * self.size, "a page was taken and not named as fresh"
            page[p % self.size] = step(before, tokens[p])
            if self.slot_of is not None:
                self._see(s, p)
        if not item.sample:
            return []
        numbers = [self._at(s, p) for p in range(item.start + item.count)]
        if item.draft:
            first = len(numbers) - len(item.draft)
            drawn = [draw(numbers[: first + n], s.seed) for n in range(len(item.draft) + 1)]
            right = [a == b for a, b in zip(drawn, item.draft, strict=False)]
            return drawn[: (*right, False).index(False) + 1]
        new: list[int] = []
        for _ in range(self.burst()):
            new.append(draw(numbers, s.seed))
            numbers.append(step(numbers[-1], new[-1]))
        return new

    def _look_at_table(self, s: Sequence) -> None:
        """A copy of a table may be kept as long as `moves` stands still: then the table only grows."""
        moves, pages = self.tables.get(s.id, (-1, []))
        assert moves != s.moves or s.pages[: len(pages)] == pages, "a page was changed without a word"
        self.tables[s.id] = (s.moves, s.pages.copy())
        if self.slot_of is not None:
            known = self.slot_tables.get(s.id, []) if moves == s.moves else []
            self.slot_tables[s.id] = [*known, *(self.slot_of[page] for page in s.pages[len(known) :])]

    def _see(self, s: Sequence, position: int) -> None:
        """What the position leaves lies in its slot, and what it sees in those of its window."""
        table = self.slot_tables[s.id]
        self.slots[table[position // self.size]][position % self.size] = self._at(s, position)
        for p in range(max(position - self.window + 1, 0), position):
            assert self.slots[table[p // self.size]][p % self.size] == self._at(s, p), (
                f"{p} is not seen from {position}"
            )

    def _at(self, s: Sequence, position: int) -> int:
        number = self.memory[s.pages[position // self.size]][position % self.size]
        assert number is not None, f"position {position} of {s} was never computed"
        return number


class Keeper:
    """A page store that writes late, when `write` is called, and hands out nothing where `fails` says so."""

    def __init__(self, fails: Callable[[], bool] = lambda: False) -> None:
        self.pages: dict[int, list[list[int | None]]] = {}
        self.waiting: list[tuple[int, int, object, Name]] = []
        self.fails = fails
        self.model: PagedModel  # the one at hand

    def __contains__(self, key: int) -> bool:
        return key in self.pages

    def load(self, key: int, page: int) -> bool:
        failed, model = self.fails(), self.model
        for place, kept in zip(model.places(page), self.pages[key], strict=True):
            place[:] = [99] * model.size if failed else kept
        if failed:
            del self.pages[key]
        return not failed

    def offer(self, chain: Chain, pages: Items[int], count: int, name: Name) -> None:
        for (key, _), page in zip(chain[:count], pages[:count], strict=True):
            if key not in self.pages:
                self.waiting.append((key, page, name(page), name))

    def forget(self, key: int) -> None:
        self.pages.pop(key, None)

    def write(self) -> None:
        for key, page, known, name in self.waiting:
            if known is not None and name(page) is known:
                self.pages[key] = [place.copy() for place in self.model.places(page)]
        self.waiting = []


def ask(prompt: Iterable[int], max_tokens: int | None = 4, *, request: str = "", choice: int = 0, seed: int = 0,
        stop_ids: Iterable[int] = (), salt: str = "", priority: int = 0, max_len: int | None = None,
        tenant: str = "", weight: float = 1.0,
        **params: object) -> Sequence:  # fmt: skip
    """A sequence of a fresh id."""
    number = next(_ids)
    asked = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Sequence(number, request or f"r{number}", choice, asked, seed, prompt, stop_ids=stop_ids, salt=salt,
                    priority=priority, max_len=max_len, tenant=tenant, weight=weight)  # fmt: skip


def small(pages: int = 8, **changes: object) -> Limits:
    """Limits with pages of 4 tokens."""
    values: dict[str, object] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "pages": pages, "page_size": 4,
    }  # fmt: skip
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


def turn(scheduler: Scheduler, model: PagedModel) -> list[Sequence]:
    """One step with all checks; the sequences that ended."""
    batch = scheduler.schedule()
    scheduler.check()
    assert batch is not None, "work but no batch"
    check_batch(scheduler.limits, batch)
    ended = scheduler.commit(batch, model.run(batch))
    scheduler.check()
    return ended


def check_batch(limits: Limits, batch: Batch) -> None:
    assert 1 <= sum(i.count for i in batch.items) <= limits.max_num_batched_tokens
    assert len({i.sequence.id for i in batch.items}) == len(batch.items)
    assert not {i.sequence.id for i in batch.items} & {s.id for s in batch.preempted}
    for item in batch.items:
        assert item.count >= 1 and item.start == item.sequence.computed
        whole = item.start + item.count - len(item.draft) == len(item.sequence.tokens)
        assert not item.draft or (item.count == 1 + len(item.draft) and item.start + item.count < item.sequence.max_len)
        assert item.sample == (whole and item.sequence.params.max_tokens != 0)


def drain(scheduler: Scheduler, model: PagedModel, steps: int = 20_000) -> list[Sequence]:
    """Run until nothing is left; the sequences in the order in which they ended."""
    ended: list[Sequence] = []
    while scheduler.has_work:
        assert steps > 0, "no end in sight"
        steps -= 1
        ended += turn(scheduler, model)
    assert scheduler.schedule() is None
    assert scheduler.pool.used == 0
    assert scheduler.pool.available == min(scheduler.limits.pages, scheduler.limits.slots or scheduler.limits.pages)
    assert scheduler.waiting == scheduler.running == 0
    return ended


def said(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.prompt_len :]
