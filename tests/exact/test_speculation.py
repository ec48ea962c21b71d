"""Drafts change nothing: whatever is guessed, each request is told the same, and no logits row that counts differs.

Requests of every kind run alone and without drafts; then among others, cut into chunks, on too few pages, while their
next tokens are guessed: rightly (from the answers that are known), wrongly, partly, at random, and by look-up.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from company import Answer, Call, Recorder, alone, compare, draw_calls, schedule
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny as tiny_models
from headrace import LLM, SamplingParams
from headrace.backends.cpu import CpuBackend
from headrace.base.errors import SettingError
from headrace.core.scheduler import Batch, Scheduled
from headrace.core.sequence import Sequence
from headrace.engine.engine import Engine
from headrace.engine.messages import Add, Terms
from headrace.quant.blocks import dequantize, quantize
from headrace.runtime.draft import LookUps, ModelDraft, Tally
from headrace.runtime.encoded import DRAFT
from headrace.runtime.load import prepare
from headrace.runtime.plan import of_path
from tiny_model import FLOATS, MIXED, overflows_on, write_tiny

PAGE_BYTES = 2 * 2 * 64 * 2 * 32 * 2  # layers, K and V, head size, KV heads, tokens, bytes
LENGTHS = [1, 2, 31, 33, 64, 100, 257]


class Guesser:
    """In the place of the engine's speculator: guesses from the answers, spoilt at random.

    right: chance that a guess is the answer's. longest: most tokens of a guess.
    """

    def __init__(self, wanted: list[Answer], rng: random.Random, right: float, longest: int) -> None:
        self.wanted, self.rng, self.right, self.longest = wanted, rng, right, longest
        self.drafted = self.accepted = 0
        self.tally = Tally(longest)

    def guesses(self, items: list[Scheduled]) -> list[tuple[Scheduled, tuple[int, ...]]]:
        able = [item for item in items if item.count == 1 and item.sample]
        return [(item, self._guess(item.sequence)) for item in able if self.rng.random() < 0.9]

    def _guess(self, s: Sequence) -> tuple[int, ...]:
        known: list[int] = []
        if s.request != "x":  # those are given up, and nobody knows their answers
            known = self.wanted[int(s.request.rsplit(".", 1)[1])].tokens[s.choice][s.generated :]
        known = [*known[: self.longest], *([3] * self.longest)][: self.rng.randint(0, self.longest)]
        return tuple(t if self.rng.random() < self.right else self.rng.randrange(290) for t in known)

    def fill(self, batch: Batch) -> tuple[()]:
        return ()

    def learn(self, items: list[Scheduled], seconds: float) -> int:
        for item in items:
            said = item.sequence.tokens[item.start + item.count - len(item.draft) :]
            self.drafted += len(item.draft)
            self.accepted += sum(a == b for a, b in zip(item.draft, said, strict=False))
        return 0

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""


def run(path: Path, calls: list[Call], wanted: list[Answer], rng: random.Random, right: float, longest: int,
        rounds: int = 1, **settings: Any) -> Guesser:  # fmt: skip
    """Random schedules of the calls under guesses; their answers must be those wanted."""
    recorder = Recorder(path, **settings)
    guesser = Guesser(wanted, rng, right, longest)
    recorder.engine.speculator = guesser  # type: ignore[assignment]
    for _ in range(rounds):
        schedule(recorder, calls, rng, [rng.randrange(len(calls)) for _ in range(rng.randint(1, 8))])
        compare(recorder, wanted)
    recorder.engine.close()
    return guesser


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return draw_calls(290, 24, 11, LENGTHS, max_tokens=(1, 2, 5, 20, 60))


@pytest.fixture(scope="module")
def wanted(tiny: Path, calls: list[Call]) -> list[Answer]:
    return alone(tiny, calls)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    right=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.0]),
    longest=st.integers(1, 12),
    chunk=st.sampled_from([1, 2, 9, 33, 512]),
    pages=st.sampled_from([14, 16, 30]),
    caching=st.booleans(),
    static=st.booleans(),
)
def test_no_guess_changes_a_bit(
    tiny: Path, calls: list[Call], wanted: list[Answer],
    seed: int, right: float, longest: int, chunk: int, pages: int, caching: bool, static: bool,
) -> None:  # fmt: skip
    run(tiny, calls, wanted, random.Random(seed), right, longest, max_num_batched_tokens=chunk,
        kv_cache_memory_bytes=pages * PAGE_BYTES, enable_prefix_caching=caching,
        batching="static" if static else "continuous")  # fmt: skip


@pytest.mark.parametrize("right", [1.0, 0.7])
def test_guesses_are_used(tiny: Path, calls: list[Call], wanted: list[Answer], right: float) -> None:
    """The tests above would also pass if no draft were ever verified."""
    guesser = run(tiny, calls, wanted, random.Random(1), right, 8, rounds=5)
    assert guesser.drafted > 40
    assert 0.3 * right < guesser.accepted / guesser.drafted <= (1 if right == 1 else right + 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_guess_changes_a_bit_in_many_schedules(tiny: Path, seed: int) -> None:
    calls = draw_calls(290, 24, 100 + seed, LENGTHS, max_tokens=(1, 5, 20, 90, 130))
    wanted = alone(tiny, calls)
    rng = random.Random(seed)
    for right, longest in [(1.0, 4), (0.8, 16), (0.0, 3), (0.95, 8)]:
        run(tiny, calls, wanted, rng, right, longest, rounds=10, threads=rng.randint(1, 2),
            kv_cache_memory_bytes=16 * PAGE_BYTES, max_num_batched_tokens=rng.choice([3, 40, 512]))  # fmt: skip


@pytest.mark.parametrize("config", [
    {"method": "suffix"},
    {"method": "suffix", "num_speculative_tokens": 1},
    {"method": "suffix", "shared_history_tokens": 2000},
    {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 4},
])  # fmt: skip
def test_look_ups_change_nothing(tiny: Path, calls: list[Call], wanted: list[Answer], config: dict[str, Any]) -> None:
    recorder = Recorder(tiny, speculative_config=config)
    eager(recorder.engine)
    rng = random.Random(3)
    for _ in range(3):
        schedule(recorder, calls, rng, [rng.randrange(len(calls)) for _ in range(6)])
        compare(recorder, wanted)
    speculator = recorder.engine.speculator
    assert isinstance(speculator, LookUps) and speculator.tally.drafted > 0
    assert not speculator._trails, "the trails of ended sequences are kept"
    recorder.engine.close()


def eager(engine: Engine) -> None:
    """Let drafted rows, and passes of a copy, cost nothing, so that all guesses are drafted."""
    speculator = engine.speculator
    assert isinstance(speculator, LookUps | ModelDraft)
    speculator._prices.of = lambda items: [1.0] * (16 * len(items))  # type: ignore[method-assign]
    if isinstance(speculator, ModelDraft):
        speculator._passes = dict.fromkeys(range(17), 0.0)
        speculator._row = 1e-9
        speculator._took = lambda *_: None  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in float32 that 4 bits hold, so that the copy says nearly the same."""

    def round_off(name: str, values: np.ndarray) -> None:
        values[:] = dequantize(DRAFT, quantize(DRAFT, values))

    path = tmp_path_factory.mktemp("floats") / "floats.gguf"
    return write_tiny(path, dict.fromkeys(MIXED, "f32"), edit=round_off)


