"""GGUF files, written whole or not at all.

Owes: version 3, little-endian, tensors one after the other as they come, so that none but the current one need be in
memory; a file under its own name only when all of it is on the disk. Does not know what a key or a tensor means.

Layout: see `headrace.weights.gguf`, which reads it. Integers are written as uint32 where they fit (llama.cpp wants the
lengths and counts of a model in that type), else as int32, uint64 or int64; real numbers as float32.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headrace.base.errors import CapacityError, SettingError
from headrace.base.formats import Format
from headrace.weights.gguf import MAGIC
from headrace.weights.mapped import Bytes

ALIGNMENT = 32
_VERSION = 3
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_INTEGERS = ((4, "<I", "<u4"), (5, "<i", "<i4"), (10, "<Q", "<u8"), (11, "<q", "<i8"))  # type, in a pair, in an array
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class TensorHead:
    """What a file says of a tensor before its bytes. shape: numpy's order, as in `Tensor`."""

    name: str
    shape: tuple[int, ...]
    format: Format

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.format.block * self.format.bytes


def write_gguf(
    path: Path, metadata: Mapping[str, Any], heads: Sequence[TensorHead], data: Iterable[Iterable[Bytes]]
) -> None:
    """Writes a file. data: for each tensor of `heads`, in their order, its bytes in any number of pieces.

    metadata: strings, booleans, whole and real numbers, and lists of one kind of them. A path that cannot be written is
    a `SettingError` (param "dst"), a full disk a `CapacityError`; then, as when `data` raises, no file is left behind.
    """
    with _replacing(path) as file:
        file.write(_header(metadata, heads))
        for head, pieces in zip(heads, data, strict=True):
            file.write(bytes(-file.tell() % ALIGNMENT))
            written = sum(file.write(np.ascontiguousarray(piece).data) for piece in pieces)
            assert written == head.nbytes, (head, written)
        file.write(bytes(-file.tell() % ALIGNMENT))


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file under a temporary name beside `path`, which takes its place when the block ends well."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:64]}.", delete=False) as file:
            try:
                yield file  # type: ignore[misc]
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise CapacityError(
                f"{path}: no room for it on the disk ({error.strerror}); nothing was written"
            ) from error
        if error.filename is None:
            raise
        raise SettingError(f"{path} cannot be written: {error.strerror}", param="dst") from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _header(metadata: Mapping[str, Any], heads: Sequence[TensorHead]) -> bytes:
    offsets = accumulate((head.nbytes + -head.nbytes % ALIGNMENT for head in heads), initial=0)
    return b"".join(
        (
            MAGIC,
            struct.pack("<IQQ", _VERSION, len(heads), len(metadata)),
            *(_text(key) + _value(key, value) for key, value in metadata.items()),
            *(_described(head, offset) for head, offset in zip(heads, offsets, strict=False)),
        )
    )


def _described(head: TensorHead, offset: int) -> bytes:
    dims = head.shape[::-1]
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return _text(head.name) + sizes + struct.pack("<IQ", head.format.ggml_type, offset)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """The type of a value, and the value."""
    if isinstance(value, list | tuple):
        kind, packed = _array(key, value)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + packed
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        kind, packing, _ = _integer(key, value, value)
        return struct.pack("<I", kind) + struct.pack(packing, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT, value)
    raise TypeError(f"{key}: GGUF has no type for {type(value).__name__}")


def _array(key: str, values: Sequence[Any]) -> tuple[int, bytes]:
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return _STRING, b"".join(map(_text, values))
    if kinds == {bool}:
        return _BOOL, np.asarray(values, np.uint8).tobytes()
    if kinds == {int}:
        kind, _, dtype = _integer(key, min(values), max(values), first=1)
        return kind, np.asarray(values, dtype).tobytes()
    if kinds <= {int, float}:
        return _FLOAT, np.asarray(values, "<f4").tobytes()
    raise TypeError(f"{key}: no array of GGUF holds {sorted(kind.__name__ for kind in kinds)}")


def _integer(key: str, low: int, high: int, first: int = 0) -> tuple[int, str, str]:
    """The first type that holds both. first: arrays begin with int32, which is what llama.cpp wants of token types."""
    for kind in _INTEGERS[first:] + _INTEGERS[:first]:
        span = np.iinfo(kind[2])
        if span.min <= low and high <= span.max:
            return kind
    raise TypeError(f"{key}: no integer of GGUF holds both {low} and {high}")
