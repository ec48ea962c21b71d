"""What earlier sequences have said, for look-ups of later ones.

Owes: at most so many tokens in all, the oldest sequences going first; and that nobody finds what was said under another
key. Does not know: who the keys are, what is looked up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
Key = tuple[str, str]

END = -1  # after each sequence: no token
_SHARE = 4  # one sequence takes no more than one of so many parts


class Past:
    """most: tokens, with the ends of sequences."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: dict[Key, I32] = {}
        self._order: deque[tuple[Key, int]] = deque()
        self._size = 0

    def add(self, key: Key, tokens: Sequence[int]) -> None:
        """A sequence has ended."""
        text = np.array([*tokens[-max(self._most // _SHARE - 1, 1) :], END], np.int32)
        while self._order and self._size + len(text) > self._most:
            self._drop()
        if len(text) <= self._most:
            self._texts[key] = np.concatenate((self._texts.get(key, text[:0]), text))
            self._order.append((key, len(text)))
            self._size += len(text)

    def of(self, key: Key) -> I32 | None:
        """All that was said under a key, as it stays."""
        return self._texts.get(key)

    def _drop(self) -> None:
        key, count = self._order.popleft()
        self._size -= count
        rest = self._texts[key][count:]
        if len(rest):
            self._texts[key] = rest.copy()
        else:
            del self._texts[key]