def test_the_copys_guesses_change_nothing(calls: list[Call], floats: Path) -> None:
    """A model of float weights beside its own copy in 4 bits, which writes into its pages; pages are short."""
    wanted = alone(floats, calls)
    recorder = Recorder(floats, speculative_config={"method": "self", "num_speculative_tokens": 5},
                        kv_cache_memory_bytes=14 * PAGE_BYTES, max_num_batched_tokens=40)  # fmt: skip
    eager(recorder.engine)
    rng = random.Random(4)
    for _ in range(4):
        schedule(recorder, calls, rng, [rng.randrange(len(calls)) for _ in range(6)])
        compare(recorder, wanted)
    speculator = recorder.engine.speculator
    assert isinstance(speculator, ModelDraft)
    drafted, accepted = speculator.tally.drafted, speculator.tally.accepted
    assert drafted > 20 and accepted > 0, (drafted, accepted)  # fewer are drafted where a pass takes long
    recorder.engine.close()


@pytest.mark.parametrize("kind", ["gemma3", "mistral-sliding"])
def test_a_copy_shares_the_slots_of_layers_with_windows(kind: str) -> None:
    """It writes ahead into the last page that is seen, and what is rejected leaves the window where it was."""
    path, calls = tiny_models.TINY / kind, draw_calls(290, 8, 8, [1, 31, 64, 100], max_tokens=(20, 60))
    wanted = alone(path, calls, max_model_len=200)
    recorder = Recorder(path, speculative_config={"method": "self", "num_speculative_tokens": 5}, max_model_len=200,
                        max_num_batched_tokens=40)  # fmt: skip
    eager(recorder.engine)
    for seed in range(2):
        schedule(recorder, calls, random.Random(seed), list(range(len(calls))))
        compare(recorder, wanted)
    speculator = recorder.engine.speculator
    assert isinstance(speculator, ModelDraft) and recorder.engine.info.slots
    assert speculator.tally.drafted > speculator.tally.accepted > 0
    recorder.engine.close()


