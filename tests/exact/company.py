"""Requests alone and among others: everything a request is told, and the bits of every logits row, to compare."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace import SamplingParams, StructuredOutputs
from headrace.base.settings import EngineSettings
from headrace.engine.engine import Engine
from headrace.engine.grammars import compiled
from headrace.engine.loading import load_engine
from headrace.engine.messages import Add, Terms, Update, WireLogprobs
from headrace.text.grammar import Grammar, Grammars, Vocabulary, source
from headrace.weights import open_checkpoint

ALL_IDS = 1 << 30  # as a vocabulary: every id of the model

# Grammars that can go on for a while, in a vocabulary of our own: an id is a byte, larger ones two.
WANTED = (
    StructuredOutputs(json={"type": "array", "items": {"type": "string"}, "minItems": 2}),
    StructuredOutputs(regex="([a-z]+ ?[0-9]*\\n?)+"),
    StructuredOutputs(json_object=True),
)


def words(size: int) -> Vocabulary:
    """The bytes of `size` tokens; those below 3 are none of a text."""
    tokens = [b"" if i < 3 else bytes([i % 256]) if i < 256 else bytes([97 + i % 26, 97 + i % 7]) for i in range(size)]
    return Vocabulary(np.array([len(t) for t in tokens], "<i4").tobytes(), b"".join(tokens))


@dataclass(frozen=True)
class Call:
    """A request of those that schedules draw from."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    grammar: Grammar | None = None


@dataclass
class Answer:
    """What a request got, by choice. rows: position of a logits row -> digest. ends: reason, stop, message."""

    rows: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[WireLogprobs]] = field(default_factory=lambda: defaultdict(list))
    prompt: dict[int, list[WireLogprobs | None]] = field(default_factory=dict)
    ends: dict[int, tuple[str, int | str | None, str | None]] = field(default_factory=dict)

    def hear(self, update: Update) -> None:
        self.tokens[update.choice] += update.tokens
        if update.logprobs:
            self.logprobs[update.choice] += update.logprobs
        if update.prompt_logprobs:
            self.prompt[update.choice] = update.prompt_logprobs
        if update.reason:
            self.ends[update.choice] = update.reason, update.stop, update.message


class Recorder:
    """An engine whose every logits row is hashed."""

    def __init__(self, path: Path, vocab: int = ALL_IDS, **settings: Any) -> None:
        all_settings = EngineSettings.of(str(path), **({"max_model_len": 440, "max_num_seqs": 6} | settings))
        draft = (all_settings.speculative_config or {}).get("model")
        known = None if draft is None else (draft, vocab)
        self.engine: Engine = load_engine(all_settings, open_checkpoint(path), vocab, known)
        self.engine.runner.keep_logits = True
        self._run = self.engine.runner.run
        self.engine.runner.run = self._recording  # type: ignore[method-assign]
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self._grammars = Grammars(words(self.engine.info.vocab_size))

    def _recording(self, batch):  # type: ignore[no-untyped-def]
        result = self._run(batch)
        names = {item.sequence.id: (item.sequence.request, item.sequence.choice) for item in batch.items}
        for (sequence, position), row in result.logits.items():
            request, choice = names[sequence]
            digest = hashlib.sha256(row.tobytes()).hexdigest()
            known = self.answers[request].rows[choice].setdefault(position, digest)
            assert known == digest, f"the row at {position} changed when it was computed again"
        return result

    def add(self, name: str, call: Call, priority: int = 0) -> None:
        terms = Terms(priority=priority, tenant=name[-1], weight=1 + len(name))
        add = Add(name, list(call.prompt), call.params, call.seed, [2], terms, grammar=call.grammar)
        self.engine.add(add, compiled(self._grammars, add))

    def step(self) -> None:
        for update in self.engine.step():
            self.answers[update.request_id].hear(update)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        self.engine.scheduler.check()

    def abort(self, name: str) -> None:
        self.engine.abort(name)
        self.answers.pop(name, None)

    def says(self, name: str, call: Call) -> Answer:
        """The answer to a call that runs with whatever else runs now."""
        self.add(name, call)
        self.drain()
        return self.answers.pop(name)


def draw_calls(
    vocab: int, size: int, seed: int, lengths: Sequence[int], max_tokens: Sequence[int] = (1, 5, 20, 90)
) -> list[Call]:
    """Requests with every kind of parameter, some sharing prefixes."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab) for _ in range(max(lengths))]
    calls = []
    for i in range(size):
        length = rng.choice(lengths)
        kept = rng.choice([0, length // 2, length - 1, length]) if i % 2 else 0
        prompt = shared[:kept] + [rng.randrange(3, vocab) for _ in range(length - kept)]
        params = SamplingParams(max_tokens=rng.choice(max_tokens), **_draw_params(rng, vocab))
        grammar = None
        if i % 3 == 0:  # what else forbids tokens could leave none
            grammar, params.allowed_token_ids, params.bad_token_ids = source(WANTED[i % 9 // 3]), None, None
        calls.append(Call(tuple(prompt), params, rng.getrandbits(63), grammar))
    return calls


def _draw_params(rng: random.Random, vocab: int) -> dict[str, Any]:
    ids = [rng.randrange(3, vocab) for _ in range(40)]
    some: Mapping[str, Any] = {
        "logit_bias": {token: rng.uniform(-9, 9) for token in ids[:4]},
        "allowed_token_ids": ids,
        "bad_token_ids": [ids[4:5], ids[5:7]],
        "prompt_logprobs": 2,
        "logprobs": 3,
        "n": 3,
        "ignore_eos": True,
    }
    return {name: value for name, value in some.items() if rng.random() < 0.3} | {
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 20]),
        "min_p": rng.choice([0.0, 0.02]),
        "repetition_penalty": rng.choice([1.0, 1.1]),
        "presence_penalty": rng.choice([0.0, 0.5]),
        "frequency_penalty": rng.choice([0.0, 0.3]),
    }


def alone(path: Path, calls: Sequence[Call], vocab: int = ALL_IDS, **settings: Any) -> list[Answer]:
    """Each call's answer when nobody else is there: one thread, cold pages, prompts in one chunk of up to 512."""
    settings = {"max_num_batched_tokens": 512, **settings}
    recorder = Recorder(path, vocab, threads=1, enable_prefix_caching=False, **settings)
    answers = [recorder.says(str(i), call) for i, call in enumerate(calls)]
    recorder.engine.close()
    return answers


def schedule(recorder: Recorder, calls: Sequence[Call], rng: random.Random, chosen: Sequence[int]) -> None:
    """Run calls at once, arriving at random steps in random order of priority, among some that are aborted."""
    waiting = [f"{k}.{i}" for k, i in enumerate(chosen)]
    while waiting or recorder.engine.has_work:
        while waiting and (rng.random() < 0.5 or not recorder.engine.has_work):
            name = waiting.pop()
            recorder.add(name, calls[int(name.rsplit(".", 1)[1])], rng.randint(-1, 1))
        if rng.random() < 0.05:
            recorder.add("x", rng.choice(calls), rng.randint(-1, 1))
            for _ in range(rng.randint(0, 3)):
                recorder.step()
            recorder.abort("x")
        recorder.step()
    recorder.engine.scheduler.check()


def compare(recorder: Recorder, wanted: Sequence[Answer]) -> int:
    """Everything said since the last time against the same requests alone; how many rows were compared."""
    compared = 0
    for name, answer in recorder.answers.items():
        assert answer == wanted[int(name.rsplit(".", 1)[1])], name
        compared += sum(map(len, answer.rows.values()))
    recorder.answers.clear()
    return compared
