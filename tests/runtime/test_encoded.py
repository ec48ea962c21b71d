"""Quantised as they are loaded, weights are those that `headrace quantize --method plain` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from headrace import LLM, SamplingParams
from headrace.backends import Backend
from headrace.backends.cpu import CpuBackend
from headrace.backends.reference import ReferenceBackend
from headrace.base.errors import BadModelFile, SettingError
from headrace.base.formats import ENCODED
from headrace.base.settings import EngineSettings
from headrace.program import WeightData
from headrace.quant.encode import CODINGS
from headrace.runtime.encoded import Encoded
from headrace.runtime.load import Prepared, load_model, prepare
from headrace.runtime.plan import of_path
from headrace.runtime.quantize import QuantizeSettings, quantize_model
from steps import World
from tiny_model import FLOATS, MIXED, write_tiny

BACKENDS: list[Backend] = [CpuBackend(), ReferenceBackend()]


def loaded(prepared: Prepared, backend: Backend) -> dict[str, WeightData]:
    source = Encoded(prepared.weights, prepared.formats, backend.encode, threads=2)
    return {name: source.load(name) for name in prepared.program.weights}


def written(source: Path, path: Path, to: str) -> Path:
    quantize_model(prepare(source), path, QuantizeSettings(to=to, method="plain"))
    return path


def test_the_formats_are_those_of_quantize() -> None:
    assert set(ENCODED) == set(CODINGS)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("to", ["q4_0", "q4_k"])
def test_weights_are_those_of_the_file(kind: str, to: str, tmp_path: Path) -> None:
    """Of every architecture, each part's format and bytes; and what was said of them before."""
    source = tiny.with_tokenizer(tmp_path / kind, kind)
    ours, theirs = prepare(source, to), prepare(written(source, tmp_path / "m.gguf", to))
    assert ours.layouts() == theirs.layouts() and ours.sizes() == theirs.sizes()
    wanted = loaded(theirs, BACKENDS[0])
    for backend in BACKENDS:
        for name, data in loaded(ours, backend).items():
            assert data.same_as == wanted[name].same_as
            for part, other in zip(data.parts, wanted[name].parts, strict=True):
                assert part.format == other.format
                np.testing.assert_array_equal(part.data, other.data, err_msg=name)


@pytest.mark.parametrize("to", ENCODED)
def test_answers_are_those_of_the_file(to: str, tmp_path: Path) -> None:
    """The same bits; also of a GGUF file of floats, whose q and k are turned."""
    source = write_tiny(tmp_path / "tiny.gguf", FLOATS)
    path = written(source, tmp_path / "m.gguf", to)
    ids = np.random.default_rng(2).integers(3, 300, (2, 48)).tolist()

    def logits(prepared: Prepared) -> np.ndarray:
        model = load_model(prepared, CpuBackend(), tiny.LIMITS)
        return np.stack(World(model.executor, ids, 8).feed([{0: 48, 1: 48}]))

    ours = logits(prepare(source, to))
    np.testing.assert_array_equal(ours, logits(prepare(path)))
    assert (ours != logits(prepare(source))).any()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("kind", ["llama-tied-llama3-rope", "qwen3-moe"])
def test_the_memory_is_as_planned(kind: str, backend: Backend, tmp_path: Path) -> None:
    """Also where there is a configuration alone."""
    path = tiny.TINY / kind
    executor = load_model(prepare(path, "q4_0"), backend, tiny.LIMITS).executor
    for known in (path, path / "config.json"):
        planned = {weights.format: weights.bytes for weights in of_path(known, backend, "q4_0").weights}
        assert planned[""] == executor.weight_bytes
    if backend.name == "cpu":
        assert executor.weight_bytes < 0.5 * planned["bf16"]
    executor.close()


def test_llm_and_its_prefixes(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", FLOATS)
    small = written(path, tmp_path / "small.gguf", "q4_1")
    greedy = SamplingParams(temperature=0, max_tokens=24)
    texts, fingerprints = [], set()
    for model, given in ((path, "q4_1"), (small, None), (path, "none"), (path, None)):
        with LLM(str(model), max_model_len=128, quantization=given) as llm:
            texts.append(llm.generate("hello", greedy)[0].outputs[0].token_ids)
        fingerprints.add(prepare(model, EngineSettings(quantization=given).weight_format).fingerprint)
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert len(fingerprints) == 3


def test_blocks_stay_as_they_are(tmp_path: Path) -> None:
    """Floats among them are rounded; a model that is mostly something else already is refused."""
    mixed = write_tiny(tmp_path / "mixed.gguf", {**dict.fromkeys(MIXED, "q4_1"), "down": "f16", "embed": "q8_0"})
    parts = {name: [f.name for f, _ in layout.parts] for name, layout in prepare(mixed, "q4_1").layouts().items()}
    assert parts["0.mlp.down"] == ["q4_1"] == parts["0.attn.o"] and parts["embed"] == ["q8_0"]
    for to in ("q4_0", "q8_0"):
        with pytest.raises(SettingError, match="is q4_1 already") as raised:
            prepare(mixed, to)
        assert raised.value.param == "quantization"
    assert prepare(mixed).layouts()["0.mlp.down"].parts[0][0].name == "f16"


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    def edit(name: str, values: np.ndarray) -> None:
        if name == "blk.1.ffn_down.weight":
            values[3, 7] = 1e30

    path = write_tiny(tmp_path / "large.gguf", FLOATS, edit=edit)
    with pytest.raises(BadModelFile, match="q8_0 cannot hold") as raised:
        load_model(prepare(path, "q8_0"), CpuBackend(), tiny.LIMITS)
    assert raised.value.tensor == "1.mlp.down"
    load_model(prepare(path), CpuBackend(), tiny.LIMITS)


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8", "bitsandbytes", "Q4_0", "q5_k", "", 4])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(SettingError, match="quantization must be one of q8_0") as raised:
        EngineSettings(quantization=name)
    assert raised.value.param == "quantization"
