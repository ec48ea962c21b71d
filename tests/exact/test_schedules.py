"""The first promise: a request's bits depend on nothing but itself.

A request's logits are hashed by position while it runs alone, one thread, cold. Then it runs again among random others,
cut into chunks of any size, on warm or cold pages, with too few pages (so that sequences are preempted and start
again), on one thread or two: every row must hash the same, and so must the tokens drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace import SamplingParams
from headrace.base.settings import EngineSettings
from headrace.engine.engine import Engine
from headrace.engine.loading import load_engine, open_text
from headrace.engine.messages import Add

Hashes = dict[int, str]  # position of a logits row -> digest


@dataclass(frozen=True)
class Call:
    """A request of the pool that schedules draw from."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int


class Recorder:
    """An engine whose every logits row is hashed."""

    def __init__(self, path: Path, **settings: object) -> None:
        all_settings = EngineSettings.of(str(path), **({"max_model_len": 440, "max_num_seqs": 6} | settings))
        text = open_text(all_settings, path)
        self.engine: Engine = load_engine(all_settings, path, text.tokenizer.vocab_size, {})
        self.engine.runner.keep_logits = True
        self._run = self.engine.runner.run
        self.engine.runner.run = self._recording  # type: ignore[method-assign]
        self.rows: dict[str, Hashes] = {}
        self.tokens: dict[str, list[int]] = {}

    def _recording(self, batch):  # type: ignore[no-untyped-def]
        result = self._run(batch)
        names = {item.sequence.id: item.sequence.request for item in batch.items}
        for (sequence, position), row in result.logits.items():
            digest = hashlib.sha256(row.tobytes()).hexdigest()
            known = self.rows.setdefault(names[sequence], {}).setdefault(position, digest)
            assert known == digest, f"the row at {position} changed when it was computed again"
        return result

    def add(self, name: str, call: Call) -> None:
        self.engine.add(Add(name, list(call.prompt), call.params, call.seed, [2]))

    def step(self) -> None:
        for update in self.engine.step():
            assert update.reason != "error", update.message
            self.tokens.setdefault(update.request_id, []).extend(update.tokens)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        self.engine.scheduler.check()


