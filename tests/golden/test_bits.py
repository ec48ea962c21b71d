"""The bits of logits are those of the day when bits.json was written, from every instruction set: arithmetic never
changes by accident. After a change that is meant, `make bits` writes the file anew."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import packings
import tiny
from headrace.backends import Limits
from headrace.base.formats import FORMATS
from headrace.runtime.load import load_model, prepare
from real import golden
from steps import World
from tiny_model import MIXED, write_tiny

native = pytest.importorskip("headrace._native", reason="the native module isn't built")
cpu = pytest.importorskip("headrace.backends.cpu")

HELD = Path(__file__).parent / "bits.json"
RENEW = "HEADRACE_RENEW_BITS"
ISAS = native.isa_names()
# Two sequences of 290 and 40 tokens: one token, chunks of any size, both at once, past the border of a split
CHUNKS = ({0: 1}, {0: 7, 1: 16}, {0: 64}, {1: 1, 0: 180}, {0: 37, 1: 22}, {0: 1, 1: 1})


def hashed(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def logits(
    path: Path, vocab: int, sequences: list[list[int]], isa: str, bf16: bool = False, kv: str = "float16"
) -> str:
    limits = Limits(tokens=200, sequences=2, pages=16, context=320, vocab=vocab, threads=2)
    loaded = load_model(prepare(path), cpu.CpuBackend(isa=isa, bf16=bf16, kv=kv), limits)
    try:
        rows = World(loaded.executor, sequences, limits.pages).feed(CHUNKS)
    finally:
        loaded.executor.close()
    assert all(np.isfinite(r).all() for r in rows)
    return hashed(*(r.tobytes() for r in rows))


def check(name: str, model: str, bits: Callable[[str], str], isas: list[str]) -> None:
    """model: a hash of the checkpoint, so that a model made otherwise isn't taken for other arithmetic."""
    found = {isa: bits(isa) for isa in isas}
    assert len(set(found.values())) == 1, f"{name}: the instruction sets disagree: {found}"
    held = json.loads(HELD.read_text()) if HELD.exists() else {}
    if os.environ.get(RENEW):
        held[name] = f"{model} {found[isas[0]]}"
        HELD.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n")
    was_model, was = held[name].split()
    assert model == was_model, f"{name}: the checkpoint itself isn't the one of bits.json"
    assert found[isas[0]] == was, (
        f"{name}: the arithmetic has changed. If that is meant, say so in CHANGELOG.md and run `make bits`; if not, "
        "some kernel computes in another order or precision than before."
    )


def ids(vocab: int) -> list[list[int]]:
    return [[(37 * i + 11 * n) % (vocab - 3) + 3 for i in range(n)] for n in (290, 40)]


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("bf16", [False, True])
def test_architectures(kind: str, bf16: bool, tmp_path: Path) -> None:
    path = tiny.write_folder(tmp_path / kind, tiny.config(kind) | {"max_position_embeddings": 512}, tiny.arrays(kind))
    model = hashed((tiny.TINY / kind / "model.safetensors").read_bytes())
    name = f"{kind} in {'bfloat16' if bf16 else 'float32'}"
    check(name, model, lambda isa: logits(path, tiny.VOCAB, ids(tiny.VOCAB), isa, bf16), ISAS)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_pages(kind: str, kv: str, tmp_path: Path) -> None:
    path = tiny.write_folder(tmp_path / kind, tiny.config(kind) | {"max_position_embeddings": 512}, tiny.arrays(kind))
    model = hashed((tiny.TINY / kind / "model.safetensors").read_bytes())
    check(f"{kind}, {kv} pages", model, lambda isa: logits(path, tiny.VOCAB, ids(tiny.VOCAB), isa, kv=kv), ISAS)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", dict.fromkeys(MIXED, name), seed=5)
    model = hashed(path.read_bytes())
    check(f"format {name}", model, lambda isa: logits(path, tiny.VOCAB, ids(tiny.VOCAB), isa), ISAS)


def test_packed_by_another_library(tmp_path: Path) -> None:
    tensors: packings.Arrays = {}
    for name, a in tiny.arrays("llama").items():
        module = name.removesuffix(".weight")
        packs = module != name and a.ndim == 2 and "layers" in name
        tensors |= packings.awq(module, packings.rounded(a, 32)) if packs else {name: a}
    scheme = {"quant_method": "awq", "bits": 4, "group_size": 32}
    config = tiny.config("llama") | {"max_position_embeddings": 512, "quantization_config": scheme}
    path = packings.write(tmp_path / "awq", config, tensors)
    model = hashed((path / "model.safetensors").read_bytes())
    check("format q4_z", model, lambda isa: logits(path, tiny.VOCAB, ids(tiny.VOCAB), isa), ISAS)


def test_a_real_model(smollm2: Path) -> None:
    text = golden("smollm2")["nll"]["prompt_ids"]
    sequences = [(text * 2)[:290], text[-40:]]
    check("smollm2", smollm2.stem, lambda isa: logits(smollm2, 49152, sequences, isa), ISAS[:1])
