"""Where a text's end stood before: the longest match of its last tokens with any earlier place in it.

Owes: the match that a suffix automaton would find, up to a bound on its length, in a microsecond where one goes on and
in some ten where it is looked for among thousands of tokens. Does not know: models, what a match is worth.

An automaton takes some 2 us of Python for each token of a prompt, before anybody asks, and 200 bytes; to compare
all tokens with the last one takes 1 us for 4,000 of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class History:
    """The tokens of a text that grows, and the place in it that its end agrees with.

    length, place: the last `length` tokens stand before position `place` too; 0: no such place is known.
    """

    __slots__ = ("_held", "length", "place", "size")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.size = len(tokens)
        self.length = self.place = 0
        self._held: I32 = np.empty(self.size + 64, np.int32)
        self._held[: self.size] = tokens

    def follow(self, tokens: Iterable[int]) -> list[tuple[int, bool]]:
        """The text goes on. For each token that was foreseen: length of the match before it, whether it was right."""
        judged: list[tuple[int, bool]] = []
        new = list(tokens)
        self._append(new)
        for token in new:
            if not self.length:
                break
            right = bool(self._held[self.place] == token)
            judged.append((self.length, right))
            self.length = self.length + 1 if right else 0
            self.place += 1
        return judged

    def _append(self, tokens: list[int]) -> None:
        end = self.size + len(tokens)
        if end > len(self._held):
            self._held = np.concatenate((self._held, np.empty(end, np.int32)))
        self._held[self.size : end] = tokens
        self.size = end

    def look_up(self, shortest: int, longest: int) -> None:
        """Find the longest match of `shortest` to `longest` tokens; of several the one nearest to the end."""
        self.length, self.place = self._longest(longest)
        if self.length < shortest:
            self.length = 0

    def next(self, count: int) -> tuple[int, ...]:
        """What should follow, if a place is known; where it reaches the end, the text goes round from there."""
        tokens: list[int] = self._held[self.place : min(self.place + count, self.size)].tolist()
        period = len(tokens)
        while len(tokens) < count:
            tokens += tokens[-period:][: count - len(tokens)]
        return tuple(tokens)

    def _longest(self, most: int) -> tuple[int, int]:
        size, known = self.size, self._held
        ends = (known[: max(size - 1, 0)] == known[size - 1]).nonzero()[0]
        if not len(ends):
            return 0, 0
        length = 1
        while len(ends) > 1 and length < most:
            if ends[0] < length:
                ends = ends[1:]
            further = ends[known[ends - length] == known[size - 1 - length]]
            if not len(further):
                break
            ends = further
            length += 1
        end = int(ends[-1])
        return (length if len(ends) > 1 else self._agreeing(end, most)), end + 1

    def _agreeing(self, end: int, most: int) -> int:
        """How many tokens up to position `end` agree with the last ones."""
        most = min(most, end + 1)
        there, here = self._held[end + 1 - most : end + 1], self._held[self.size - most : self.size]
        differing = (there != here).nonzero()[0]
        return most - 1 - int(differing[-1]) if len(differing) else most
