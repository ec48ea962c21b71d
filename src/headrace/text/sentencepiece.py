"""SentencePiece-style BPE: the neighbouring pair whose joint token scores best is merged first.

Owes: an encoder that is ready as soon as the vocabulary is a dict. The tokenizers library wants a list of merges, which
takes a second to derive for 262,144 tokens; scores need none. Source: google/sentencepiece, bpe_model.cc.
Does not know: added tokens, files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

SPACE = "\u2581"  # stands for a space inside tokens
_CACHED_LENGTH, _CACHED_WORDS = 48, 1 << 16


class ScoredBpe:
    """Encodes text with a scored vocabulary.

    ids: token -> id, of the tokens that merging may make. scores: by id, higher merges first.
    bytes_: ids of the 256 byte tokens for characters without a token, or () if there are none.
    unknown: the id of such characters where there are no byte tokens; None leaves them out.
    prefix: whether a space is put before each text.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Sequence[float],
        bytes_: Sequence[int] = (),
        unknown: int | None = None,
        prefix: bool = False,
    ) -> None:
        self._ids, self._scores, self._bytes, self._unknown = ids, scores, bytes_, unknown
        self._prefix = SPACE if prefix else ""
        self._cache: dict[str, list[int]] = {}
        self._boundary = _word_boundary(ids)

    def __call__(self, text: str) -> list[int]:
        """The ids of `text`."""
        if not text:
            return []
        out: list[int] = []
        for word in self._boundary.split(self._prefix + text.replace(" ", SPACE)):
            out += self._cache.get(word) or self._word(word)
        return out

    def _word(self, word: str) -> list[int]:
        ids = self._drop_repeats([i for piece in self._merge(word) for i in self._piece(piece)])
        if len(word) <= _CACHED_LENGTH:
            if len(self._cache) >= _CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _piece(self, piece: str) -> Sequence[int]:
        if (found := self._ids.get(piece)) is not None:
            return (found,)
        if self._bytes:
            return [self._bytes[byte] for byte in piece.encode("utf-8")]
        return () if self._unknown is None else (self._unknown,)

    def _drop_repeats(self, ids: list[int]) -> list[int]:
        """One unknown token for a run of unknown characters."""
        if self._unknown is None or self._unknown not in ids:
            return ids
        return [i for n, i in enumerate(ids) if i != self._unknown or n == 0 or ids[n - 1] != i]

    def _merge(self, word: str) -> list[str]:
        """The pieces of a word after all merges: O(n log n).

        `pieces` is a linked list over positions: a piece lies at the position of its first character, "" where a
        piece was eaten.
        """
        count = len(word)
        pieces, before, after = list(word), list(range(-1, count - 1)), list(range(1, count + 1))
        ids, scores = self._ids, self._scores
        pairs = ((at, ids.get(word[at : at + 2])) for at in range(count - 1))
        heap = [(-scores[i], at, 2) for at, i in pairs if i is not None]
        heapify(heap)
        while heap:
            _, at, length = heappop(heap)
            right = after[at]
            if right >= count or not pieces[at] or len(pieces[at]) + len(pieces[right]) != length:
                continue  # one of the two has been merged with another since
            pieces[at] += pieces[right]
            pieces[right] = ""
            after[at] = beyond = after[right]
            if beyond < count:
                before[beyond] = at
            for left, other in ((before[at], at), (at, beyond)):
                if left < 0 or other >= count:
                    continue
                joint = pieces[left] + pieces[other]
                if (found := ids.get(joint)) is not None:
                    heappush(heap, (-scores[found], left, len(joint)))
        return [piece for piece in pieces if piece]


def _word_boundary(ids: Mapping[str, int]) -> re.Pattern[str]:
    """Where a text can be cut without changing its ids: before a space that no token holds after the same character."""
    inside = set(re.findall(f"[^\0](?={SPACE})", "\0".join(ids)))
    behind = f"(?<![{re.escape(''.join(sorted(inside)))}])" if inside else ""
    return re.compile(f"(?!^){behind}(?={SPACE})")