def test_a_copy_on_the_reference_back_end(floats: Path) -> None:
    """Which promises no bits, so the tokens are compared."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    said = []
    for config in (None, {"method": "self", "num_speculative_tokens": 3}):
        with LLM(str(floats), backend="reference", max_model_len=64, speculative_config=config) as llm:
            if config is not None:
                eager(llm.engine)
            said.append(llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0].outputs[0])
    assert said[0].token_ids == said[1].token_ids
    assert llm.engine.speculator is not None and llm.engine.speculator.tally.accepted > 5


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of the two layers of `tiny`."""
    return write_tiny(tmp_path_factory.mktemp("shallow") / "shallow.gguf", layers=1)


def drafted_by(path: Path, calls: list[Call], wanted: list[Answer], draft: Path, rng: random.Random,
               rounds: int = 1, **settings: Any) -> Tally:  # fmt: skip
    """Random schedules of the calls under guesses of another model; their answers must be those wanted."""
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 5}
    recorder = Recorder(path, speculative_config=config, **settings)
    eager(recorder.engine)
    for _ in range(rounds):
        schedule(recorder, calls, rng, [rng.randrange(len(calls)) for _ in range(rng.randint(1, 8))])
        compare(recorder, wanted)
    speculator = recorder.engine.speculator
    assert isinstance(speculator, ModelDraft)
    assert not speculator._chances and not speculator._held._whole  # type: ignore[attr-defined]
    recorder.engine.close()
    return speculator.tally


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    chunk=st.sampled_from([1, 9, 33, 512]),
    pages=st.sampled_from([14, 16, 30]),
    caching=st.booleans(),
    static=st.booleans(),
)
def test_another_models_guesses_change_nothing(
    tiny: Path, shallow: Path, calls: list[Call], wanted: list[Answer],
    seed: int, chunk: int, pages: int, caching: bool, static: bool,
) -> None:  # fmt: skip
    """A model of one layer has half the bytes in a page."""
    drafted_by(tiny, calls, wanted, shallow, random.Random(seed), max_num_batched_tokens=chunk,
               kv_cache_memory_bytes=pages * PAGE_BYTES * 3 // 2, enable_prefix_caching=caching,
               batching="static" if static else "continuous")  # fmt: skip


@pytest.mark.parametrize("kv", ["float16", "int8"])
@pytest.mark.parametrize(("chunk", "pages"), [(9, 14), (40, 16), (512, 60)])
def test_a_model_that_drafts_for_itself_is_right(tiny: Path, chunk: int, pages: int, kv: str) -> None:
    """So all that it has read of each sequence is there: after prefix hits, copies, rejections, preemptions."""
    fields = {"temperature": 0.8, "top_k": 40, "logprobs": 2}
    calls = [
        Call(call.prompt, SamplingParams(max_tokens=60, ignore_eos=i % 2 == 0, n=1 + i % 3, **fields), call.seed)
        for i, call in enumerate(draw_calls(290, 16, 5, LENGTHS))
    ]
    wanted = alone(tiny, calls, kv_cache_dtype=kv)
    tally = drafted_by(tiny, calls, wanted, tiny, random.Random(2), 6, max_num_batched_tokens=chunk,
                       kv_cache_memory_bytes=pages * PAGE_BYTES * 2, kv_cache_dtype=kv)  # fmt: skip
    assert tally.accepted == tally.drafted > 500


WINDOWS: dict[str, Any] = {"max_model_len": 256, "threads": 2}


def little_room(kind: str) -> int:
    """Bytes of the KV cache for four conversations, so that slots are short."""
    return 4 * of_path(tiny_models.TINY / kind, CpuBackend()).cache.least_bytes(256)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "mistral-sliding"])
