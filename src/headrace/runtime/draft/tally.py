"""How many guesses were made, and how many were right: in all, by place in the chain, and of each sequence."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.scheduler import Scheduled
from headrace.core.sequence import Sequence


class Tally:
    """drafts: chains that were verified. drafted, accepted: their tokens. accepted_at: right ones by place in it."""

    def __init__(self, longest: int) -> None:
        self.drafts = self.drafted = self.accepted = 0
        self.accepted_at = [0] * longest
        self._of: dict[int, tuple[int, int]] = {}

    def add(self, items: Iterable[Scheduled]) -> list[tuple[Scheduled, int]]:
        """A step with drafts has been taken in; its items that had any, and how many tokens of each were right."""
        verified = []
        for item in items:
            if item.draft:
                said = item.sequence.tokens[item.start + item.count - len(item.draft) :]
                right = sum([a == b for a, b in zip(item.draft, said, strict=False)])
                self._count(item, right)
                verified.append((item, right))
        return verified

    def _count(self, item: Scheduled, right: int) -> None:
        drafted, accepted = self.of(item.sequence)
        self._of[item.sequence.id] = drafted + len(item.draft), accepted + right
        self.drafts += 1
        self.drafted += len(item.draft)
        self.accepted += right
        for n in range(right):
            self.accepted_at[n] += 1

    def forget(self, sequence: Sequence) -> None:
        """Nothing more is asked about a sequence."""
        self._of.pop(sequence.id, None)

    def of(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens drafted for a sequence so far, and those accepted."""
        return self._of.get(sequence.id, (0, 0))

    def told(self) -> tuple[int, int, int, list[int]]:
        """drafts, drafted, accepted, accepted_at."""
        return self.drafts, self.drafted, self.accepted, self.accepted_at
