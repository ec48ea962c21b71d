"""Guesses at the tokens to come, which a step then verifies for little more than it costs without them.

A `Speculator` says how many tokens to guess for whom, and which. What it says changes how fast answers come, never what
they are.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from headrace.core.scheduler import Batch, Scheduled
from headrace.core.sequence import Sequence
from headrace.runtime.draft.held import Apart, Held, Shared
from headrace.runtime.draft.lookup import History
from headrace.runtime.draft.model import Drafter, ModelDraft
from headrace.runtime.draft.suffix import LookUps
from headrace.runtime.draft.tally import Tally

__all__ = ["Apart", "Drafter", "Held", "History", "LookUps", "ModelDraft", "Shared", "Speculator", "Tally"]


class Speculator(Protocol):
    """Guesses for the sequences of one engine.

    guesses: asked for a step's items before it runs; UNKNOWN stands for tokens that are guessed only once rows and
    pages are there for them: `fill` then says which they are. learn: after a step, with its seconds; how many
    were right.
    """

    tally: Tally

    def guesses(self, items: list[Scheduled]) -> list[tuple[Scheduled, tuple[int, ...]]]: ...

    def fill(self, batch: Batch) -> Items[tuple[Scheduled, tuple[int, ...]]]: ...

    def learn(self, items: list[Scheduled], seconds: float) -> int: ...

    def forget(self, sequence: Sequence) -> None: ...
