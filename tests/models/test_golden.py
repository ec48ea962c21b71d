"""Every architecture against transformers: tiny checkpoints, float32 logits, fed whole, in chunks, token by token."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from headrace.models import describe
from steps import World

TOLERANCE = 1e-3


def feed(path: Path, kind: str, chunks: Sequence[Mapping[int, int]]) -> float:
    """The largest error of any logit."""
    ids, logits = tiny.expected(kind)
    world = World(tiny.load(path).executor, ids, tiny.LIMITS.pages, seed=len(chunks))
    return float(np.abs(np.stack(world.feed(chunks)) - logits).max())


def random_chunks(seed: int) -> list[dict[int, int]]:
    rng = random.Random(seed)
    left, chunks = [tiny.TOKENS, tiny.TOKENS], []
    while any(left):
        who = [b for b in (0, 1) if left[b] and rng.random() < 0.7]
        counts = {b: rng.randint(1, min(left[b], 20)) for b in who}
        for b, n in counts.items():
            left[b] -= n
        if counts:
            chunks.append(counts)
    return chunks


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_whole_sequences_in_one_step(kind: str) -> None:
    assert feed(tiny.TINY / kind, kind, [{0: 48, 1: 48}]) < TOLERANCE


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_random_chunks(kind: str) -> None:
    assert feed(tiny.TINY / kind, kind, random_chunks(len(kind))) < TOLERANCE


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_token_by_token(kind: str) -> None:
    assert feed(tiny.TINY / kind, kind, [{0: 1, 1: 1}] * tiny.TOKENS) < TOLERANCE


@pytest.mark.parametrize("half", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", tiny.CONVERTED)
def test_the_same_model_as_gguf(kind: str, half: bool, tmp_path: Path) -> None:
    assert feed(tiny.write_gguf(tmp_path / "model.gguf", kind, half=half), kind, [{0: 48, 1: 48}]) < TOLERANCE


def old_keys(c: Mapping[str, Any]) -> dict[str, Any]:
    """The config as transformers wrote it before `rope_parameters`."""
    old = {k: v for k, v in c.items() if k not in ("rope_parameters", "layer_types", "_sliding_window_pattern")}
    rope = dict(c["rope_parameters"])
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = c["_sliding_window_pattern"]
        rope = dict(rope["full_attention"])
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if rope["type"] == "default" else rope
    return old


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_old_and_new_keys_mean_the_same(kind: str) -> None:
    new, shapes = tiny.config(kind), tiny.shapes(kind)
    old = old_keys(new)
    assert old != new
    assert describe(old, "safetensors", shapes).config == describe(new, "safetensors", shapes).config


def test_the_text_half_of_a_larger_gemma3() -> None:
    text, shapes = tiny.config("gemma3"), tiny.shapes("gemma3")
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    renamed = {f"language_{name.replace('model.', 'model.model.', 1)}": shape for name, shape in shapes.items()}
    renamed["vision_tower.patch.weight"] = (3, 3)
    model = describe(whole, "safetensors", renamed)
    assert model.config == describe(text, "safetensors", shapes).config
    assert model.table.entries["embed"].sources[0].tensor == "language_model.model.embed_tokens.weight"
