"""What the front end and the engine say to each other: one message a line of this file, msgpack on a local socket.

In one process (`LLM`) the same records are passed by hand.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.sampling import SamplingParams

# A token's log-probabilities on the wire: token, log-probability, rank, ((id, log-probability), ...).
WireLogprobs = tuple[int, float, int, tuple[tuple[int, float], ...]]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """When a request runs, beside whom, and for whom; what it is answered never depends on them.

    priority: smaller first. cache_salt: keeps prefixes apart. tenant: whose request it is, "" for nobody in particular;
    weight: the tenant's share against others', above 0. deadline: time.monotonic seconds at which it ends; 0: none.
    """

    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0
    deadline: float = 0.0


NO_TERMS = Terms()


class Add(msgspec.Struct, tag=True, frozen=True):
    """A checked request: `params.n` sequences. stop_ids: the model's own. arrival: time.monotonic seconds."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    terms: Terms = NO_TERMS
    arrival: float = 0.0


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Nobody reads this request any more."""

    request_id: str


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """The text of a choice has met a stop string: it needs no more tokens."""

    request_id: str
    choice: int
    stop: str


class AskTrace(msgspec.Struct, tag=True, frozen=True):
    """The last records of the step trace, please."""

    last: int
    ticket: int


class Quit(msgspec.Struct, tag=True, frozen=True):
    """End the engine process."""


class Update(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """News of one choice after a step.

    reason: set when it has ended ("stop", "length", "abort", "error"); stop: the stop id or string, if one ended it.
    prompt_logprobs: with the first update of a choice that asked for them; the first prompt token has none.
    cached: prompt tokens found in the prefix cache. scheduled: when it first ran, time.monotonic seconds.
    """

    request_id: str
    choice: int
    tokens: list[int]
    logprobs: list[WireLogprobs] | None = None
    prompt_logprobs: list[WireLogprobs | None] | None = None
    reason: str | None = None
    stop: int | str | None = None
    message: str | None = None
    cached: int = 0
    preemptions: int = 0
    scheduled: float = 0.0


class Stats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A snapshot of the engine. The last six only grow.

    prompt_tokens: computed, or found in the cache; again for each choice and after a preemption. prefix numbers count
    prompt tokens."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    steps: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded. Sizes in bytes; page_bytes is of one KV page of page_tokens tokens over all layers."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    page_tokens: int
    pages: int
    page_bytes: int
    weight_bytes: int
    max_logprobs: int
    threads: int
    isa: str
    load_seconds: float
    generation: dict[str, Any] = msgspec.field(default_factory=dict)


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine can take requests."""

    info: ModelInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start: the class of `base.errors` and what its constructor takes."""

    kind: str
    args: list[str]
    fields: dict[str, str | None]


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request that the scheduler can never run."""

    request_id: str
    message: str
    param: str | None
    code: str | None


class News(msgspec.Struct, tag=True, frozen=True, gc=False):
    """What one step brought, for all sequences."""

    updates: list[Update]
    stats: Stats


class TraceReply(msgspec.Struct, tag=True, frozen=True):
    """Answers `AskTrace`."""

    ticket: int
    records: list[dict[str, Any]]


ToEngine = Add | Abort | Stopped | AskTrace | Quit
FromEngine = Ready | Failed | Refused | News | TraceReply