def pool(vocab: int, size: int, seed: int) -> list[Call]:
    """Requests of all lengths around pages and splits, greedy and sampled, some sharing prefixes."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab) for _ in range(300)]
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 100, 255, 256, 257, 300]
    calls = []
    for i in range(size):
        length = rng.choice(lengths)
        kept = rng.choice([0, length // 2, length - 1]) if i % 2 else 0
        prompt = shared[:kept] + [rng.randrange(3, vocab) for _ in range(length - kept)]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            max_tokens=rng.choice([1, 5, 20, 90, 130]),
            prompt_logprobs=1 if rng.random() < 0.2 else None,
            ignore_eos=True,
        )
        calls.append(Call(tuple(prompt), params, rng.getrandbits(63)))
    return calls


def alone(path: Path, calls: list[Call], **settings: object) -> tuple[list[Hashes], list[list[int]]]:
    recorder = Recorder(path, threads=1, enable_prefix_caching=False, max_num_batched_tokens=512, **settings)
    for i, call in enumerate(calls):
        recorder.add(str(i), call)
        recorder.drain()
    recorder.engine.close()
    n = range(len(calls))
    return [recorder.rows[str(i)] for i in n], [recorder.tokens.get(str(i), []) for i in n]


def schedule(recorder: Recorder, calls: list[Call], rng: random.Random, tag: str, chosen: list[int]) -> None:
    """Run calls at once, arriving at random steps, a few of them aborted on the way; those names are `x...`."""
    waiting = [f"{tag}.{k}.{i}" for k, i in enumerate(chosen)]
    while waiting or recorder.engine.has_work:
        while waiting and (rng.random() < 0.5 or not recorder.engine.has_work):
            name = waiting.pop()
            recorder.add(name, calls[int(name.rsplit(".", 1)[1])])
        if rng.random() < 0.05:
            recorder.add("x", calls[0])
            recorder.step()
            recorder.engine.abort("x")
            recorder.rows.pop("x", None)
        recorder.step()
    recorder.engine.scheduler.check()


def compare(recorder: Recorder, rows: list[Hashes], tokens: list[list[int]]) -> int:
    """Every row and token of every request against the same request alone; how many rows were compared."""
    compared = 0
    for name, hashes in recorder.rows.items():
        if name == "x":
            continue
        i = int(name.rsplit(".", 1)[1])
        assert recorder.tokens.get(name, []) == tokens[i], name
        assert hashes == rows[i], name
        compared += len(hashes)
    recorder.rows.clear()
    recorder.tokens.clear()
    return compared


PAGE_BYTES = 2 * 2 * 64 * 2 * 32 * 2  # layers, K and V, head size, KV heads, tokens, bytes
SETTINGS = [  # threads, chunk, prefix cache, pages
    (2, 512, True, 20),
    (1, 64, True, 14),
    (2, 33, False, 16),
    (2, 8, True, 30),
    (1, 512, True, 14),
    (2, 100, True, 16),
    (2, 1, True, 18),
]


def run_schedules(path: Path, calls: list[Call], count: int, seed: int) -> Iterator[tuple[int, int]]:
    """`count` random schedules, spread over SETTINGS; yields (rows compared, preemptions) for each setting."""
    rows, tokens = alone(path, calls)
    for at, (threads, chunk, cached, pages) in enumerate(SETTINGS):
        rng = random.Random(seed + at)
        recorder = Recorder(
            path,
            threads=threads,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=cached,
            kv_cache_memory_bytes=pages * PAGE_BYTES,
        )
        compared = 0
        for k in range(count // len(SETTINGS) + 1):
            picked = [rng.randrange(len(calls)) for _ in range(rng.randint(1, 10))]
            schedule(recorder, calls, rng, str(k), picked)
            compared += compare(recorder, rows, tokens)
        yield compared, recorder.engine.stats().preemptions
        recorder.engine.close()


def check_schedules(path: Path, count: int, seed: int, preempted: int) -> None:
    """At least `preempted` sequences must have run out of pages on the way."""
    results = list(run_schedules(path, pool(290, 24, seed), count, seed))
    assert all(compared > count for compared, _ in results)
    assert sum(preemptions for _, preemptions in results) >= preempted, "no schedule ran out of pages"


@pytest.mark.slow
def test_no_bit_differs_in_500_random_schedules(tiny: Path) -> None:
    check_schedules(tiny, 500, seed=1, preempted=10)


def test_no_bit_differs_in_a_few_random_schedules(tiny: Path) -> None:
    check_schedules(tiny, 28, seed=2, preempted=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_no_bit_differs_in_thousands_of_random_schedules(tiny: Path, seed: int) -> None:
    check_schedules(tiny, 1000, seed, preempted=20)


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_logits_are_the_same_on_every_instruction_set(tiny: Path, isa: str) -> None:
    calls = pool(290, 6, seed=3)
    best = alone(tiny, calls)
    assert alone(tiny, calls, isa=isa) == best


def test_a_real_model_says_the_same_in_company(smollm2: Path) -> None:
    """SmolLM2: eight requests together, in chunks, on warm pages, against each alone."""
    rng = random.Random(5)
    calls = [
        Call(
            tuple(rng.randrange(100, 40000) for _ in range(n)),
            SamplingParams(max_tokens=8, ignore_eos=True, temperature=t),
            n,
        )
        for n, t in [(5, 0.0), (40, 0.8), (33, 0.0), (257, 1.0), (300, 0.0), (64, 0.5), (1, 0.0), (511, 0.0)]
    ]
    rows, tokens = alone(smollm2, calls, max_model_len=600)
    for chunk in (512, 37):
        recorder = Recorder(smollm2, max_model_len=600, threads=2, max_num_batched_tokens=chunk, max_num_seqs=8)
        for k in range(2):
            schedule(recorder, calls, random.Random(k), str(k), list(range(len(calls))))
            compare(recorder, rows, tokens)
        recorder.engine.close()