def test_no_guess_changes_a_bit_of_a_model_with_windows(kind: str) -> None:
    """What is let go of may come back when guesses are rejected: at no step before all of them are judged."""
    path = tiny_models.TINY / kind
    calls = draw_calls(tiny_models.VOCAB, 10, 9, [1, 20, 33, 64, 90, 120], max_tokens=(5, 60, 120))
    wanted = alone(path, calls, max_model_len=256)
    memory = little_room(kind)
    for seed, (right, longest, chunk) in enumerate([(1.0, 5, 64), (0.8, 16, 512), (0.5, 3, 9), (0.0, 12, 40)]):
        guesser = run(path, calls, wanted, random.Random(seed), right, longest, kv_cache_memory_bytes=memory,
                      max_num_batched_tokens=chunk, **WINDOWS)  # fmt: skip
        assert guesser.drafted > 20
    for method, most in (("self", 5), ("suffix", 8)):
        config = {"method": method, "num_speculative_tokens": most}
        recorder = Recorder(path, speculative_config=config, kv_cache_memory_bytes=memory, **WINDOWS)
        eager(recorder.engine)
        schedule(recorder, calls, random.Random(most), [n % len(calls) for n in range(12)])
        compare(recorder, wanted)
        assert recorder.engine.speculator is not None and recorder.engine.speculator.tally.drafted > 20
        recorder.engine.close()


@pytest.mark.parametrize("kind", ["gemma3", "mistral-sliding"])
def test_a_model_with_windows_that_drafts_for_itself_is_right(kind: str) -> None:
    path = tiny_models.TINY / kind
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, n=2)
    calls = [Call(call.prompt, params, call.seed) for call in draw_calls(290, 6, 8, [1, 31, 64, 100])]
    wanted = alone(path, calls, max_model_len=200)
    page = CpuBackend().page_bytes(prepare(path).program)
    tally = drafted_by(path, calls, wanted, path, random.Random(3), 4, max_num_batched_tokens=40, max_model_len=200,
                       kv_cache_memory_bytes=16 * page * 2)  # fmt: skip
    assert tally.accepted == tally.drafted > 100


@pytest.mark.parametrize("pages", [14, 60])
def test_what_a_drafting_model_has_said_wrongly_is_forgotten(tiny: Path, pages: int) -> None:
    """Some of its draws are changed, and it goes on from them: all before them are right, and so is it afterwards."""
    fields: dict[str, Any] = {"ignore_eos": True, "temperature": 0.8, "n": 2}
    calls = [
        Call(call.prompt, SamplingParams(max_tokens=90 - i, **fields), call.seed)
        for i, call in enumerate(draw_calls(290, 3, 6, [40, 70]))
    ]
    wanted = alone(tiny, calls)
    config = {"model": str(tiny), "num_speculative_tokens": 6}
    recorder = Recorder(tiny, speculative_config=config, kv_cache_memory_bytes=pages * PAGE_BYTES * 2)
    eager(recorder.engine)
    speculator = recorder.engine.speculator
    assert isinstance(speculator, ModelDraft)
    draw, fill, learn = speculator._draw, speculator.fill, speculator.learn
    right = fills = 0

    def wrong(seed: int, choice: int, position: int) -> bool:
        return hash((int(seed), int(choice), int(position), fills)) % 5 == 0

    def draw_some_wrongly(step: Any) -> Any:
        drawn, of = draw(step), step.sampling
        changed = [wrong(*key) for key in zip(of.seed, of.choice, of.position, strict=True)]
        return np.where(np.array(changed, bool), (drawn + 1) % 290, drawn)

    def fill_anew(batch: Batch) -> Any:
        nonlocal fills
        fills += 1
        return fill(batch)

    def learn_and_count(items: list[Scheduled], seconds: float) -> int:
        nonlocal right
        for item in items:
            s = item.sequence
            places = [n for n in range(len(item.draft)) if wrong(s.seed, s.choice, item.start + 1 + n)]
            right += min([*places, len(item.draft)])
        return learn(items, seconds)

    speculator._draw = draw_some_wrongly  # type: ignore[method-assign]
    speculator.fill = fill_anew  # type: ignore[method-assign]
    speculator.learn = learn_and_count  # type: ignore[method-assign]
    chosen = random.Random(pages)
    for _ in range(4):
        schedule(recorder, calls, chosen, [chosen.randrange(len(calls)) for _ in range(4)])
        compare(recorder, wanted)
    recorder.engine.close()
    assert speculator.tally.accepted == right > 300
    assert right < speculator.tally.drafted - 100


