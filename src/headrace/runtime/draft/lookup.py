"""Where a text's end stood before: the longest match of its last tokens with any earlier place in it.

Owes: the match that a suffix automaton would find, up to a bound on its length, in a few microseconds for thousands of
tokens. Does not know: models, what a match is worth.

An automaton takes some 2 us of Python for each token of a prompt, before anybody asks, and 200 bytes; comparing
all tokens with the last one takes 1 us for 4,000 of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class History:
    """The tokens of a text that grows."""

    __slots__ = ("_held", "size")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.size = 0
        self._held: I32 = np.empty(0, np.int32)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        size = self.size + len(tokens)
        if size > len(self._held):
            held = np.empty(max(2 * len(self._held), size + 64), np.int32)
            held[: self.size] = self._held[: self.size]
            self._held = held
        self._held[self.size : size] = tokens
        self.size = size

    def match(self, longest: int) -> tuple[int, int]:
        """(length, place): the last `length` tokens stand before position `place` too, up to `longest` of them.

        The longest such match; of several the one nearest to the end. (0, 0) where there is none.
        """
        size, known = self.size, self._held
        if size < 2:
            return 0, 0
        ends = (known[: size - 1] == known[size - 1]).nonzero()[0]
        if not len(ends):
            return 0, 0
        length = 1
        while len(ends) > 1 and length < longest:
            if ends[0] < length:
                ends = ends[1:]
            further = ends[known[ends - length] == known[size - 1 - length]]
            if not len(further):
                break
            ends = further
            length += 1
        end = int(ends[-1])
        return (length if len(ends) > 1 else self._length(end, longest)), end + 1

    def _length(self, end: int, longest: int) -> int:
        """How many tokens up to position `end` agree with the last ones."""
        most = min(longest, end + 1)
        there, here = self._held[end + 1 - most : end + 1], self._held[self.size - most : self.size]
        differing = (there != here).nonzero()[0]
        return most - 1 - int(differing[-1]) if len(differing) else most

    def after(self, place: int, count: int) -> tuple[int, ...]:
        """`count` tokens from `place` on; where they reach the end, the text is taken to go on as it did from there."""
        tokens = self._held[place : min(place + count, self.size)].tolist()
        period = len(tokens)
        while len(tokens) < count:
            tokens += tokens[-period:][: count - len(tokens)]
        return tuple(tokens)
