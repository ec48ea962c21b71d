"""What the front end and the engine say to each other: one message a line of this file, msgpack on a local socket.

In one process (`LLM`) the same records are passed by hand.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec

from headrace.core.pages import pages_for
from headrace.core.sampling import SamplingParams
from headrace.core.windows import window_pages
from headrace.text.grammar import Grammar, Vocabulary
from headrace.weights.report import Quality

# A token's log-probabilities on the wire: token, log-probability, rank, ((id, log-probability), ...).
WireLogprobs = tuple[int, float, int, tuple[tuple[int, float], ...]]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """When a request runs, beside whom, and for whom; what it is answered never depends on them.

    priority: smaller first. cache_salt: keeps prefixes apart. tenant: whose request it is, "" for nobody in particular;
    weight: the tenant's share against others', above 0. deadline: time.monotonic seconds at which it ends; 0: none.
    drafted: the most tokens that are guessed after one; None: as many as the engine's settings say.
    """

    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0
    deadline: float = 0.0
    drafted: int | None = None


NO_TERMS = Terms()


class Add(msgspec.Struct, tag=True, frozen=True):
    """A checked request: `params.n` sequences. stop_ids: the model's own. arrival: time.monotonic seconds.

    grammar: what `params.structured_outputs` asked for; `Words` must have come before.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    terms: Terms = NO_TERMS
    arrival: float = 0.0
    grammar: Grammar | None = None


class Words(msgspec.Struct, tag=True, frozen=True):
    """The bytes of the tokens, for grammars."""

    vocabulary: Vocabulary


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


# Part of a prompt, or tokens computed again: first position, tokens, seconds of the step, share of it, others in it,
# seconds from the request's arrival to the step's beginning.
Chunk = tuple[int, int, float, float, int, float]


