"""GGUF files, read as hostile input: every length, count, offset, type and overlap is checked before it is used.

Owes: metadata and tensor views of versions 2 and 3, little-endian, whole or split. Does not know
what a key or a tensor means.

Layout (ggml-org/ggml, docs/gguf.md): magic, version, counts; key-value pairs; tensor descriptions; padding to the
alignment; tensor data at offsets that count from there. A file of a split set is itself a GGUF file, with some of the
tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn

import numpy as np

from headrace.base.errors import BadModelFile
from headrace.base.formats import BY_GGML_TYPE, FORMATS, Format
from headrace.weights.checkpoint import Checkpoint, Tensor
from headrace.weights.mapped import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")

_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT, _ALIGNMENT_LIMIT = "general.alignment", 32, 1 << 16
_NAME_LIMIT = 1 << 16  # bytes of a key or a tensor name
_ELEMENT_LIMIT = 1 << 24  # elements of all metadata arrays of a file together; a vocabulary has about 2**18
_DEPTH_LIMIT = 4  # arrays in arrays
_DIMENSION_LIMIT = 4
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes

_U8, _U32, _U64 = Struct("<B"), Struct("<I"), Struct("<Q")
_SCALARS: dict[int, tuple[Struct, str]] = {
    0: (_U8, "u1"),
    1: (Struct("<b"), "i1"),
    2: (Struct("<H"), "<u2"),
    3: (Struct("<h"), "<i2"),
    4: (_U32, "<u4"),
    5: (Struct("<i"), "<i4"),
    6: (Struct("<f"), "<f4"),
    10: (_U64, "<u8"),
    11: (Struct("<q"), "<i8"),
    12: (Struct("<d"), "<f8"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Names of the types that are not supported, so that the message can say which one it is (ggml.h, enum ggml_type).
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Part:
    """One file of a set, read and checked by itself."""

    file: MappedFile
    header: int  # bytes before the tensor data
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file, or in the split set that begins with it; BadModelFile if anything is wrong."""
    first = _read_part(path)
    parts = [first, *map(_read_part, _other_files(path, first.config))]
    _check_split(parts)
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise BadModelFile(part.file.path, f"is also in {tensors[name].file}", tensor=name)
            tensors[name] = tensor
    return Checkpoint("gguf", path, first.config, tensors, [(p.file, p.header) for p in parts])


# --- split sets -----------------------------------------------------------------------------------------------------


def _other_files(path: Path, config: dict[str, Any]) -> Iterator[Path]:
    """The files after the first of a split set, all of which must be there."""
    count = config.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["parts"]) != count:
        raise BadModelFile(path, f"is one of {count} parts; name the files ...-00001-of-{count:05}.gguf and so on")
    names = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    if path.name != names[0]:
        raise BadModelFile(path, f"is not the first part of its model; give {names[0]}")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise BadModelFile(path, f"parts of the model are missing: {', '.join(missing)}")
    yield from (path.parent / name for name in names[1:])


def _check_split(parts: list[_Part]) -> None:
    if len(parts) == 1:
        return
    for number, part in enumerate(parts):
        for key, expected in (("split.no", number), ("split.count", len(parts))):
            if part.config.get(key) != expected:
                raise BadModelFile(part.file.path, f"{key} is {part.config.get(key)!r}, it should be {expected}")
    first, held = parts[0], sum(len(part.tensors) for part in parts)
    declared = first.config.get("split.tensors.count", held)
    if declared != held:
        raise BadModelFile(first.file.path, f"split.tensors.count is {declared!r}, the parts hold {held} tensors")


# --- one file -------------------------------------------------------------------------------------------------------


