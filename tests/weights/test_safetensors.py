"""Safetensors folders: what the library writes is read exactly; the index decides; what is wrong is refused by name."""

from __future__ import annotations

import json
import logging
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelfiles import safetensors_bytes
from safetensors.numpy import save_file

from headrace.base.errors import BadModelFile, HeadraceError, ModelNotFound
from headrace.base.formats import FORMATS
from headrace.quant.blocks import dequantize, quantize
from headrace.weights import open_checkpoint

Store = Callable[..., Path]
ENTRIES: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [32, 38]},
    "c": {"dtype": "F16", "shape": [], "data_offsets": [38, 40]},
}
DATA = np.random.default_rng(0).integers(0, 120, 40, np.uint8).tobytes()
VALID = safetensors_bytes(ENTRIES, DATA)


def folder_with(stored: Store, content: bytes = VALID) -> Path:
    stored(b'{"model_type": "llama"}', "m/config.json")
    return stored(content, "m/model.safetensors").parent


def sharded(folder: Path, shards: dict[str, dict[str, np.ndarray]], index: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def filled(value: float) -> np.ndarray:
    return np.full((2, 4), value, np.float32)


# --- what is right --------------------------------------------------------------------------------------------------


def test_what_the_library_writes_is_read_as_written(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(0, 1, (6, 10)).astype(np.float32)
    save_file({"x": values, "y.half": values.astype(np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 10}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.kind, checkpoint.path) == ("safetensors", tmp_path)
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 10}
    assert checkpoint.generation == {"eos_token_id": [1, 2]}
    x, y = checkpoint.tensors["x"], checkpoint.tensors["y.half"]
    assert (x.shape, x.format.name, y.format.name) == ((6, 10), "f32", "f16")
    np.testing.assert_array_equal(dequantize(x.format, x.rows()), values)
    np.testing.assert_array_equal(dequantize(y.format, y.rows()), values.astype(np.float16).astype(np.float32))
    assert not x.data.flags.writeable


def test_bfloat16_and_scalars(stored: Store) -> None:
    packed = quantize(FORMATS["bf16"], [[1.5, -2.0]]).tobytes()
    entries = {
        "w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "s": {"dtype": "BF16", "shape": [], "data_offsets": [4, 6]},
    }
    tensors = open_checkpoint(folder_with(stored, safetensors_bytes(entries, packed + packed[:2]))).tensors
    assert dequantize(tensors["w"].format, tensors["w"].rows()).tolist() == [[1.5, -2.0]]
    assert tensors["s"].shape == () and dequantize(tensors["s"].format, tensors["s"].rows()).tolist() == [[1.5]]


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", {ONE: {"a": filled(1)}, TWO: {"b": filled(2)}}, {"a": ONE, "b": TWO})
    checkpoint = open_checkpoint(folder)
    assert {name: t.file.name for name, t in checkpoint.tensors.items()} == {"a": ONE, "b": TWO}
    checkpoint.release(checkpoint.tensors["b"])
    assert checkpoint.tensors["b"].data.tobytes() == filled(2).tobytes()


def test_the_fingerprint_follows_weights_and_config(stored: Store) -> None:
    first = open_checkpoint(folder_with(stored)).fingerprint
    assert open_checkpoint(folder_with(stored)).fingerprint == first
    assert open_checkpoint(folder_with(stored, safetensors_bytes(ENTRIES, DATA[::-1]))).fingerprint != first
    folder = folder_with(stored)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    assert open_checkpoint(folder).fingerprint != first


def test_its_identity_follows_all_that_decides_what_the_weights_are(tmp_path: Path) -> None:
    """Which of two copies the index names; what a file beside the configuration says of packed ones."""
    folder = sharded(tmp_path / "m", {ONE: {"a": filled(1)}, TWO: {"a": filled(2)}}, {"a": ONE})

    def identity() -> set[str]:
        checkpoint = open_checkpoint(folder)
        return {checkpoint.fingerprint, checkpoint.digest()}

    seen = identity()
    assert identity() == seen
    for name, said in [
        ("model.safetensors.index.json", {"weight_map": {"a": TWO}}),
        ("quant_config.json", {"zero_point": True}),
        ("quant_config.json", {"zero_point": False}),
        ("quantize_config.json", {"sym": True}),
        ("quantize_config.json", {"sym": False}),
    ]:
        (folder / name).write_text(json.dumps(said))
        assert not identity() & seen, name
        seen |= identity()


# --- the index decides ----------------------------------------------------------------------------------------------


def test_a_second_copy_in_another_shard_is_ignored_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = {ONE: {"a": filled(1)}, TWO: {"b": filled(2), "a": filled(0)}}
    folder = sharded(tmp_path / "m", shards, {"a": ONE, "b": TWO})
    save_file({"a": filled(9)}, folder / "consolidated.safetensors")
    save_file({"a": filled(9)}, folder / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors["a"].data.tobytes() == filled(1).tobytes() and list(checkpoint.tensors) == ["a", "b"]
    assert f"a in {TWO}" in caplog.text


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", {ONE: {"a": filled(1)}}, {"a": ONE, "b": TWO})
    with pytest.raises(BadModelFile, match=f"missing.*{TWO}"):
        open_checkpoint(folder)


def test_tensors_that_no_shard_has(tmp_path: Path) -> None:
    index = {"a": ONE, "b": ONE, **{f"lost.{i}": ONE for i in range(12)}}
    folder = sharded(tmp_path / "m", {ONE: {"a": filled(1)}}, index)
    with pytest.raises(BadModelFile, match=r"do not hold: b, lost\.0, .* and 3 more"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3, None])
def test_an_index_that_leads_out_of_the_folder(tmp_path: Path, name: Any) -> None:
    with pytest.raises(BadModelFile, match=r"no name of a \.safetensors file") as caught:
        open_checkpoint(sharded(tmp_path / "m", {}, {"a": name}))
    assert caught.value.tensor == "a"


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "\ud800"])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    folder = sharded(tmp_path / "m", {}, {})
    (folder / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BadModelFile, match=r"index\.json"):
        open_checkpoint(folder)


