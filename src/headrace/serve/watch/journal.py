"""One line in the log for each request, where that is asked for.

Owes: no text of a client's or a model's unless that is asked for too, and then cut. Does not know: HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.base.log import note

if TYPE_CHECKING:
    from headrace.core.sampling import SamplingParams
    from headrace.engine.output import Delta
    from headrace.text import Tokenizer

# Parameters that are no text.
_SHOWN = ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Journal:
    """texts: whether prompts and answers are logged; most: characters of each."""

    tokenizer: Tokenizer
    texts: bool = False
    most: int = 1000

    def entry(self, id: str, caller: str, stream: bool, params: SamplingParams, prompts: Sequence[list[int]]) -> Entry:
        """For a request that was submitted."""
        given = {name: value for name in _SHOWN if (value := getattr(params, name)) is not None}
        sizes = {"prompts": len(prompts), "prompt_tokens": sum(map(len, prompts))}
        fields = {"request_id": id, "caller": caller, "stream": stream, **sizes, **given}
        if self.texts:
            fields["prompt"] = self._cut(" | ".join(self.tokenizer.decode(ids[: self.most]) for ids in prompts[:10]))
        return Entry(self, fields)

    def _cut(self, text: str) -> str:
        return text if len(text) <= self.most else text[: self.most] + "…"


class Entry:
    """The line of one request, as it grows."""

    def __init__(self, journal: Journal, fields: dict[str, Any]) -> None:
        self._journal = journal
        self._fields = fields
        self._begun = time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._ends: Counter[str] = Counter()
        self._texts: dict[tuple[int, int], str] = {}
        self._written = False

    def saw(self, prompt: int, deltas: Sequence[Delta]) -> None:
        """News of a prompt."""
        if self._first is None:
            self._first = time.monotonic() - self._begun
        for delta in deltas:
            self._tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._ends[delta.finish_reason] += 1
            if self._journal.texts:
                before = self._texts.get((prompt, delta.index), "")
                if len(before) <= self._journal.most:
                    self._texts[prompt, delta.index] = before + delta.text

    def failed(self, error: Exception) -> None:
        """It did not end well."""
        self._fields["error"] = type(error).__name__

    def close(self) -> None:
        """Writes it; once."""
        if self._written:
            return
        self._written = True
        choices = self._fields["prompts"] * self._fields["n"]
        ends = dict(sorted(self._ends.items()))
        if self._ends.total() < choices:
            ends["unfinished"] = choices - self._ends.total()
        fields = {**self._fields, "output_tokens": self._tokens, "ends": " ".join(f"{k}:{v}" for k, v in ends.items())}
        if self._first is not None:
            fields["first_token_s"] = round(self._first, 4)
        fields["seconds"] = round(time.monotonic() - self._begun, 4)
        if self._journal.texts:
            fields["output"] = self._journal._cut(" | ".join(text for _, text in sorted(self._texts.items())))
        note("request", **fields)
