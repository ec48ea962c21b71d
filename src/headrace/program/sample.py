"""What sampling means, in plain numpy with float64 inside: the rules that every sampler keeps to.

1. Log-probabilities and ranks describe the raw distribution, the softmax of the logits as the model gave them.
2. Masks forbid, then the bias is added, then penalties act on the ids of the row's list.
3. Below `GREEDY` the best logit wins, ties to the lowest id. Else logits are divided by the temperature, cut by min_p,
   top_k and top_p in this order, and the token is the arg-max of what is left plus Gumbel noise.
4. Noise is a function of (seed, position, choice, id) alone: minus the logarithm of exponential variables, drawn from
   the top down, so that most ids need not be looked at: of each 64 ids the least first, an exponential variable / 64,
   and which of them it is; the others exceed it by exponential variables of their own. As those have no memory, all are
   independent. The words come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)
   with key = seed: an id's is word id % 4 of counter (id / 4, position, choice, 0); of counter
   (id / 64, position, choice, 1) word 0 is for the least of 64, and word 1 / 2^26 says which.

Knows arrays, not requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.program.step import F32, I32, Sampled, Sampling

F64 = NDArray[np.float64]
U32 = NDArray[np.uint32]

GREEDY = 1e-5
"""Temperatures below this are greedy."""

BLOCK = 64
"""Ids whose least exponential variable is drawn first."""

RIGHT, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox(counter: U32, key: tuple[int, int]) -> U32:
    """Philox4x32 with ten rounds. counter uint32 [4, n], key two words; gives uint32 [4, n]."""
    c = counter.astype(np.uint64)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = np.stack([(p1 >> _32) ^ c[1] ^ np.uint64(k0), p1 & _LOW, (p0 >> _32) ^ c[3] ^ np.uint64(k1), p0 & _LOW])
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c.astype(np.uint32)


def _exponential(words: U32) -> F64:
    """-ln(u), u = (word >> 8) 2^-24 + 2^-25."""
    return np.asarray(-np.log((words >> 8) * 2.0**-24 + 2.0**-25), np.float64)


def gumbel(vocab: int, seed: int, position: int, choice: int) -> F64:
    """The noise of each id; float64 [vocab]."""
    blocks = -(-vocab // BLOCK)

    def words(count: int, kind: int) -> U32:
        counter = np.zeros((4, count), np.uint32)
        counter[0], counter[1], counter[2], counter[3] = np.arange(count), position, choice, kind
        return philox(counter, (seed & 0xFFFFFFFF, seed >> 32))

    least, which = words(blocks, 1)[:2]
    beyond = _exponential(words(blocks * BLOCK // 4, 0).T.reshape(blocks, BLOCK))
    beyond[np.arange(blocks), which >> 26] = 0
    return np.asarray(-np.log(_exponential(least)[:, None] / BLOCK + beyond), np.float64).reshape(-1)[:vocab]


def log_softmax(logits: F64) -> F64:
    shifted = logits - np.max(logits)
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)


def best_first(scores: F64) -> NDArray[np.int64]:
    """Ids by (score descending, id ascending)."""
    return np.argsort(-scores, kind="stable")


@dataclass(frozen=True, slots=True)
class _Row:
    """One row's share of the arrays of `Sampling`."""

    at: Sampling
    r: int

    def _slice(self, indptr: I32) -> slice:
        return slice(int(indptr[self.r]), int(indptr[self.r + 1]))

    def allowed(self, vocab: int) -> NDArray[np.bool_] | None:
        row = int(self.at.mask_rows[self.r])
        if row < 0:
            return None
        words = np.ascontiguousarray(self.at.masks[row], "<i4").view(np.uint8)
        return np.unpackbits(words, bitorder="little")[:vocab].astype(np.bool_)

    def bias(self) -> tuple[I32, F32]:
        s = self._slice(self.at.bias_indptr)
        return self.at.bias_ids[s], self.at.bias_values[s]

    def penalised(self) -> tuple[I32, I32]:
        s = self._slice(self.at.penalty_indptr)
        return self.at.penalty_ids[s], self.at.penalty_counts[s]


