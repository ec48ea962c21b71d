"""Plans against what an engine, once it is loaded, says of itself; and the arithmetic of plain numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny as tiny_models
from headrace import LLM
from headrace.backends import Backend
from headrace.backends.cpu import CpuBackend
from headrace.backends.cpu.weights import load, loaded_bytes
from headrace.backends.reference import ReferenceBackend
from headrace.base.errors import BadModelFile, SettingError
from headrace.base.formats import FORMATS
from headrace.program import Layout, Part, Weight, WeightData
from headrace.program.cost import Load, total
from headrace.quant.recipes import fitting
from headrace.runtime.load import load_model, prepare
from headrace.runtime.plan import Cache, Weights, beside, of_numbers, of_path
from tiny_model import FLOATS, write_tiny


def weights(path: Path, name: str = "", backend: Backend | None = None) -> Weights:
    planned = of_path(path, backend or CpuBackend()).weights
    return next(found for found in planned if found.format == name)


# --- plain numbers --------------------------------------------------------------------------------------------------


def test_a_large_model_by_hand() -> None:
    cache = of_numbers(layers=80, kv_heads=8, head_size=128, bits=16).cache
    assert cache.token_bytes == 327_680
    assert cache.bytes(32_768) == 10_737_418_240
    assert cache.bytes(32_768, 8) == 85_899_345_920
    assert cache.requests(24 * 10**9, 32_768) == 2


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 512), st.sampled_from([4, 8, 8.25, 16, 32]))
def test_a_page_holds_its_tokens(layers: int, heads: int, size: int, bits: float) -> None:
    cache = of_numbers(layers, heads, size, bits).cache
    exact = 2 * layers * heads * size * bits * 32 / 8
    assert exact <= cache.page_bytes < exact + 1


@settings(deadline=None)
@given(st.integers(1, 10**7), st.integers(1, 10**6), st.integers(0, 10**12))
def test_what_fits_fits_and_one_more_does_not(page_bytes: int, context: int, memory: int) -> None:
    cache = Cache(page_bytes)
    fit = cache.requests(memory, context)
    assert cache.bytes(context, fit) <= memory < cache.bytes(context, fit + 1)
    assert cache.requests(-memory, context) == 0


@settings(deadline=None)
@given(st.integers(1, 10**12))
def test_weights_of_a_number_of_values(values: int) -> None:
    subject = of_numbers(2, 2, 64, values=values)
    assert {w.format: w.bytes for w in subject.weights} == {
        name: -(-values * form.bytes // form.block) for name, form in FORMATS.items()
    }
    (f16,) = (w for w in subject.weights if w.format == "f16")
    assert f16.step_bytes(3, 100) == 2 * values + 300 * 2 * 2 * 2 * 64 * 2
    assert of_numbers(2, 2, 64).weights == ()


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda b: b.name)
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_every_architecture_takes_what_was_planned(kind: str, backend: Backend) -> None:
    path = tiny_models.TINY / kind
    executor = load_model(prepare(path), backend, tiny_models.LIMITS).executor
    planned = of_path(path, backend)
    assert planned.cache.page_bytes == executor.page_bytes
    assert weights(path, "", backend).bytes == executor.weight_bytes
    executor.close()


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_int8_pages_take_what_was_planned(kind: str) -> None:
    path, backend = tiny_models.TINY / kind, CpuBackend(kv="int8")
    executor = load_model(prepare(path), backend, tiny_models.LIMITS).executor
    assert of_path(path, backend).cache.page_bytes == executor.page_bytes < of_path(path, CpuBackend()).cache.page_bytes
    executor.close()


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_a_configuration_alone_tells_the_same(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_models.config(kind)))
    whole = of_path(tiny_models.TINY / kind, CpuBackend())
    for path in (tmp_path, config):
        alone = of_path(path, CpuBackend())
        assert alone.cache == whole.cache
        assert alone.values == whole.values
        assert {w.format: w.bytes for w in alone.weights} == {w.format: w.bytes for w in whole.weights if w.format}
    assert weights(config, "bf16").bytes == weights(tiny_models.TINY / kind).bytes  # the format that they are in


def test_who_drafts_takes_what_was_planned(tmp_path: Path, tiny: Path) -> None:
    path, backend = write_tiny(tmp_path / "floats.gguf", FLOATS), CpuBackend()
    with LLM(str(path), max_model_len=100, speculative_config={"method": "self"}) as llm:
        copy = llm.engine.model.drafter
        assert copy is not None
        planned = of_path(path, backend, copied=True)
        assert (planned.cache.page_bytes, planned.weights[0].drafter) == (
            llm.info.page_bytes,
            copy.executor.weight_bytes,
        )
    config = {"model": str(path), "quantization": "q8_0"}
    with LLM(str(tiny), max_model_len=100, kv_cache_memory_bytes=20 << 20, speculative_config=config) as llm:
        smaller = llm.engine.model.drafter
        assert smaller is not None
        planned = beside(of_path(tiny, backend), of_path(path, backend, "q8_0"))
        assert planned.cache.page_bytes == llm.info.page_bytes
        assert planned.cache.requests(20 << 20, 100) == llm.info.pages // 4
        assert planned.weights[0].bytes == llm.info.weight_bytes
        assert planned.weights[0].drafter == smaller.executor.weight_bytes < of_path(path, backend).weights[0].bytes / 3


def engine_agrees(path: Path) -> None:
    memory, sequences = 70 << 20, 8
    with LLM(str(path), max_model_len=1000, max_num_seqs=sequences, kv_cache_memory_bytes=memory) as llm:
        info, program, sizes = llm.info, llm.engine.model.program, llm.engine.model.sizes
    planned = of_path(path, CpuBackend())
    own = weights(path)
    assert (planned.cache.page_bytes, own.bytes) == (info.page_bytes + info.slot_bytes, info.weight_bytes)
    assert planned.cache.room(memory, sequences, 1000) == (info.pages, info.slots)
    assert planned.cache.requests(memory, 1000) <= info.pages // 32  # 32 pages hold 1,000 tokens
    assert info.slots or planned.cache.requests(memory, 1000) == info.pages // 32
    step = total(program, sizes, Load([1] * 8, [500] * 8, 8))
    assert own.step_bytes(8, 500) == pytest.approx(step.bytes, rel=1e-3)


def test_a_loaded_engine_agrees(tiny: Path) -> None:
    engine_agrees(tiny)


def test_a_loaded_smollm2_agrees(smollm2: Path) -> None:
    engine_agrees(smollm2)


def test_a_loaded_qwen_agrees(qwen_coder: Path) -> None:
    engine_agrees(qwen_coder)


def test_a_loaded_gemma_agrees(gemma3: Path) -> None:
    engine_agrees(gemma3)


@pytest.mark.parametrize("name", ["f32", "f16", "q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k"])
def test_a_format_takes_what_a_file_in_it_takes(name: str, tiny: Path, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "other.gguf", dict.fromkeys(FLOATS, name))
    executor = load_model(prepare(path), CpuBackend(), tiny_models.LIMITS).executor
    assert weights(tiny, name).bytes == executor.weight_bytes
    executor.close()


def test_rows_that_blocks_do_not_fill_take_the_next_format() -> None:
    assert [fitting(FORMATS[name], 96).name for name in ("q4_k", "q5_k", "q6_k")] == ["q5_0", "q5_1", "q8_0"]
    assert {fitting(form, 100).name for form in FORMATS.values()} == {"f32", "f16", "bf16"}
    assert all(fitting(form, 512) is form for form in FORMATS.values())
    narrow = tiny_models.TINY / "llama"  # no row of 256
    for name, instead in (("q4_k", "q5_0"), ("q5_k", "q5_1"), ("q6_k", "q8_0")):
        planned, other = weights(narrow, name), weights(narrow, instead)
        assert (planned.bytes, planned.step_bytes(2, 50)) == (other.bytes, other.step_bytes(2, 50))


class Zeros:
    """Weights without content."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self._layouts = layouts

    def load(self, name: str) -> WeightData:
        found = self._layouts[name]
        parts = (Part(f, np.zeros((rows, f.row_bytes(found.weight.columns)), np.uint8)) for f, rows in found.parts)
        return WeightData(found.weight, tuple(parts), found.same_as)

    def release(self, name: str) -> None:
        pass


