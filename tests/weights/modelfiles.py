"""Small model files, written byte by byte so that a test can get any byte wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.formats import FORMATS, Format
from headrace.quant.blocks import pack_random

UINT16, UINT32, INT32, FLOAT, BOOL, STRING, ARRAY, UINT64 = 2, 4, 5, 6, 7, 8, 9, 10
_PACKED = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}

Pair = tuple[str, int, Any]  # key, type, value; of an array (element type, values)


@dataclass(frozen=True)
class Described:
    """A tensor as a GGUF header describes it; offset None: behind the one before."""

    name: str
    dims: tuple[int, ...]  # GGUF order: columns first
    kind: int
    data: bytes
    offset: int | None = None


def described(name: str, shape: tuple[int, ...], format: Format, seed: int = 0) -> Described:
    rows = pack_random(format, int(np.prod(shape[:-1])), shape[-1], np.random.default_rng(seed))
    return Described(name, shape[::-1], format.ggml_type, rows.tobytes())


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        element, items = content
        return struct.pack("<IQ", element, len(items)) + b"".join(value(element, item) for item in items)
    return struct.pack(_PACKED[kind], content)


def gguf_bytes(
    pairs: Sequence[Pair],
    tensors: Sequence[Described],
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF file. counts: (tensors, pairs) to declare instead of the true ones."""
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count)
    head += b"".join(text(key) + struct.pack("<I", kind) + value(kind, content) for key, kind, content in pairs)
    data = b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        head += text(tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        head += struct.pack("<IQ", tensor.kind, offset)
        data += tensor.data
    return head + bytes(-len(head) % alignment) + data


def plain_pairs() -> list[Pair]:
    return [
        ("general.architecture", STRING, "llama"),
        ("llama.block_count", UINT32, 2),
        ("llama.rope.freq_base", FLOAT, 10000.0),
        ("tokenizer.ggml.add_bos_token", BOOL, 1),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, ["<s>", "é", "", "日本", "🙂"])),
        ("tokenizer.ggml.scores", ARRAY, (FLOAT, [0.0, -1.5, 2.0])),
        ("flags", ARRAY, (BOOL, [1, 0, 1])),
        ("nested", ARRAY, (ARRAY, [(INT32, [-1, 2]), (STRING, ["x"])])),
    ]


def plain_tensors() -> list[Described]:
    return [
        described("token_embd.weight", (6, 256), FORMATS["q8_0"], 1),
        described("blk.0.attn_q.weight", (4, 256), FORMATS["q4_k"], 2),
        described("blk.0.attn_norm.weight", (256,), FORMATS["f32"], 3),
        described("blk.0.ffn_up.weight", (3, 5, 32), FORMATS["q4_1"], 4),
    ]


def safetensors_bytes(entries: dict[str, Any], data: bytes) -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


def wheel(folder: Path, package: str, version: str, members: dict[str, bytes]) -> Path:
    """A wheel with those members and a correct record, as pip wants it."""
    stem = f"{package.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = dict(members)
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = [f"{name},sha256={_record_hash(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
