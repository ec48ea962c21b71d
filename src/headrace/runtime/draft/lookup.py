"""Where a text's end stood before: the longest match of its last tokens with any earlier place in it, or in another.

Owes: the match that a suffix automaton would find, up to a bound on its length, in a microsecond where one goes on and
in some ten where it is looked for among thousands of tokens. Does not know: models, what a match is worth.

An automaton takes some 2 us of Python for each token of a prompt, before anybody asks, and 200 bytes; to compare
all tokens with the last one takes 1 us for 4,000 of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.draft.past import END

I32 = NDArray[np.int32]


class History:
    """The tokens of a text that grows, and the place in it that its end agrees with.

    length, place: the last `length` tokens stand before position `place` too; 0: no such place is known.
    """

    __slots__ = ("_held", "_other", "length", "place", "size")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.size = len(tokens)
        self.length = self.place = 0
        self._other: I32 | None = None  # the text in which `place` lies, if it is not this one
        self._held: I32 = np.empty(self.size + 64, np.int32)
        self._held[: self.size] = tokens

    def follow(self, tokens: Iterable[int]) -> list[tuple[int, bool]]:
        """The text goes on. For each token that was foreseen: length of the match before it, whether it was right."""
        judged: list[tuple[int, bool]] = []
        new = list(tokens)
        self._append(new)
        there = self._held if self._other is None else self._other
        for token in new:
            if not self.length:
                break
            right = self.place < len(there) and bool(there[self.place] == token)
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
        self._other = None
        known = self._held[: self.size]
        self.length, self.place = _longest(known[:-1], known, longest)
        if self.length < shortest:
            self.length = 0

    def look_in(self, other: I32, shortest: int, longest: int) -> None:
        """The same in another text, which stays; what is known already goes before, unless it is shorter."""
        length, place = _longest(other[:-1], self._held[: self.size], longest)
        if length >= shortest and length > self.length:
            self.length, self.place, self._other = length, place, other

    def next(self, count: int) -> tuple[int, ...]:
        """What should follow, if a place is known; where it reaches the end, the text goes round from there."""
        if self._other is not None:
            told: list[int] = self._other[self.place : self.place + count].tolist()
            return tuple(told[: told.index(END)] if END in told else told)
        tokens: list[int] = self._held[self.place : min(self.place + count, self.size)].tolist()
        period = len(tokens)
        while len(tokens) < count:
            tokens += tokens[-period:][: count - len(tokens)]
        return tuple(tokens)


def _longest(text: I32, tail: I32, most: int) -> tuple[int, int]:
    """How many of the last tokens of `tail`, up to `most`, end somewhere in `text`; the place after them."""
    ends = (text == tail[-1:]).nonzero()[0]
    most = min(most, len(tail))
    if not len(ends):
        return 0, 0
    length = 1
    while len(ends) > 1 and length < most:
        if ends[0] < length:
            ends = ends[1:]
        further = ends[text[ends - length] == tail[-1 - length]]
        if not len(further):
            break
        ends = further
        length += 1
    end = int(ends[-1])
    return (length if len(ends) > 1 else _agreeing(text, tail, end, most)), end + 1


def _agreeing(text: I32, tail: I32, end: int, most: int) -> int:
    """How many tokens of `text` up to position `end` agree with the last ones of `tail`."""
    most = min(most, end + 1)
    differing = (text[end + 1 - most : end + 1] != tail[len(tail) - most :]).nonzero()[0]
    return most - 1 - int(differing[-1]) if len(differing) else most