@st.composite
def drawn(draw: st.DrawFn) -> Layout:
    experts, rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 50)), draw(st.sampled_from([32, 256]))
    shape = draw(st.sampled_from([(columns,), (rows, columns), (experts, rows, columns)]))
    if len(shape) == 1:
        return Layout(Weight("w", shape), ((FORMATS["f32"], 1),))
    left, parts = rows * (experts if len(shape) == 3 else 1), []
    while left:
        n = draw(st.integers(1, left))
        parts.append((fitting(FORMATS[draw(st.sampled_from(sorted(FORMATS)))], columns), n))
        left -= n
    return Layout(Weight("w", shape), tuple(parts))


@settings(deadline=None)
@given(drawn(), st.sampled_from([frozenset[str](), frozenset({"w"})]), st.sampled_from(["", "head", "tail"]))
def test_any_parts_take_what_they_take(found: Layout, exact: frozenset[str], tied: str) -> None:
    layouts = {"w": found}
    if tied and len(found.weight.shape) == 2 and not exact:
        layouts[tied] = Layout(Weight(tied, found.weight.shape), found.parts, same_as="w")
        layouts = dict(sorted(layouts.items(), reverse=tied == "tail"))
    loaded = load([layout.weight for layout in layouts.values()], Zeros(layouts), 1, exact)
    assert loaded_bytes(layouts.values(), exact) == loaded.nbytes


# --- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": "gpt5"}', "'gpt5'"),
        ("{}", "model_type"),
        ("[]", "JSON object"),
        ('{"model_type"', "not valid JSON"),
        ('{"model_type": "llama", "num_hidden_layers": 100000000}', "num_attention_heads"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadModelFile, match=says):
        of_path(path, CpuBackend())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 100_000_000}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"hidden_size": 1.5}, "hidden_size"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_models.config("llama") | changes))
    with pytest.raises(BadModelFile, match=says):
        of_path(path, CpuBackend())


def test_heads_that_do_not_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_models.config("llama") | {"head_dim": 512}))
    with pytest.raises(SettingError, match="heads of size 512"):
        of_path(path, CpuBackend())
