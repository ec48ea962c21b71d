"""Which idle page to give up: what prompts cost again, by policy, on made conversations. Needs no model.

    python bench/eviction.py [pages ...]

A trace has users who chat in several turns with pauses, system prompts that many share, and long documents that are
asked about once or a few times. A policy that knows a prompt's pages saves their work: a page costs 1 and, as attention
looks at all before it, 0.02 more for each page before it (SmolLM2). A figure is the share of all work that is left.

`pool` is the engine's own PagePool: the least recently used leaf. `reuse x cost` is greedy-dual (Cao and Irani, 1997):
a page's worth is its hits times its cost, above what the last one given up was worth. `unproven` lets pages that were
never found again age twice as fast. `clairvoyant` gives up what is used last, and stands for what can be had at most.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from headrace.core.pages import ROOT, PagePool, pack

Chain = list[int]  # of pages, each named by a number of its own
Visit = tuple[float, Chain]  # seconds, pages of the prompt

HOURS, USERS, SYSTEM_PROMPTS = 2.0, 60, 4
SALT = ("", "")


def cost(depth: int) -> float:
    """Work of a page that comes after so many."""
    return 1 + 0.02 * depth


def visits(seed: int, documents: float, pause: float) -> list[Visit]:
    """Prompts over time. documents: how many there are for each turn of a chat. pause: median seconds of a turn."""
    rng, made, end = random.Random(seed), iter(range(1 << 31)), HOURS * 3600
    found: list[Visit] = []

    def pages(least: int, most: int) -> Chain:
        return [next(made) for _ in range(rng.randint(least, most))]

    def wait() -> float:
        return rng.lognormvariate(math.log(pause), 1.0)

    systems = [pages(8, 40) for _ in range(SYSTEM_PROMPTS)]
    for _ in range(USERS):
        time = rng.expovariate(1 / 300)
        while time < end:
            chain = rng.choices(systems, [2.0**-i for i in range(SYSTEM_PROMPTS)])[0]
            for _ in range(1 + int(rng.expovariate(1 / 4))):
                chain = chain + pages(2, 12)
                found.append((time, chain))
                time += wait()
            time += rng.expovariate(1 / 600)
    for _ in range(int(documents * len(found))):
        time, document = rng.random() * end, pages(60, 250)
        for _ in range(1 + (rng.random() < 0.3) * int(1 + rng.expovariate(1 / 2))):
            found.append((time, document + pages(1, 4)))
            time += wait()
    return sorted(visit for visit in found if visit[0] < end)


class Policy(Protocol):
    """What is kept of what was seen."""

    def visit(self, number: int, time: float, chain: Chain) -> int:
        """Keep the pages of a prompt; how many of them, from the first, were there."""


class Pool:
    """The engine's own."""

    def __init__(self, pages: int) -> None:
        self.pool = PagePool(pages)

    def visit(self, number: int, time: float, chain: Chain) -> int:
        keys, key = [], 0
        for page in chain:
            ids = pack([page])
            keys.append((key := self.pool.hasher(key, ids, SALT), ids))
        table = self.pool.match(keys, SALT)
        known = len(table)
        self.pool.share(table)
        table += self.pool.take(len(chain) - known)
        for i in range(known, len(chain)):
            self.pool.publish(table[i], *keys[i], table[i - 1] if i else ROOT, SALT)
        self.pool.give(table)
        return known


class Ranked:
    """Gives up the leaf of least worth; worth never falls from a page to the one before it."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.worth: dict[int, float] = {}
        self.heap: list[tuple[float, int, int]] = []

    def visit(self, number: int, time: float, chain: Chain) -> int:
        known = next((i for i, page in enumerate(chain) if page not in self.worth), len(chain))
        held = set(chain[:known])
        for page in held:
            del self.worth[page]
        while len(self.worth) + len(chain) > self.pages:
            worth, _, page = heapq.heappop(self.heap)
            if self.worth.get(page) == worth:
                del self.worth[page]
                self.given_up(page, worth)
        least = -math.inf
        for depth, page in reversed(list(enumerate(chain))):
            least = self.worth[page] = max(least, self.worth_of(page, depth, number, page in held))
            heapq.heappush(self.heap, (least, -depth, page))
        return known

    def worth_of(self, page: int, depth: int, number: int, known: bool) -> float:
        raise NotImplementedError

    def given_up(self, page: int, worth: float) -> None:
        """A page of that worth has gone."""


class GreedyDual(Ranked):
    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.floor = 0.0
        self.hits: dict[int, int] = {}

    def worth_of(self, page: int, depth: int, number: int, known: bool) -> float:
        self.hits[page] = self.hits.get(page, 0) + 1
        return self.floor + self.hits[page] * cost(depth)

    def given_up(self, page: int, worth: float) -> None:
        self.floor = worth
        del self.hits[page]


class Clairvoyant(Ranked):
    def __init__(self, pages: int, trace: list[Visit]) -> None:
        super().__init__(pages)
        self.uses: dict[int, list[int]] = {}
        for number, (_, chain) in enumerate(trace):
            for page in chain:
                self.uses.setdefault(page, []).append(number)

    def worth_of(self, page: int, depth: int, number: int, known: bool) -> float:
        uses = self.uses[page]
        after = bisect_right(uses, number)
        return -uses[after] if after < len(uses) else -math.inf


class Unproven:
    """Two queues; the age of those that were never found again counts twice."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.queues: tuple[OrderedDict[int, float], ...] = (OrderedDict(), OrderedDict())  # unproven, proven

    def visit(self, number: int, time: float, chain: Chain) -> int:
        new, proven = self.queues
        known = next((i for i, page in enumerate(chain) if page not in new and page not in proven), len(chain))
        for page in chain[:known]:
            new.pop(page, None)
            proven.pop(page, None)
        while len(new) + len(proven) + len(chain) > self.pages:
            ages = [(time - next(iter(q.values()), time)) * speed for q, speed in zip(self.queues, (2, 1), strict=True)]
            (new if new and (ages[0] >= ages[1] or not proven) else proven).popitem(last=False)
        for i, page in reversed(list(enumerate(chain))):
            (proven if i < known else new)[page] = time
        return known


def left(policy: Policy, trace: list[Visit]) -> float:
    """The share of the work that was not saved."""
    every = done = 0.0
    for number, (time, chain) in enumerate(trace):
        known = policy.visit(number, time, chain)
        every += sum(map(cost, range(len(chain))))
        done += sum(map(cost, range(known, len(chain))))
    return done / every


def rows(sizes: list[int]) -> Iterator[str]:
    policies: dict[str, Callable[[int, list[Visit]], Policy]] = {
        "pool": lambda pages, trace: Pool(pages),
        "reuse x cost": lambda pages, trace: GreedyDual(pages),
        "unproven": lambda pages, trace: Unproven(pages),
        "clairvoyant": Clairvoyant,
    }
    traces = {
        "chats": visits(0, documents=0.0, pause=40),
        "and documents": visits(1, documents=0.15, pause=40),
        "many documents": visits(2, documents=0.5, pause=40),
        "long pauses": visits(3, documents=0.15, pause=200),
    }
    yield f"{'trace':16}{'pages':>8}" + "".join(f"{name:>14}" for name in policies)
    for name, trace in traces.items():
        for pages in sizes:
            shares = (left(policy(pages, trace), trace) for policy in policies.values())
            yield f"{name:16}{pages:8}" + "".join(f"{share:14.3f}" for share in shares)


if __name__ == "__main__":
    for row in rows([int(arg) for arg in sys.argv[1:]] or [1000, 2000, 4000]):
        print(row, flush=True)