def test_what_a_drafting_model_has_read_is_found_again(tiny: Path) -> None:
    """The prompt of a second request is a hit for it too: it guesses at once."""
    call = Call(tuple(range(3, 203)), SamplingParams(max_tokens=10, temperature=0, ignore_eos=True), 0)
    config = {"method": "draft_model", "model": str(tiny)}
    recorder = Recorder(tiny, speculative_config=config, kv_cache_memory_bytes=40 * PAGE_BYTES)
    eager(recorder.engine)
    assert recorder.engine.info.pages == 20
    recorder.says("0.0", call)
    before = len(recorder.engine.trace)
    recorder.says("1.0", call)
    steps = [(record.prefill_tokens, record.drafted_tokens) for record in list(recorder.engine.trace)[before:]]
    assert steps[1][1] > 0, steps
    recorder.engine.close()


def test_who_wants_no_guesses_is_not_read(tiny: Path) -> None:
    recorder = Recorder(tiny, speculative_config={"model": str(tiny)})
    eager(recorder.engine)
    add = Add("0.0", list(range(3, 80)), SamplingParams(max_tokens=20, ignore_eos=True), 0, [2], Terms(drafted=0))
    recorder.engine.add(add)
    recorder.drain()
    speculator = recorder.engine.speculator
    assert isinstance(speculator, ModelDraft) and speculator.tally.drafted == 0
    assert not any(speculator._held._tokens)  # type: ignore[attr-defined]
    recorder.engine.close()


def test_who_wants_few_guesses_takes_none_from_others(tiny: Path) -> None:
    recorder = Recorder(tiny, speculative_config={"model": str(tiny), "num_speculative_tokens": 5})
    eager(recorder.engine)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for name, most in (("0.0", 1), ("0.1", None)):
        recorder.engine.add(Add(name, [7, 8, 9, ord(name[2])], params, 0, [2], Terms(drafted=most)))
    recorder.drain()
    assert max(record.drafted_tokens for record in recorder.engine.trace) == 6
    tally = recorder.engine.speculator.tally  # type: ignore[union-attr]
    assert tally.accepted == tally.drafted > 30
    recorder.engine.close()


def test_a_drafting_model_of_a_shorter_context_and_fewer_tokens(tmp_path: Path) -> None:
    """It guesses as far as its context goes, and never an id that it lacks; prompts may hold such."""
    path = write_tiny(tmp_path / "model.gguf")
    draft = write_tiny(tmp_path / "draft.gguf", context=48, vocab=280)
    params = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True)
    calls = [Call((290, 5, 281, *range(3, 3 + n)), params, n) for n in (1, 20, 60)]
    wanted = alone(path, calls, max_model_len=100)
    tally = drafted_by(path, calls, wanted, draft, random.Random(0), 3, max_model_len=100)
    assert tally.drafted > 30
    with LLM(str(path), speculative_config={"model": str(draft)}, max_model_len=100) as llm:
        assert llm.engine.model.drafter is not None and llm.engine.model.drafter.limits.vocab == 280


def test_a_model_of_other_tokens_is_refused(tmp_path: Path, tiny: Path) -> None:
    """By name and with the first that differ, whatever the sizes say."""
    raw = tiny.read_bytes()
    first, second = (b"\x02" + bytes(7) + letter.encode() for letter in "Āā")  # of the bytes 0 and 1
    assert first + second in raw
    (tmp_path / "other.gguf").write_bytes(raw.replace(first + second, second + first, 1))
    with pytest.raises(SettingError, match=r"other\.gguf.*: 3 is b'.x00', there b'.x01'; 4 is") as caught:
        LLM(str(tiny), speculative_config={"model": str(tmp_path / "other.gguf")})
    assert caught.value.param == "speculative_config.model"


def test_numbers_that_overflow_in_the_drafting_model_are_no_guesses(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "model.gguf", FLOATS)
    draft = write_tiny(tmp_path / "draft.gguf", FLOATS, edit=overflows_on(70))
    params = SamplingParams(max_tokens=30, temperature=0.9, ignore_eos=True)
    calls = [Call((5, 70, 8), params, 1), Call((5, 71, 8), params, 2)]
    wanted = alone(path, calls)
    tally = drafted_by(path, calls, wanted, draft, random.Random(0), 3)
    assert tally.drafted > 0


LONG = {"max_model_len": 64}