def adjust(logits: F64, row: _Row) -> F64:
    """Masks, then bias, then penalties; float64 [vocab]."""
    out = logits.copy()
    if (allowed := row.allowed(len(out))) is not None:
        out[~allowed] = -np.inf
    ids, values = row.bias()
    np.add.at(out, ids, values.astype(np.float64))
    ids, counts = row.penalised()
    repetition, frequency, presence = (float(a[row.r]) for a in (row.at.repetition, row.at.frequency, row.at.presence))
    listed = out[ids]
    listed = np.where(listed > 0, listed / repetition, listed * repetition)
    out[ids] = listed - frequency * counts - presence * (counts > 0)
    return out


def _cut_min_p(z: F64, min_p: float) -> F64:
    return np.where(z < np.max(z) + np.log(min_p), -np.inf, z) if min_p > 0 else z


def _cut_top_k(z: F64, top_k: int) -> F64:
    if not 0 < top_k < len(z):
        return z
    out = np.full_like(z, -np.inf)
    kept = best_first(z)[:top_k]
    out[kept] = z[kept]
    return out


def _cut_top_p(z: F64, top_p: float) -> F64:
    """Keeps the shortest run of best tokens whose mass reaches top_p, with the one that crosses it: at least one."""
    if top_p >= 1:
        return z
    order = best_first(z)
    mass = np.cumsum(np.exp(log_softmax(z)[order]))
    kept = order[: int(np.searchsorted(mass, top_p)) + 1]
    out = np.full_like(z, -np.inf)
    out[kept] = z[kept]
    return out


def choose(adjusted: F64, row: _Row) -> int:
    """The token of a row, from its adjusted logits of which at least one is finite."""
    at, r = row.at, row.r
    temperature = float(at.temperature[r])
    if temperature < GREEDY:
        return int(np.argmax(adjusted))
    z = adjusted / temperature
    z = _cut_min_p(z, float(at.min_p[r]))
    z = _cut_top_k(z, int(at.top_k[r]))
    z = _cut_top_p(z, float(at.top_p[r]))
    noise = gumbel(len(z), int(at.seed[r]), int(at.position[r]), int(at.choice[r]))
    return int(np.argmax(z + noise))


def pick(logits: F64, row: _Row) -> tuple[int, int]:
    """(token, status) of a row of raw logits. The token is 0 where the status says that it is meaningless."""
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return 0, NOT_FINITE
    if (target := int(row.at.target[row.r])) >= 0:
        return target, RIGHT
    adjusted = adjust(logits, row)
    if np.isneginf(adjusted).all():
        return 0, NOTHING_ALLOWED
    return choose(adjusted, row), RIGHT


def rank_of(token: int, logits: F64) -> int:
    """1 + the tokens ahead of this one: a larger logit, or an equal one and a lower id."""
    return 1 + int((logits > logits[token]).sum()) + int((logits[:token] == logits[token]).sum())


def sample(logits: F32, sampling: Sampling, vocab: int) -> Sampled:
    """Samples or scores each row. logits float32 [R, at least vocab]; ids from `vocab` on are padding and never win."""
    rows = len(logits)
    width = max(0, int(np.max(sampling.logprobs, initial=0)))
    out = Sampled(
        tokens=np.zeros(rows, np.int32),
        logprob=np.zeros(rows, np.float32),
        rank=np.zeros(rows, np.int32),
        top_ids=np.full((rows, width), -1, np.int32),
        top_logprobs=np.full((rows, width), -np.inf, np.float32),
        status=np.zeros(rows, np.int32),
    )
    for r in range(rows):
        raw = logits[r, :vocab].astype(np.float64)
        out.tokens[r], out.status[r] = pick(raw, _Row(sampling, r))
        if sampling.logprobs[r] >= 0 and out.status[r] == RIGHT:
            _report(out, r, raw, int(sampling.logprobs[r]))
    return out


def _report(out: Sampled, r: int, raw: F64, n: int) -> None:
    logprobs = log_softmax(raw)
    token = int(out.tokens[r])
    out.logprob[r], out.rank[r] = logprobs[token], rank_of(token, raw)
    best = best_first(raw)[:n]
    out.top_ids[r, : len(best)], out.top_logprobs[r, : len(best)] = best, logprobs[best]
