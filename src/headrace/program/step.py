"""What crosses the seam each step: plain arrays in, plain arrays out.

One step runs T rows (tokens) of B sequences; R of the rows yield logits, and each of these is sampled or scored.
Rows of one sequence are consecutive and their positions ascend by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.base.settings import PAGE

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]

NO_COPIES: I32 = np.zeros((0, 2), np.int32)
NO_PAGES: I32 = np.zeros(0, np.int32)


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

    @classmethod
    def greedy(cls, rows: int, **columns: Any) -> Sampling:
        """The most likely token for each row, without lists, masks or log-probabilities; columns replace these."""
        floats = {"temperature": 0, "top_p": 1, "min_p": 0, "repetition": 1, "presence": 0, "frequency": 0}
        whole = {"top_k": 0, "position": 0, "choice": 0, "target": -1, "logprobs": -1, "mask_rows": -1}
        starts, ids = np.zeros(rows + 1, np.int32), np.zeros(0, np.int32)
        made: dict[str, Any] = {
            **{name: np.full(rows, value, np.float32) for name, value in floats.items()},
            **{name: np.full(rows, value, np.int32) for name, value in whole.items()},
            "seed": np.zeros(rows, np.uint64),
            "bias_indptr": starts, "bias_ids": ids, "bias_values": np.zeros(0, np.float32),
            "penalty_indptr": starts, "penalty_ids": ids, "penalty_counts": ids,
            "masks": np.zeros((0, 1), np.int32),
        }  # fmt: skip
        return cls(**made | columns)


@dataclass(slots=True)
class Step:
    """One step's inputs.

    tokens, positions [T]. query_start [B+1]: rows of sequence b are query_start[b] .. query_start[b+1].
    context [B]: tokens of sequence b in the cache once this step has written its own. page_indptr [B+1], pages: the
        page tables, position p lies in page pages[page_indptr[b] + p // 32].
    copies [C, 2]: pages to copy first, from and to, in order. fresh: pages to zero then.
    window_pages, window_fresh, window_copies: the same of the slots of layers with windows, where these have slots;
        what no row of the step sees within its window is not read, and may be any slot.
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
    window_pages: I32 = field(default_factory=lambda: NO_PAGES)
    window_fresh: I32 = field(default_factory=lambda: NO_PAGES)
    window_copies: I32 = field(default_factory=lambda: NO_COPIES)

    @classmethod
    def alone(
        cls,
        sequence: Sequence[int],
        start: int = 0,
        *,
        head: bool = True,
        keep_logits: bool = False,
        taps: tuple[str, ...] = (),
        slots: int = 0,
    ) -> Step:
        """The tokens from `start` on of a sequence that has the cache to itself, and lies in its first pages.

        head: all rows yield logits, else the last one. Nobody looks at what is drawn. slots: of layers with windows,
        taken in turn, so that what the step sees must fit them; 0: these lie in pages.
        """
        end = len(sequence)
        begun, pages = -(-start // PAGE), np.arange(-(-end // PAGE), dtype=np.int32)
        rows = np.arange(end - start, dtype=np.int32)
        rows = rows if head else rows[-1:]
        return cls(
            tokens=np.asarray(sequence[start:], np.int32),
            positions=np.arange(start, end, dtype=np.int32),
            query_start=np.array([0, end - start], np.int32),
            context=np.array([end], np.int32),
            page_indptr=np.array([0, len(pages)], np.int32),
            pages=pages,
            fresh=pages[begun:],
            logit_rows=rows,
            sampling=Sampling.greedy(len(rows)),
            keep_logits=keep_logits,
            taps=taps,
            window_pages=pages % slots if slots else NO_PAGES,
            window_fresh=pages[begun:] % slots if slots else NO_PAGES,
        )


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
