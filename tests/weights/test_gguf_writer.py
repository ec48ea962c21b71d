"""What is written can be read, by us and by the gguf package; what cannot be written whole is not there at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.base.errors import CapacityError, SettingError
from headrace.base.formats import FORMATS
from headrace.quant.blocks import pack_random
from headrace.weights import open_checkpoint
from headrace.weights.gguf_writer import TensorHead, write_gguf

METADATA = {
    "general.architecture": "llama",
    "a.whole": 7,
    "a.negative": -7,
    "a.large": 1 << 40,
    "a.real": 0.5,
    "a.flag": True,
    "a.text": "é🙂",
    "a.empty": [],
    "a.texts": ["", "日本"],
    "a.types": [3, 1, 5],
    "a.wide": [1 << 31, 0],
    "a.scores": [0.0, -1.5, 2],
    "a.flags": [True, False],
}
HEADS = [
    TensorHead("odd", (3,), FORMATS["f32"]),
    TensorHead("blocks", (5, 64), FORMATS["q4_0"]),
    TensorHead("stack", (2, 3, 256), FORMATS["q6_k"]),
]


def data() -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        [np.arange(3, dtype="<f4").view(np.uint8)],
        [rows[None] for rows in pack_random(FORMATS["q4_0"], 5, 64, rng)],
        [pack_random(FORMATS["q6_k"], 6, 256, rng)],
    ]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, METADATA, HEADS, data())
    read = open_checkpoint(path)
    assert dict(read.config) == METADATA
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for head, pieces in zip(HEADS, data(), strict=True):
        wanted = b"".join(piece.tobytes() for piece in pieces)
        tensor = read.tensors[head.name]
        assert (tensor.shape, tensor.format, tensor.data.tobytes()) == (head.shape, head.format, wanted)
        other = theirs[head.name]
        assert other.data.tobytes() == wanted and tuple(other.shape.tolist()) == head.shape[::-1]
        assert other.tensor_type == head.format.ggml_type


def test_types_are_those_that_llama_cpp_wants(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, METADATA, HEADS, data())
    types = {name: field.types for name, field in gguf.GGUFReader(path).fields.items()}
    kind = gguf.GGUFValueType
    assert types["a.whole"] == [kind.UINT32] and types["a.real"] == [kind.FLOAT32] and types["a.flag"] == [kind.BOOL]
    assert types["a.types"] == [kind.ARRAY, kind.INT32] and types["a.scores"] == [kind.ARRAY, kind.FLOAT32]


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"the old one")

    def broken() -> Iterator[list[np.ndarray]]:
        yield data()[0]
        raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        write_gguf(path, METADATA, HEADS, broken())
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"] and path.read_bytes() == b"the old one"
    write_gguf(path, METADATA, HEADS, data())
    assert len(open_checkpoint(path).tensors) == 3


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="No space left"):
        write_gguf(tmp_path / "model.gguf", METADATA, HEADS, data())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="No such file") as raised:
        write_gguf(tmp_path / "no" / "model.gguf", METADATA, HEADS, data())
    assert raised.value.param == "dst"


def test_permissions_are_those_of_any_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", METADATA, HEADS, data())
    (tmp_path / "other").touch()
    assert (tmp_path / "model.gguf").stat().st_mode == (tmp_path / "other").stat().st_mode