# --- what is wrong --------------------------------------------------------------------------------------------------


def entry(**changes: Any) -> bytes:
    return safetensors_bytes({**ENTRIES, "b": {**ENTRIES["b"], **changes}}, DATA)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (entry(dtype="F64"), "dtype 'F64' is not supported"),
        (entry(dtype=None), "dtype None"),
        (entry(dtype=["F32"]), "dtype"),
        (entry(shape=[4]), "takes 8 bytes"),
        (entry(shape=[-3]), "whole numbers"),
        (entry(shape=[2**62, 2**62]), "takes"),
        (entry(shape=[1] * 9 + [3]), "whole numbers"),
        (entry(shape=[True, 3]), "whole numbers"),
        (entry(shape="3"), "whole numbers"),
        (entry(data_offsets=[32]), "two data_offsets"),
        (entry(data_offsets=[38, 32]), "takes 6 bytes"),
        (entry(data_offsets=[26, 32]), "overlaps"),
        (entry(data_offsets=[34, 40]), "gap"),
        (entry(data_offsets=[2**62, 2**62 + 6]), "of 40 bytes"),
        (safetensors_bytes({**ENTRIES, "b": 7}, DATA), "needs a shape"),
    ],
)
def test_a_tensor_that_cannot_be(stored: Store, content: bytes, match: str) -> None:
    with pytest.raises(BadModelFile, match=match) as caught:
        open_checkpoint(folder_with(stored, content))
    assert caught.value.tensor in ("b", "c") and caught.value.file.endswith("model.safetensors")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "empty"),
        (b"\x01", "cut off"),
        (struct.pack("<Q", 2**63) + VALID[8:], "cut off"),
        (struct.pack("<Q", 4) + b"[1]\n", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{]", "not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not valid JSON"),
        (struct.pack("<Q", 100000) + b"[" * 100000, "not valid JSON"),
        (struct.pack("<Q", 15) + b'{"a":1,  "a":2}', "'a' occurs twice"),
        (VALID[:-1], "of 39 bytes"),
        (VALID + b"\0", "has 41 bytes of data"),
    ],
)
def test_a_file_that_cannot_be(stored: Store, content: bytes, match: str) -> None:
    with pytest.raises(BadModelFile, match=match):
        open_checkpoint(folder_with(stored, content))


def test_a_folder_that_is_no_model(tmp_path: Path, stored: Store) -> None:
    with pytest.raises(ModelNotFound, match=r"nor a \.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors"):
        open_checkpoint(tmp_path)
    folder = folder_with(stored)
    (folder / "config.json").unlink()
    with pytest.raises(BadModelFile, match=r"config\.json: is missing"):
        open_checkpoint(folder)


# --- any bytes ------------------------------------------------------------------------------------------------------


def survives(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(content)
        try:
            checkpoint = open_checkpoint(folder)
        except HeadraceError as error:
            assert isinstance(error, BadModelFile)
            return
        for tensor in checkpoint.tensors.values():
            assert tensor.data.nbytes == tensor.format.bytes * int(np.prod(tensor.shape))
            assert tensor.rows().nbytes <= len(content)
        assert checkpoint.fingerprint


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 41), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_changed_bytes_are_refused_or_harmless(changes: list[tuple[int, int]]) -> None:
    content = bytearray(VALID)
    for at, byte in changes:
        content[at] = byte
    survives(bytes(content))


@given(st.integers(0, len(VALID)), st.binary(max_size=32))
@settings(max_examples=150, deadline=None)
def test_truncation_and_other_ends_are_refused_or_harmless(kept: int, end: bytes) -> None:
    survives(VALID[:kept] + end)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "F16", "BF16", "I8"])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner))
SIZES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 40, 2**31, 2**63, -1]), max_size=3)
FIELDS = st.fixed_dictionaries({}, optional={"dtype": SCALARS, "shape": SIZES | JSON, "data_offsets": SIZES | JSON})


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=3), FIELDS | JSON, max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_header_is_refused_or_harmless(header: dict[str, Any]) -> None:
    survives(safetensors_bytes(header, DATA))
