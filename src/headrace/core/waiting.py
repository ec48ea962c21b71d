"""Who is admitted next: the tenant that has been served least, and of its sequences the first.

Owes: fair shares, and nobody waits for ever. Does not know: pages, steps, keys.

Shares are kept by virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models"). A tenant is
charged for the prompt tokens that are computed for it, when they are admitted, and `GENERATED` times as much for each
token that it is given, all over its weight; prefixes from the cache and what is computed again cost nothing. Who had
nobody waiting is lifted to the least of those who had, so idling earns no credit. While two tenants both wait, what
they have been given over their weights differs by no more than a prompt and the answers of those that run.

A level of priority lets a sequence go before `LEAD` earlier ones of its tenant, here (`turn`) and again while it runs
(`rank`), and lets a tenant go before others that have been given up to `AHEAD` less. So those that ever go before a
sequence are bounded in number, and however urgent a tenant calls its requests, its share in the long run is the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, zip_longest
from math import isfinite
from operator import attrgetter

from headrace.core.sequence import Sequence

LEAD = 64  # sequences
LEVELS = 100  # levels of priority above or below 0 that count
AHEAD = 8192.0  # prompt tokens over weight
GENERATED = 2.0  # prompt tokens that one drawn token costs
IDLE = 1024  # tenants without sequences that are remembered

_by_turn = attrgetter("turn")


@dataclass(slots=True, eq=False)
class Tenant:
    """served: prompt tokens' worth, over its weight. live: sequences that have not ended; waiting: in order of turn."""

    name: str
    weight: float = 1.0
    served: float = 0.0
    live: int = 0
    waiting: list[Sequence] = field(default_factory=list)


class Waiting:
    """Sequences without pages: new or preempted. It gives each its `turn`, and when it runs first its `rank`."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._lines: list[Tenant] = []  # those with somebody waiting
        self._count = self._live = 0
        self._arrivals = self._admissions = 0
        self._left = 0.0  # `served` of whose line was the last to become empty

    def __len__(self) -> int:
        return self._count

    def add(self, sequence: Sequence, running: list[Sequence]) -> None:
        """A new one. running: all that have been admitted."""
        tenant = self._tenants.setdefault(sequence.tenant, Tenant(sequence.tenant))
        tenant.weight = sequence.weight
        if not tenant.waiting:
            self._settle(running)
            tenant.served = max(tenant.served, min([t.served for t in self._lines], default=self._left))
        tenant.live += 1
        self._live += 1
        sequence.turn = (self._arrivals + LEAD * _level(sequence), sequence.id)
        self._arrivals += 1
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """One that was preempted."""
        tenant = self._tenants[sequence.tenant]
        if not tenant.waiting:
            self._lines.append(tenant)
        insort(tenant.waiting, sequence, key=_by_turn)
        self._count += 1

    def first(self, running: list[Sequence]) -> Sequence:
        """Who is admitted next, of at least one."""
        if len(self._lines) == 1:
            return self._lines[0].waiting[0]
        self._settle(running)
        return min(self._lines, key=_turn).waiting[0]

    def likely(self, count: int) -> list[Sequence]:
        """The next few, as far as can be told before any is admitted."""
        lines = [t.waiting[:count] for t in sorted(self._lines, key=_turn)]
        return list(islice((s for row in zip_longest(*lines) for s in row if s is not None), count))

    def admit(self, sequence: Sequence) -> None:
        """It runs now; at first its tenant pays for what of the prompt is to be computed."""
        self.remove(sequence)
        if sequence.preemptions == 0:
            sequence.rank = (self._admissions + LEAD * _level(sequence), sequence.id)
            self._admissions += 1
            tenant = self._tenants[sequence.tenant]
            tenant.served += (sequence.prompt_len - sequence.cached) / tenant.weight

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer."""
        tenant = self._tenants[sequence.tenant]
        del tenant.waiting[bisect_left(tenant.waiting, sequence.turn, key=_by_turn)]
        self._count -= 1
        if not tenant.waiting:
            self._lines.remove(tenant)
            self._left = tenant.served

    def ended(self, sequence: Sequence) -> None:
        """It waits and runs no longer."""
        tenant = self._tenants[sequence.tenant]
        _charge(sequence, tenant)
        tenant.live -= 1
        self._live -= 1
        if not self._live:
            self._tenants.clear()
            self._left = 0.0
        elif not tenant.live and len(self._tenants) > 2 * IDLE:
            self._forget()

    def _settle(self, running: list[Sequence]) -> None:
        """Charge what has been drawn since the last time; nobody's counter matters while there is one tenant."""
        if len(self._tenants) > 1:
            for sequence in running:
                _charge(sequence, self._tenants[sequence.tenant])

    def _forget(self) -> None:
        """Those without sequences, other than those that have been given most."""
        idle = sorted((t for t in self._tenants.values() if not t.live), key=attrgetter("served"))
        for tenant in idle[: max(0, len(idle) - IDLE)]:
            del self._tenants[tenant.name]

    def __iter__(self) -> chain[Sequence]:
        return chain.from_iterable(t.waiting for t in self._lines)

    def check(self, running: list[Sequence]) -> None:
        """AssertionError if something is not as it should be."""
        assert self._count == sum(1 for _ in self), "a sequence is lost"
        assert (
            len({id(t) for t in self._lines})
            == len(self._lines)
            == sum(bool(t.waiting) for t in self._tenants.values())
        )
        for tenant in self._tenants.values():
            waiting = tenant.waiting
            assert all(a.turn < b.turn for a, b in pairwise(waiting)), "out of order"
            assert all(s.tenant == tenant.name for s in waiting), "in another's line"
            assert bool(waiting) == (tenant in self._lines)
            assert tenant.live == len(waiting) + sum(s.tenant == tenant.name for s in running), "miscounted"
            assert isfinite(tenant.served) and tenant.served >= 0 and tenant.weight > 0
        assert self._live == sum(t.live for t in self._tenants.values())
        assert len(self._tenants) - sum(t.live > 0 for t in self._tenants.values()) <= 2 * IDLE, "too many remembered"
        assert all(0 <= s.paid <= s.generated for s in [*self, *running]), "paid for what it was not given"


def _charge(sequence: Sequence, tenant: Tenant) -> None:
    drawn = len(sequence.tokens) - sequence.prompt_len
    tenant.served += GENERATED * (drawn - sequence.paid) / tenant.weight
    sequence.paid = drawn


def _turn(tenant: Tenant) -> tuple[float, tuple[int, int]]:
    first = tenant.waiting[0]
    return tenant.served + AHEAD * _level(first), first.turn


def _level(sequence: Sequence) -> int:
    return max(-LEVELS, min(LEVELS, sequence.priority))