@pytest.mark.parametrize("prompt", [1, 10, 59, 60, 62, 63])
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, None])
def test_no_answer_is_longer_than_it_may_be(tiny: Path, prompt: int, max_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
    call = Call(tuple(3 + i % 7 for i in range(prompt)), params, 0)
    (wanted,) = alone(tiny, [call], **LONG)
    run(tiny, [call], [wanted], random.Random(0), 1.0, 5, **LONG)
    assert len(wanted.tokens[0]) == min(max_tokens or 64, 64 - prompt)


@pytest.mark.parametrize("last", [4, 1])
def test_what_replaces_the_last_wrong_guess_is_drawn_for_its_place(tiny: Path, last: int) -> None:
    """Always wrong at the last place of the draft; pages are published on the way."""

    class WrongAtLast(Guesser):
        def _guess(self, s: Sequence) -> tuple[int, ...]:
            known = self.wanted[0].tokens[0][s.generated :][:last]
            return (*known[:-1], (known[-1] + 1) % 290) if len(known) == last else ()

    call = Call((5, 6, 7), SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0), 3)
    wanted = alone(tiny, [call])
    recorder = Recorder(tiny)
    guesser = WrongAtLast(wanted, random.Random(0), 1.0, last)
    recorder.engine.speculator = guesser  # type: ignore[assignment]
    recorder.add("0.0", call)
    while recorder.engine.has_work:
        recorder.step()
        recorder.engine.scheduler.check()
    compare(recorder, wanted)
    assert guesser.drafted > 100 and abs((last - 1) * guesser.drafted - last * guesser.accepted) < last * last


def test_tokens_after_a_stop_string_are_not_of_the_answer(tiny: Path) -> None:
    """A stop string that ends in the middle of what one step accepted."""
    with LLM(str(tiny)) as llm:
        base = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=5, logprobs=1)
        prompt = {"prompt_token_ids": [40, 41, 42]}
        text = llm.generate([prompt], base, use_tqdm=False)[0].outputs[0]
        for at in range(4, 16, 3):
            stop = text.text[at : at + 2]
            for least in (0, 7):
                params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=5, logprobs=1,
                                        stop=[stop], min_tokens=least)  # fmt: skip
                llm.engine.speculator = None
                plain = llm.generate([prompt], params, use_tqdm=False)[0].outputs
                llm.engine.speculator = _Known(text.token_ids)  # type: ignore[assignment]
                assert llm.generate([prompt], params, use_tqdm=False)[0].outputs == plain
        assert llm.engine.speculator.used


class _Known(Guesser):
    """Knows the one answer."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.rng, self.used, self.tally = random.Random(0), False, Tally(6)

    def _guess(self, s: Sequence) -> tuple[int, ...]:
        self.used = True
        return tuple(self.answer[s.generated :][:6])

    def learn(self, items: list[Scheduled], seconds: float) -> int:
        return 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_forbidden_depends_on_the_guesses_before(tiny: Path, temperature: float) -> None:
    """Words of two tokens, and ends before min_tokens, that the answer would have in the middle of a draft."""
    prompt = (40, 41, 42)

    def call(**params: Any) -> Call:
        return Call(prompt, SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, **params), 9)

    (plain,) = alone(tiny, [call()])
    said = plain.tokens[0]
    calls = [
        call(bad_token_ids=[said[3:5], said[6:9], said[12:14]]),
        call(stop_token_ids=said[2:12:3], min_tokens=9),
        call(bad_token_ids=[said[4:6]], stop_token_ids=said[3:20:4], min_tokens=11, frequency_penalty=0.5),
    ]
    wanted = alone(tiny, calls)
    assert all(answer.tokens[0] != said for answer in wanted)
    for longest in (2, 5, 12):
        run(tiny, calls, wanted, random.Random(longest), 1.0, longest, rounds=2)


@pytest.mark.parametrize("prompt", [[77] * 48, [77], [77, 78] * 3, [*range(3, 60), 5, 6]])
def test_ngrams_of_a_text_that_repeats_itself(tiny: Path, prompt: list[int]) -> None:
    """Greedy answers to one word again and again, to prompts shorter than an n-gram, to a match at the very end."""
    calls = [Call(tuple(prompt), SamplingParams(max_tokens=32, temperature=0, ignore_eos=True), 0)]
    wanted = alone(tiny, calls)
    config = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": 4}
    recorder = Recorder(tiny, speculative_config=config)
    eager(recorder.engine)
    recorder.add("0.0", calls[0])
    recorder.drain()
    compare(recorder, wanted)
    recorder.engine.close()


def test_without_a_kv_cache_nothing_is_guessed(tiny: Path) -> None:
    with LLM(str(tiny), kv_cache=False, max_model_len=64, speculative_config={"method": "self"}) as llm:
        assert llm.engine.speculator is None and llm.engine.model.drafter is None
