"""What crosses the seam each step: plain arrays in, plain arrays out.

One step runs T rows (tokens) of B sequences; R of the rows yield logits, and each of these is sampled or scored.
Rows of one sequence are consecutive and their positions ascend by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]

NO_COPIES: I32 = np.zeros((0, 2), np.int32)


@dataclass(slots=True)
class Sampling:
    """How each of the R logits rows becomes a token. All arrays have length R unless said otherwise.

    temperature: 0 (or below 1e-5) is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    repetition (1 off), presence, frequency (0 off): over the row's penalty list.
    seed, position, choice: the key of the noise: a token is a function of its logits and this key. position is that
        of the new token.
    target: a token id to score (prompt log-probabilities), or -1 to sample.
    logprobs: how many of the best of the raw distribution to report; -1: no log-probability at all, 0: of the token
        alone.
    bias_indptr [R+1], bias_ids, bias_values: added to logits; -inf forbids.
    penalty_indptr [R+1], penalty_ids, penalty_counts: ids seen in prompt or output; count in the output alone (0:
        prompt only).
    mask_rows: index of the row of `masks` that allows tokens, or -1. masks: int32 [n, ceil(vocab / 32)], bit i of
        word w allows 32 w + i.
    """

    temperature: F32
    top_k: I32
    top_p: F32
    min_p: F32
    repetition: F32
    presence: F32
    frequency: F32
    seed: U64
    position: I32
    choice: I32
    target: I32
    logprobs: I32
    bias_indptr: I32
    bias_ids: I32
    bias_values: F32
    penalty_indptr: I32
    penalty_ids: I32
    penalty_counts: I32
    mask_rows: I32
    masks: I32


@dataclass(slots=True)
class Step:
    """One step's inputs.

    tokens, positions [T]. query_start [B+1]: rows of sequence b are query_start[b] .. query_start[b+1].
    context [B]: tokens of sequence b in the cache once this step has written its own. page_indptr [B+1], pages: the
        page tables, position p lies in page pages[page_indptr[b] + p // 32].
    copies [C, 2]: pages to copy first, from and to, in order. fresh: pages to zero then.
    logit_rows [R]: ascending. keep_logits: also return the raw logits (tests, evaluation). taps: names of values to
        return.
    """

    tokens: I32
    positions: I32
    query_start: I32
    context: I32
    page_indptr: I32
    pages: I32
    fresh: I32
    logit_rows: I32
    sampling: Sampling
    keep_logits: bool = False
    taps: tuple[str, ...] = ()
    copies: I32 = field(default_factory=lambda: NO_COPIES)


@dataclass(slots=True)
class Sampled:
    """One step's outputs, for each of the R rows.

    tokens: the sampled id, or the target. logprob: of that token in the raw distribution (before bias, penalties,
        temperature).
    rank: 1 is the most likely. top_ids, top_logprobs [R, N]: the N best, descending, ties to the lowest id; unused
        places hold -1 and -inf.
    status: 0 right; 1 the logits hold a NaN or +inf, the token is then meaningless; 2 no token is allowed.
    """

    tokens: I32
    logprob: F32
    rank: I32
    top_ids: I32
    top_logprobs: F32
    status: I32
    logits: F32 | None = None
    taps: Mapping[str, F32] = field(default_factory=dict)
