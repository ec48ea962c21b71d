"""Finds added tokens in text, leftmost first and the longest of those.

Owes: the cut of a text into added tokens and what lies between, in time linear in the text whatever it holds.
Does not know: how the rest is tokenized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from headrace.text.lexicon import AddedToken

_HEAD = 2  # characters looked at before lengths are tried


class Splitter:
    """Cuts texts at a fixed set of added tokens."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.text: token for token in tokens if token.text}
        heads: dict[str, set[int]] = {}
        for text in self._tokens:
            heads.setdefault(text[:_HEAD], set()).add(len(text))
        for head, lengths in heads.items():
            lengths |= heads.get(head[:1], set())
        self._lengths = {head: sorted(lengths, reverse=True) for head, lengths in heads.items()}
        choices = sorted(heads, key=len, reverse=True)
        self._head = re.compile("|".join(map(re.escape, choices))) if choices else None

    def find(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        """Yield (start, end, token) of each added token in `text`, in order, without overlap."""
        if self._head is None:
            return
        at = 0
        while match := self._head.search(text, at):
            start = match.start()
            token = self._longest(text, start, match.group())
            at = start + len(token.text) if token else start + 1
            if token:
                yield start, at, token

    def split(self, text: str) -> Iterator[tuple[str, AddedToken | None]]:
        """Yield (text before a token, the token); at last (what remains, None). White space that a token swallows is
        gone.
        """
        at, swallow = 0, False
        for start, end, token in self.find(text):
            piece = text[at:start].lstrip() if swallow else text[at:start]
            yield (piece.rstrip() if token.lstrip else piece), token
            at, swallow = end, token.rstrip
        yield (text[at:].lstrip() if swallow else text[at:]), None

    def _longest(self, text: str, start: int, head: str) -> AddedToken | None:
        found = (self._tokens.get(text[start : start + length]) for length in self._lengths[head])
        return next((token for token in found if token), None)
