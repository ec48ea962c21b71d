"""One choice of one request, as the scheduler sees it.

Owes: the counters from which everything else follows (`tokens`, `computed`, `pages`) and the rule by which a token
ends a sequence. Does not know: text, tensors, clocks, who else runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.core.sampling import SamplingParams

TIMEOUT = "timeout"  # the `Finish.stop` of a sequence whose time was over; its reason is "length"
NONE_ALLOWED = "no token is allowed here: allowed_token_ids, logit_bias, bad words and the grammar forbid them all"
TOO_COMPLEX = "the grammar has become too complex here: simplify its patterns"
DEAD_ENDS = (NONE_ALLOWED, TOO_COMPLEX)  # errors that a request has made itself
REPEATS = "repetition_detected"  # the `Finish.stop` of a sequence that `repetition_detection` ended, as in vLLM
Reason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended.

    stop: the id of `stop_token_ids` or the stop string that ended it; None for an end-of-text id, as in vLLM.
    message: what went wrong, for "error".
    """

    reason: Reason
    stop: int | str | None = None
    message: str | None = None


class Constraint(Protocol):
    """Which tokens may come next in a sequence: `text.grammar` has one, and says what is meant."""

    @property
    def complete(self) -> bool:
        """Whether the sequence may end here."""

    @property
    def stopped(self) -> bool:
        """Whether it can only end here."""

    @property
    def error(self) -> str | None:
        """Why it can go on no more."""

    def mask(self, row: Any) -> bool:
        """Write what may come next, one bit for each id, into an int32 array; False on an error."""

    def accept(self, token: int) -> bool:
        """Take in a token that the mask allowed; False on an error."""

    def copy(self) -> Constraint:
        """Another one at the same place."""

    def valid(self, tokens: Items[int]) -> int:
        """How many of these tokens, from the first, may follow one another here."""


class Sequence:
    """Tokens of one choice, and how far the model has come with them.

    There is no phase: `computed` counts the tokens whose keys and values lie in `pages`, and a sequence whose tokens
    have all been given to a step yields logits there. Prefix hits, chunks, preemption and drafts move `computed`.

    id: unique in the engine. request, choice: whose, and which of its `n`. seed: u64, drawn by the caller if not given.
    stop_ids: ids that end it: the model's (none with `ignore_eos`) and the caller's.
    max_len: hard cap of len(tokens); never more than the prompt and `max_tokens`; the scheduler lowers it to what fits.
    pages: page p holds positions 32p..32p+31. Entries change only together with `moves`, else the list just grows.
    cached: prompt tokens found in the prefix cache at the first admission. salt: keeps tenants' pages apart.
    constraint: what the tokens drawn must look like; it has taken in those that are there.
    priority: smaller first. tenant: whose it is; weight: the tenant's share against others'.
    wants_prompt_logprobs: needs every row's logits, so takes nothing from the prefix cache.
    detects: whether `repetition_detection` may end it. drafted: most tokens that may be guessed after one; None: any.
    """

    __slots__ = (
        "cached",
        "chain",
        "choice",
        "computed",
        "constraint",
        "detects",
        "drafted",
        "finish",
        "hashed",
        "id",
        "max_len",
        "moves",
        "pages",
        "paid",
        "params",
        "preemptions",
        "priority",
        "prompt_len",
        "rank",
        "request",
        "salt",
        "seed",
        "stop_ids",
        "tenant",
        "tokens",
        "turn",
        "wants_prompt_logprobs",
        "weight",
    )

    def __init__(
        self,
        id: int,
        request: str,
        choice: int,
        params: SamplingParams,
        seed: int,
        tokens: Iterable[int],
        *,
        stop_ids: Iterable[int] = (),
        max_len: int | None = None,
        salt: str = "",
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        wants_prompt_logprobs: bool | None = None,
        drafted: int | None = None,
    ) -> None:
        self.id = id
        self.request = request
        self.choice = choice
        self.params = params
        self.seed = seed
        self.tokens = list(tokens)
        self.prompt_len = len(self.tokens)
        self.stop_ids = stop_ids_of(params, stop_ids)
        self.max_len = min(_cap(self.prompt_len, params.max_tokens), sys.maxsize if max_len is None else max_len)
        self.salt = salt
        self.priority = priority
        self.tenant = tenant
        self.weight = weight
        self.drafted = drafted
        self.detects = params.repetition_detection is not None
        asked = params.prompt_logprobs is not None
        self.wants_prompt_logprobs = asked if wants_prompt_logprobs is None else wants_prompt_logprobs
        self.computed = 0
        self.pages: list[int] = []
        self.moves = 0
        self.cached = 0
        self.constraint: Constraint | None = None
        self.preemptions = 0
        self.finish: Finish | None = None
        # The scheduler's own: place among those that wait and that run, tokens that its tenant was charged for, hash
        # chain of full pages, how many of them were offered to the index.
        self.turn = self.rank = (0, -1)
        self.paid = 0
        self.chain: list[tuple[int, bytes]] = []
        self.hashed = 0

    def __repr__(self) -> str:
        return (
            f"Sequence(id={self.id}, request={self.request!r}, choice={self.choice}, "
            f"computed={self.computed}/{len(self.tokens)}, pages={self.pages}, finish={self.finish})"
        )

    @property
    def generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_len

    def ended_by(self, token: int) -> Finish | None:
        """The reason why `token`, just appended, is the last one; None if it is not.

        A stop id among the first `min_tokens` does not count: the sampler masks it there as well.
        """
        if token in self.stop_ids and self.generated > self.params.min_tokens:
            return Finish("stop", token if token in (self.params.stop_token_ids or ()) else None)
        if len(self.tokens) >= self.max_len:
            return Finish("length")
        asked = self.params.repetition_detection
        if asked is not None and self.generated > self.params.min_tokens and self._repeats(asked):
            return Finish("repetition", REPEATS)
        return None

    def _repeats(self, asked: Mapping[str, int]) -> bool:
        """Whether the answer ends with a pattern of the sizes asked for, so many times in a row."""
        tokens, count = self.tokens, asked["min_count"]
        for size in range(max(asked.get("min_pattern_size") or 1, 1), asked["max_pattern_size"] + 1):
            if size * count > self.generated:
                return False
            if tokens[-1] == tokens[-1 - size] and tokens[-size * (count - 1) :] == tokens[-size * count : -size]:
                return True
        return False


def stop_ids_of(params: SamplingParams, model: Iterable[int]) -> frozenset[int]:
    """Ids that end a sequence: the model's, unless they are to be ignored, and the request's."""
    return frozenset(() if params.ignore_eos else model) | frozenset(params.stop_token_ids or ())


def _cap(prompt: int, max_tokens: int | None) -> int:
    return sys.maxsize if max_tokens is None else prompt + max_tokens
