"""What a request waited for and what it cost, as clients read it: the `timings` block, and `usage.cost`.

Owes: parts that add up. Does not know: how machine time is divided (`engine.account`).

Names: ours; llama-server's (tools/server/README.md) where the meaning is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Struct, UnsetType

from headrace.engine.messages import Account

if TYPE_CHECKING:
    from headrace.engine.client import Stream


class PrefillChunk(Struct, frozen=True, kw_only=True):
    """One step's part of the prompt: where from, how much, the step's time, this choice's share of it, others in it.

    at_ms: when the step began, since arrival.
    """

    start: int
    tokens: int
    at_ms: float
    ms: float
    share: float
    mates: int


class BatchMates(Struct, frozen=True, kw_only=True):
    """Other sequences in the steps of this one."""

    mean: float
    max: int


class MachineTime(Struct, frozen=True, kw_only=True):
    """This choice's share of the time of all its steps."""

    prompt: float
    completion: float


class Timings(Struct, frozen=True, kw_only=True):
    """One choice. queue_ms + prefill_ms + decode_ms = total_ms: arrival, first step, first token, end.

    token_ms: when each token reached the server's front end, since arrival. prefill: at most 256 chunks, the last of
    which may be several. draft_n: tokens that were guessed ahead, if any; draft_n_accepted: and right. others: further
    choices, of all prompts.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float
    prefill: list[PrefillChunk]
    decode_steps: int
    batch_mates: BatchMates
    preemptions: int
    recomputed_tokens: int
    cached_tokens: int
    machine_ms: MachineTime
    token_ms: list[float]
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET
    others: list[Timings] | UnsetType = UNSET


class CostDetails(Struct, frozen=True, kw_only=True):
    prompt: float
    completion: float


def timings_of(streams: Sequence[Stream], counts: Sequence[int]) -> Timings | UnsetType:
    """Of all choices of the streams, which ended with their accounts. counts: tokens of each choice, in order."""
    blocks: list[Timings] = []
    for stream in streams:
        for choice in range(stream.choices):
            account = stream.metrics.accounts.get(choice)
            if account is not None:
                blocks.append(_timings(account, stream, choice, counts[len(blocks)]))
    if not blocks:
        return UNSET
    first, *others = blocks
    return msgspec.structs.replace(first, others=others) if others else first


def guessed_of(streams: Sequence[Stream]) -> tuple[int, int] | None:
    """Tokens guessed ahead in all choices of the streams, right ones and wrong ones; None where none were."""
    each = [drafts for stream in streams for drafts in stream.metrics.drafts.values()]
    accepted = sum(right for _, right in each)
    return (accepted, sum(drafted for drafted, _ in each) - accepted) if each else None


def cost_of(streams: Sequence[Stream], price_per_hour: float) -> CostDetails:
    """What all choices of the streams cost, in the price's unit."""
    accounts = [account for stream in streams for account in stream.metrics.accounts.values()]
    each = price_per_hour / 3600
    return CostDetails(
        prompt=each * sum(account.prompt_machine for account in accounts),
        completion=each * sum(account.completion_machine for account in accounts),
    )


def _timings(account: Account, stream: Stream, choice: int, tokens: int) -> Timings:
    times = (stream.token_times or {}).get(choice, [])[:tokens]
    drafted, accepted = stream.metrics.drafts.get(choice, (UNSET, UNSET))
    computed = len(stream.prompt_token_ids) - account.cached
    prefill, decode = 1e3 * account.prefill, 1e3 * account.decode
    return Timings(
        queue_ms=1e3 * account.queue,
        prefill_ms=prefill,
        decode_ms=decode,
        total_ms=1e3 * account.queue + prefill + decode,
        prefill=[
            PrefillChunk(start=start, tokens=count, at_ms=1e3 * at, ms=1e3 * seconds, share=share, mates=mates)
            for start, count, seconds, share, mates, at in account.chunks
        ],
        decode_steps=account.decode_steps,
        batch_mates=BatchMates(mean=account.mean_mates, max=account.most_mates),
        preemptions=account.preemptions,
        recomputed_tokens=account.recomputed,
        cached_tokens=account.cached,
        machine_ms=MachineTime(prompt=1e3 * account.prompt_machine, completion=1e3 * account.completion_machine),
        token_ms=[round(1e3 * (when - stream.metrics.arrival), 3) for when in times],
        cache_n=account.cached,
        prompt_n=computed,
        prompt_ms=prefill,
        prompt_per_token_ms=_over(prefill, computed),
        prompt_per_second=_over(1e3 * computed, prefill),
        predicted_n=tokens,
        predicted_ms=decode,
        predicted_per_token_ms=_over(decode, tokens - 1),
        predicted_per_second=_over(1e3 * (tokens - 1), decode),
        draft_n=drafted,
        draft_n_accepted=accepted,
    )


def _over(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
