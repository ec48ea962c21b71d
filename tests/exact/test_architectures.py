"""The first promise in every architecture, past windows and splits, and in every way to run that settings offer."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from company import Answer, Call, Recorder, alone, compare, draw_calls, schedule

import tiny
from headrace import SamplingParams
from headrace.backends.cpu import CpuBackend
from headrace.runtime.load import prepare

CONTEXT = 1200
LENGTHS = [1, 31, 32, 33, 64, 255, 256, 257, 300, 512, 513, 1023, 1024, 1025]


@dataclass(frozen=True)
class Variant:
    """A tiny checkpoint with other settings. head_dim: 0 leaves it. scale: of all matrices."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int = 0
    scale: float = 1.0
    vocab: int = tiny.VOCAB

    def write(self, folder: Path) -> Path:
        c = tiny.config(self.kind)
        arrays = {name: a * np.float32(self.scale if a.ndim > 1 else 1) for name, a in tiny.arrays(self.kind).items()}
        if self.head_dim:
            arrays = {name: self._resized(name, a, c["head_dim"]) for name, a in arrays.items()}
            c["head_dim"] = self.head_dim
        arrays = {name: self._cut(name, a) for name, a in arrays.items()}
        c |= {"max_position_embeddings": 2048, "vocab_size": self.vocab, **self.settings}
        return tiny.write_folder(folder, c, arrays)

    def _resized(self, name: str, a: np.ndarray, old: int) -> np.ndarray:
        axis = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "q_norm": 0, "k_norm": 0}.get(name.split(".")[-2])
        return a if axis is None else np.resize(a, [n // old * self.head_dim if i == axis else n
                                                    for i, n in enumerate(a.shape)])  # fmt: skip

    def _cut(self, name: str, a: np.ndarray) -> np.ndarray:
        return a[: self.vocab] if name.split(".")[-2] in ("embed_tokens", "lm_head") else a


VARIANTS = {
    "gemma3": Variant("gemma3"),
    "gemma3 with a window past a split": Variant("gemma3", {"sliding_window": 300}),
    "gemma2": Variant("gemma2", {"sliding_window": 40}),
    "mistral": Variant("mistral-sliding", {"sliding_window": 257}),
    "mixtral": Variant("mixtral"),
    "qwen3-moe": Variant("qwen3-moe"),
    "phi3": Variant("phi3"),
    "heads of 64, an odd vocabulary": Variant("qwen3", head_dim=64, vocab=313),
    "heads of 128": Variant("llama", head_dim=128),
    "heads of 256": Variant("qwen2", head_dim=256, vocab=259),
    "activations without bits": Variant("qwen3-moe", scale=3e-39),
    "activations that overflow now and then": Variant("llama", scale=1e4),
}


def pages(path: Path, number: int) -> int:
    """Bytes of so many KV pages."""
    return number * CpuBackend().page_bytes(prepare(path).program)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_bit_differs_in_any_architecture(name: str, tmp_path: Path) -> None:
    """Two instruction sets, one to three threads, chunks of all sizes, warm pages, a pool that just fits."""
    path = VARIANTS[name].write(tmp_path)
    calls = draw_calls(VARIANTS[name].vocab, 10, 4, LENGTHS, max_tokens=(1, 4, 12, 40))
    if "overflow" in name:  # a chunk whose prompt tokens cannot be scored ends the request: how much was said varies
        calls = [replace(call, params=replace(call.params, prompt_logprobs=None)) for call in calls]
    wanted = alone(path, calls, max_model_len=CONTEXT)
    rng, compared = random.Random(6), 0
    for settings in (
        {"threads": 2},
        {"threads": 3, "max_num_batched_tokens": 35, "isa": "avx2"},
        {"threads": 2, "max_num_batched_tokens": 130, "kv_cache_memory_bytes": pages(path, CONTEXT // 32 + 2)},
    ):
        recorder = Recorder(path, max_model_len=CONTEXT, **settings)
        for _ in range(2):
            schedule(recorder, calls, rng, [rng.randrange(len(calls)) for _ in range(6)])
            compared += compare(recorder, wanted)
        recorder.engine.close()
    assert compared > 50
    overflowed = sum(end[0] == "error" for answer in wanted for end in answer.ends.values())
    assert (overflowed > 0) == ("overflow" in name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 2: a window, soft caps."""
    return VARIANTS["gemma2"].write(tmp_path_factory.mktemp("gemma2"))


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return draw_calls(tiny.VOCAB, 10, 8, [1, 2, 31, 32, 33, 65, 90, 260], max_tokens=(1, 4, 40))


@pytest.fixture(scope="module")
def wanted(model: Path, calls: list[Call]) -> list[Answer]:
    return alone(model, calls)


WAYS: dict[str, dict[str, Any]] = {
    **{f"{n} rows a step": {"max_num_batched_tokens": n} for n in (*range(1, 6), 8, 13, 21, 31, 32, 33, 34, 40)},
    "static batches": {"batching": "static"},
    "without a cache": {"kv_cache": False, "max_num_batched_tokens": 700},
    "one sequence at a time": {"max_num_seqs": 1},
    "plain C++": {"isa": "scalar"},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_differs_whichever_way_it_runs(way: str, model: Path, calls: list[Call], wanted: list[Answer]) -> None:
    recorder = Recorder(model, threads=2, **WAYS[way])
    schedule(recorder, calls, random.Random(3), list(range(len(calls))))
    assert compare(recorder, wanted) > 100
    recorder.engine.close()


def test_ids_past_a_smaller_vocabulary_are_never_drawn_and_change_nothing_else(model: Path, calls: list[Call]) -> None:
    few = [replace(call, prompt=tuple(t % 280 for t in call.prompt), params=SamplingParams()) for call in calls]
    some = alone(model, few, 280)
    assert all(t < 280 for answer in some for tokens in answer.tokens.values() for t in tokens)
    recorder = Recorder(model, 280, threads=2, max_num_batched_tokens=70)
    schedule(recorder, few, random.Random(1), list(range(len(few))))
    compare(recorder, some)
    recorder.engine.close()


def test_a_prefix_may_be_cached_up_to_any_page(model: Path) -> None:
    rng = random.Random(2)
    warm = [rng.randrange(3, tiny.VOCAB) for _ in range(330)]
    cuts = sorted(at + d for at in range(32, 330, 32) for d in (-1, 0, 1))
    calls = [
        Call((*warm[:at], *(rng.randrange(3, tiny.VOCAB) for _ in range(at % 3))), SamplingParams(max_tokens=3), at)
        for at in cuts
    ]
    wanted = alone(model, calls)
    recorder = Recorder(model, threads=2, max_num_batched_tokens=100)
    recorder.says("warm", Call(tuple(warm), SamplingParams(max_tokens=2), 0))
    assert [recorder.says(str(i), call) for i, call in enumerate(calls)] == wanted
    assert recorder.engine.stats().prefix_hits > 100 * 32
    recorder.engine.close()


def test_company_may_leave_after_any_step(model: Path, calls: list[Call], wanted: list[Answer]) -> None:
    recorder = Recorder(model, threads=2, max_num_batched_tokens=50, kv_cache_memory_bytes=pages(model, 16))
    for steps in range(30):
        recorder.add("x", calls[steps % len(calls)], priority=-1)
        recorder.add(f"0.{steps % 7}", calls[steps % 7])
        for _ in range(steps):
            recorder.step()
        recorder.abort("x")
        recorder.drain()
        assert compare(recorder, wanted) > 0
    recorder.engine.close()
