"""Tokens become text: one record of news a step (`Delta`), or the whole answer (`RequestOutput`), under vLLM's names.

Owes: detokenizing, stop strings, log-probabilities as people read them. Does not know: the scheduler, processes, HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from headrace.core.sampling import SamplingParams
from headrace.core.sequence import stop_ids_of
from headrace.engine.messages import Account, Update, WireLogprobs
from headrace.text import Detokenizer, StopStrings, Tokenizer


@dataclass(slots=True)
class Logprob:
    """A token's log-probability in the raw distribution; rank 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # by token id; the token itself comes first, then the best in order


@dataclass(slots=True)
class Delta:
    """News of one choice: new text and tokens, and at its end the reason."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def then(self, later: Delta) -> Delta:
        """Both as one piece of news."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=None if later.logprobs is None else (self.logprobs or []) + later.logprobs,
        )


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in time.monotonic seconds (0: not yet), and how often a sequence had to start again.

    accounts: by choice, what it took; with its end, or where a stop string ended it a step later. drafts: by choice,
    tokens that were guessed ahead, and those of them that were right, if any were guessed.
    """

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    preemptions: int = 0
    accounts: dict[int, Account] = field(default_factory=dict)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def note_drafts(self, update: Update) -> None:
        """What an update says of them."""
        if update.drafted:
            self.drafts[update.choice] = update.drafted, update.accepted


@dataclass(slots=True)
class CompletionOutput:
    """One choice. logprobs: one dict a token, if asked for.

    stop_reason: the stop string or id of the request that ended it; None for the model's own end.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def add(self, delta: Delta) -> None:
        """Take in what came after."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
            gained = sum(next(iter(d.values())).logprob for d in delta.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + gained
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


@dataclass(slots=True)
class RequestOutput:
    """A request and its choices. seed: given, or drawn for it: with it the same tokens come again."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    finished: bool = False
    prompt_logprobs: list[Logprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


def detokenizer(tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int]) -> Detokenizer:
    """For the text of one choice."""
    return Detokenizer(tokenizer, params.skip_special_tokens, prompt[-8:], params.shown_token_ids or ())


class ChoiceText:
    """The text of one choice, as it grows."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, index: int, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._index = index
        self._count = 0
        self.finished = False
        self._ends = stop_ids_of(params, tokenizer.stop_ids)
        self._detokenizer = None
        if params.detokenize:
            self._detokenizer = detokenizer(tokenizer, params, prompt)
        stops = params.stop_strings
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None

    def push(self, update: Update) -> Delta:
        """The news in an update. A stop string ends the choice here, before the engine knows."""
        if self._stops is None or len(update.tokens) < 2:
            return self._push(update)
        first, *rest = _singly(update)
        delta = self._push(first)
        for each in rest:
            if self.finished:  # what was drawn after the token that completed a stop string is not of the answer
                break
            delta = delta.then(self._push(each))
        return delta

    def _push(self, update: Update) -> Delta:
        delta = Delta(self._index, "", update.tokens)
        if update.logprobs is not None:
            delta.logprobs = [readable(entry, self._tokenizer) for entry in update.logprobs]
        delta.text, delta.stop_reason = self._text(update)
        if delta.stop_reason is not None:
            delta.finish_reason = "stop"
        elif update.reason is not None:
            delta.finish_reason, delta.stop_reason, delta.error = update.reason, update.stop, update.message
        self.finished = delta.finish_reason is not None
        return delta

    def _text(self, update: Update) -> tuple[str, str | None]:
        """New text, and the stop string that ended it."""
        if self._detokenizer is None:
            return "", None
        tokens = update.tokens
        stopped = update.reason == "stop" and bool(tokens) and tokens[-1] in self._ends  # a grammar ends without one
        if stopped and not self._params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the stop token itself is not part of the answer
        self._count += len(tokens)
        text = self._detokenizer.push(tokens)
        if update.reason is not None:
            text += self._detokenizer.finish()
        if self._stops is None or self._count <= self._params.min_tokens:
            return text, None
        text, stop = self._stops.push(text)
        if stop is None and update.reason is not None:
            text += self._stops.finish()
        return text, stop


def _singly(update: Update) -> Iterator[Update]:
    """An update of several tokens as so many of one; how it ends is told with the last."""
    last = len(update.tokens) - 1
    for i, token in enumerate(update.tokens):
        logprobs = None if update.logprobs is None else update.logprobs[i : i + 1]
        if i == last:
            yield msgspec.structs.replace(update, tokens=[token], logprobs=logprobs)
        else:
            yield Update(update.request_id, update.choice, [token], logprobs)


def readable(entry: WireLogprobs, tokenizer: Tokenizer) -> Logprobs:
    """A dict by token id: the token itself, then the best of the distribution."""
    token, logprob, rank, top = entry
    out = {token: Logprob(logprob, rank, tokenizer.token_text(token))}
    for place, (other, value) in enumerate(top, 1):
        out.setdefault(other, Logprob(value, place, tokenizer.token_text(other)))
    return out


def readable_prompt(entries: list[WireLogprobs | None], tokenizer: Tokenizer) -> list[Logprobs | None]:
    """One dict for each prompt token; None for the first, which nothing precedes."""
    return [None if entry is None else readable(entry, tokenizer) for entry in entries]