class Account(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a choice took of the machine, and when. All times in seconds.

    queue, prefill, decode: from arrival to the first step's beginning, to the first token, to the end: its whole life.
    chunks: at most 256, the last of which may be several. decode_steps: steps for one more token each, step_seconds:
    how long these took. prompt_machine, completion_machine: its shares of all its steps, for rows of either kind.
    mean_mates, most_mates: other sequences in its steps. recomputed: tokens, after preemptions. cached: prompt tokens
    found in the prefix cache.
    """

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    chunks: list[Chunk] = msgspec.field(default_factory=list)
    decode_steps: int = 0
    step_seconds: float = 0.0
    prompt_machine: float = 0.0
    completion_machine: float = 0.0
    mean_mates: float = 0.0
    most_mates: int = 0
    preemptions: int = 0
    recomputed: int = 0
    cached: int = 0

    @property
    def machine(self) -> float:
        """Seconds of the machine."""
        return self.prompt_machine + self.completion_machine


class Update(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """News of one choice after a step.

    reason: set when it has ended (see `core.sequence.Reason`); stop: the stop id or string, if one ended it.
    prompt_logprobs: with the first update of a choice that asked for them; the first prompt token has none.
    cached: prompt tokens found in the prefix cache. scheduled: when it first ran, time.monotonic seconds. account: with
    the last one. drafted, accepted: tokens that were guessed ahead so far, and those of them that were right.
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
    account: Account | None = None
    drafted: int = 0
    accepted: int = 0


STEP_TOKENS = (1, 8, *(1 << e for e in range(4, 15)))  # vLLM's buckets of vllm:iteration_tokens_total


class Stats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A snapshot of the engine. From prompt_tokens on all only grow; `since` counts on after a restart.

    prompt_tokens: computed, or found in the cache; again for each choice and after a preemption. prefix numbers count
    prompt tokens. *_seconds: of all steps, by part; *_machine: the same, divided among sequences, and what those had
    of it that were given up. recomputed: tokens, after preemptions. step_tokens: steps by their tokens, as many as
    `STEP_TOKENS` at most, the last ones with more; all_tokens: of all steps. prompt_token_time, step_time: seconds that
    a prompt's token takes in a full step, and the least that a step takes, as learnt so far; 0: not yet.
    cached_tokens: those of prompt_tokens that were found in the cache. read_bytes, macs: of all steps, as counted from
    the model; roof_seconds: the least that they could take, if the machine's rates were measured.
    drafts: chains of guessed tokens that were verified; drafted_tokens, accepted_tokens: these, and those that were
    right; accepted_at: right ones by their place in the chain; [] without speculation.
    slots: of layers with windows; in the windows of sequences, and kept for prefix hits; 0 where pages hold all layers.
    file_pages: pages in the file of --kv-cache-dir; file_traffic: those that were loaded, stored, found to be damaged,
    [] without it; loaded_tokens: prompt tokens that came from there, part of prefix_hits.
    """

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
    schedule_seconds: float = 0.0
    run_seconds: float = 0.0
    commit_seconds: float = 0.0
    prompt_machine: float = 0.0
    completion_machine: float = 0.0
    aborted_machine: float = 0.0
    recomputed: int = 0
    all_tokens: int = 0
    step_tokens: list[int] = msgspec.field(default_factory=list)
    prompt_token_time: float = 0.0
    step_time: float = 0.0
    cached_tokens: int = 0
    read_bytes: float = 0.0
    macs: float = 0.0
    roof_seconds: float = 0.0
    slots_used: int = 0
    slots_cached: int = 0
    slots: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = msgspec.field(default_factory=list)
    file_pages: int = 0
    file_traffic: list[int] = msgspec.field(default_factory=list)
    loaded_tokens: int = 0

    def since(self, past: Stats) -> Stats:
        """These numbers, with what only grows counted on from `past`: an engine that was started again begins at 0."""
        grown = {name: _sum(getattr(past, name), getattr(self, name)) for name in COUNTERS}
        return msgspec.structs.replace(self, **grown)

    def after_the_end(self) -> Stats:
        """What is left of an engine that died: what only grows."""
        return Stats(pages=self.pages, slots=self.slots, **{name: getattr(self, name) for name in COUNTERS})


_GAUGES = {"running", "waiting", "pages_used", "pages_cached", "pages", "prompt_token_time", "step_time", "file_pages"}
_GAUGES |= {"slots_used", "slots_cached", "slots"}
COUNTERS = tuple(name for name in Stats.__struct_fields__ if name not in _GAUGES)


def _sum(a: Any, b: Any) -> Any:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)] if isinstance(a, list) else a + b


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded. Sizes in bytes; page_bytes is of one KV page of page_tokens tokens over all layers.

    slots: where there are any, pages are those of layers that see everything; slot_bytes is of one slot over the
    others, which see `window` tokens at most.

    quantization: what float weights were rounded to as they were loaded. parameters: numbers in the model's file.
    trained_len: tokens of its own context. dim: width of its residual stream.
    generation: sampling defaults, by the names of generation_config.json. quality: what was measured, if anything was.
    """

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
    kv_cache_dtype: str = "float16"
    quantization: str = ""
    parameters: int = 0
    trained_len: int = 0
    dim: int = 0
    generation: dict[str, Any] = msgspec.field(default_factory=dict)
    quality: Quality | None = None
    slots: int = 0
    slot_bytes: int = 0
    window: int = 0

    @property
    def cache_bytes(self) -> int:
        """Of the KV cache."""
        return self.pages * self.page_bytes + self.slots * self.slot_bytes

    @property
    def concurrency(self) -> float:
        """How many sequences of max_model_len tokens the KV cache holds."""
        pages = pages_for(self.max_model_len, self.page_tokens)
        by_pages = self.pages * self.page_tokens / self.max_model_len
        slots = min(window_pages(self.window, self.page_tokens), pages)
        return min(by_pages, self.slots / slots) if self.slots else by_pages


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
    """What one step brought, for all sequences. began: the request of each sequence that ran for the first time."""

    updates: list[Update]
    stats: Stats
    began: list[str] = []


class TraceReply(msgspec.Struct, tag=True, frozen=True):
    """Answers `AskTrace`."""

    ticket: int
    records: list[dict[str, Any]]


ToEngine = Add | Words | Abort | Stopped | AskTrace | Quit
FromEngine = Ready | Failed | Refused | News | TraceReply