def _read_part(path: Path) -> _Part:
    file = MappedFile(path)
    cursor = _Cursor(file)
    pairs, tensors = _read_counts(cursor)
    config = _read_config(cursor, pairs)
    alignment = _alignment(path, config)
    described = [_read_description(cursor) for _ in range(tensors)]
    header = -(-cursor.at // alignment) * alignment
    return _Part(file, min(header, file.size), config, _views(file, described, header, alignment))


class _Cursor:
    """A place in a file; moves forward only, and never past the end."""

    __slots__ = ("at", "buffer", "elements", "path", "size")

    def __init__(self, file: MappedFile) -> None:
        self.path, self.buffer, self.size = file.path, file.buffer, file.size
        self.at = 0
        self.elements = _ELEMENT_LIMIT  # of arrays that may still come

    def fail(self, reason: str, tensor: str | None = None) -> NoReturn:
        raise BadModelFile(self.path, reason, tensor=tensor)

    def take(self, length: int, what: str) -> int:
        """Move over `length` bytes and return where they begin."""
        start = self.at
        if length > self.size - start:
            self.fail(f"{what} at byte {start} needs {length} bytes, but the file ends at {self.size}")
        self.at = start + length
        return start

    def number(self, kind: Struct, what: str) -> Any:
        return kind.unpack_from(self.buffer, self.take(kind.size, what))[0]

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number(_U64, what)
        if limit is not None and length > limit:
            self.fail(f"{what} at byte {self.at} is {length} bytes long; the limit is {limit}")
        start = self.take(length, what)
        try:
            return self.buffer[start : self.at].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {start} is not UTF-8")


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and counts: (pairs, tensors)."""
    start = cursor.take(24, "the header")
    if cursor.buffer[start : start + 4] != MAGIC:
        cursor.fail("is not a GGUF file (its first four bytes are not 'GGUF')")
    version, tensors, pairs = Struct("<IQQ").unpack_from(cursor.buffer, start + 4)
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        big = "; it is a big-endian file, which is not supported" if swapped in VERSIONS else ""
        cursor.fail(f"GGUF version {version} is not supported, only 2 and 3, little-endian{big}")
    if pairs * _LEAST_PAIR + tensors * _LEAST_TENSOR > cursor.size - cursor.at:
        cursor.fail(f"declares {pairs} keys and {tensors} tensors, more than {cursor.size} bytes can hold")
    return pairs, tensors


def _read_config(cursor: _Cursor, pairs: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text("a key", _NAME_LIMIT)
        if key in config:
            cursor.fail(f"the key {key!r} occurs twice")
        config[key] = _read_value(cursor, cursor.number(_U32, key), key, 0)
    return config


def _read_value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind][0], key)
    if kind not in _READERS:
        cursor.fail(f"{key}: the value has the unknown type {kind}")
    return _READERS[kind](cursor, key, depth)


def _read_bool(cursor: _Cursor, key: str, depth: int) -> bool:
    byte: int = cursor.number(_U8, key)
    if byte > 1:
        cursor.fail(f"{key}: a boolean is {byte}, it must be 0 or 1")
    return byte == 1


def _read_array(cursor: _Cursor, key: str, depth: int) -> list[Any]:
    if depth == _DEPTH_LIMIT:
        cursor.fail(f"{key}: arrays lie in arrays more than {_DEPTH_LIMIT} deep")
    kind, count = cursor.number(_U32, key), cursor.number(_U64, key)
    if count > cursor.elements:
        cursor.fail(f"{key}: an array of {count} elements; all arrays together may have {_ELEMENT_LIMIT}")
    cursor.elements -= count
    if kind == _STRING:
        return _read_texts(cursor, key, count)
    if kind in _SCALARS or kind == _BOOL:
        return _read_numbers(cursor, key, kind, count)
    return [_read_value(cursor, kind, key, depth + 1) for _ in range(count)]


def _read_numbers(cursor: _Cursor, key: str, kind: int, count: int) -> list[Any]:
    dtype = np.dtype(_SCALARS.get(kind, _SCALARS[0])[1])
    start = cursor.take(count * dtype.itemsize, key)
    numbers = np.frombuffer(cursor.buffer[start : cursor.at], dtype)
    if kind == _BOOL:
        if (numbers > 1).any():
            cursor.fail(f"{key}: an array of booleans holds {numbers.max()}, they must be 0 or 1")
        numbers = numbers.astype(np.bool_)
    values: list[Any] = numbers.tolist()
    return values


def _read_texts(cursor: _Cursor, key: str, count: int) -> list[str]:
    """An array of strings; the loop that decides how fast a vocabulary opens, hence without a call a string."""
    buffer, size, at = cursor.buffer, cursor.size, cursor.at
    length_at = _U64.unpack_from
    texts: list[str] = []
    append = texts.append
    try:
        for _ in range(count):
            start = at + 8
            if start > size:
                break
            at = start + length_at(buffer, at)[0]
            if at > size:
                break
            append(buffer[start:at].decode())
    except UnicodeDecodeError:
        cursor.fail(f"{key}: element {len(texts)} at byte {start} is not UTF-8")
    if len(texts) < count:
        end = max(at, start)
        cursor.fail(f"{key}: element {len(texts)} of {count} would end at byte {end}, the file ends at {size}")
    cursor.at = at
    return texts


_READERS: dict[int, Callable[[_Cursor, str, int], Any]] = {
    _BOOL: _read_bool,
    _STRING: lambda cursor, key, depth: cursor.text(key),
    _ARRAY: _read_array,
}


def _alignment(path: Path, config: dict[str, Any]) -> int:
    alignment = config.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    powers = (1 << n for n in range(3, _ALIGNMENT_LIMIT.bit_length()))
    if not isinstance(alignment, int) or alignment not in powers:
        reason = f"{_ALIGNMENT_KEY} is {alignment!r}; it must be a power of two from 8 to {_ALIGNMENT_LIMIT}"
        raise BadModelFile(path, reason)
    return alignment


# --- tensors --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Description:
    name: str
    shape: tuple[int, ...]
    format: Format
    offset: int  # from the start of the tensor data
    length: int


def _read_description(cursor: _Cursor) -> _Description:
    name = cursor.text("a tensor name", _NAME_LIMIT)
    count = cursor.number(_U32, name)
    if not 1 <= count <= _DIMENSION_LIMIT:
        cursor.fail(f"has {count} dimensions; 1 to {_DIMENSION_LIMIT} are possible", name)
    shape = tuple(cursor.number(_U64, name) for _ in range(count))[::-1]
    kind, offset = cursor.number(_U32, name), cursor.number(_U64, name)
    if kind not in BY_GGML_TYPE:
        known = ", ".join(format.upper() for format in FORMATS)
        cursor.fail(f"type {_OTHER_TYPES.get(kind, 'unknown')} ({kind}) is not supported, only {known}", name)
    format = BY_GGML_TYPE[kind]
    if 0 in shape or shape[-1] % format.block:
        blocks = f"rows of {shape[-1]} values are no whole number of blocks of {format.block}"
        cursor.fail(f"{format.name.upper()} {list(shape)}: {'a dimension is 0' if 0 in shape else blocks}", name)
    return _Description(name, shape, format, offset, math.prod(shape) // format.block * format.bytes)


def _views(file: MappedFile, described: list[_Description], header: int, alignment: int) -> dict[str, Tensor]:
    """header: where the tensor data begins, in bytes."""
    tensors: dict[str, Tensor] = {}
    for d in described:
        if d.name in tensors:
            raise BadModelFile(file.path, "occurs twice", tensor=d.name)
        if d.offset % alignment:
            raise BadModelFile(file.path, f"offset {d.offset} is no multiple of {alignment}", tensor=d.name)
        end = header + d.offset + d.length
        if end > file.size:
            reason = f"{d.length} bytes at offset {d.offset} end at byte {end}, but the file ends at {file.size}"
            raise BadModelFile(file.path, reason, tensor=d.name)
        tensors[d.name] = Tensor(d.name, d.shape, d.format, file.path, file.view(header + d.offset, d.length))
    _check_overlap(file.path, described)
    return tensors


def _check_overlap(path: Path, described: list[_Description]) -> None:
    ordered = sorted(described, key=lambda d: d.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.length > after.offset:
            reason = f"offset {after.offset} lies inside {before.name!r} ({before.length} bytes at {before.offset})"
            raise BadModelFile(path, reason, tensor=after.name)
