"""A checkpoint: metadata, and tensors as views of mapped files, whether it came as GGUF or as a safetensors folder.

Owes: one shape for both kinds. Does not know how they are read, what the tensors mean, or who computes with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from os.path import samestat
from pathlib import Path
from typing import Any, Literal

from headrace.base.formats import Format
from headrace.weights.mapped import Bytes, MappedFile

Kind = Literal["gguf", "safetensors"]

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A named array of a checkpoint, not yet unpacked.

    shape: numpy's order, rows (out) first and columns (in) last; the dimensions of a GGUF file reversed.
    data: uint8 [bytes of the tensor], a read-only view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    file: Path
    data: Bytes

    @property
    def stored(self) -> tuple[Bytes, ...]:
        """Where it lies in mapped files."""
        return (self.data,)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the files."""
        return sum(data.nbytes for data in self.stored)

    def rows(self) -> Bytes:
        """uint8 [product of all dimensions but the last, bytes a row]; still a view."""
        columns = self.shape[-1] if self.shape else 1
        width = self.format.row_bytes(columns)
        return self.data.reshape(self.data.size // width if width else 0, width)


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensor(Tensor):
    """A matrix that a file holds in several parts: quants, scales, perhaps zero points.

    data: of the part that is largest. unpack: makes the rows in `format`, anew each time.
    """

    parts: Mapping[str, Tensor]
    unpack: Callable[[Mapping[str, Tensor]], Bytes]

    @property
    def stored(self) -> tuple[Bytes, ...]:
        return tuple(part.data for part in self.parts.values())

    def rows(self) -> Bytes:
        return self.unpack(self.parts)


class Checkpoint:
    """What a model is made from.

    kind: ``"gguf"`` or ``"safetensors"``.
    path: the file given (the first of a split set), or the folder.
    config: the metadata of a GGUF file as it is, or the parsed config.json.
    tensors: by name, in the order of the file.
    generation: the parsed generation_config.json, or empty.
    scheme: how matrices of several parts are quantised, for people to read; "" where there are none.
    """

    scheme = ""

    def __init__(
        self,
        kind: Kind,
        path: Path,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        files: Sequence[tuple[MappedFile, int]],
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        """files: each mapped file with the length of its header in bytes (of JSON: all of it)."""
        self.kind: Kind = kind
        self.path = path
        self.config = config
        self.tensors = tensors
        self.generation: Mapping[str, Any] = generation or {}
        self._files = tuple(files)

    def reads(self, path: Path) -> bool:
        """Whether `path` is one of its files, by whatever name."""
        try:
            found = path.stat()
            return any(samestat(found, file.path.stat()) for file, _ in self._files)
        except OSError:
            return False

    @cached_property
    def fingerprint(self) -> str:
        """A cheap, stable identity, 64 hex digits: headers, sizes and a sample of the weights' bytes, hashed.

        Two models of one shape differ in the sample; a change of a few weights that the sample misses is not seen.
        """
        digest = hashlib.sha256()
        for file, header in self._files:
            digest.update(b"%d:%d:" % (file.size, header))
            digest.update(file.view(0, header).data)
        for tensor in list(self.tensors.values())[:: max(1, len(self.tensors) // _SAMPLES)]:
            for data in tensor.stored:
                middle = data.size // 2
                digest.update(data[middle : middle + _SAMPLE_BYTES].data)
        return digest.hexdigest()

    def understood(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], scheme: str) -> Checkpoint:
        """The same files with parts put together: what they are in the words of plain checkpoints."""
        made = Checkpoint(self.kind, self.path, config, tensors, self._files, self.generation)
        made.scheme = scheme
        return made

    def digest(self) -> str:
        """Of every byte, 64 hex digits: reads all files, on all cores."""
        with ThreadPoolExecutor() as threads:
            pieces = threads.map(_digest, *zip(*self._pieces(), strict=True))
            return hashlib.sha256(b"".join(pieces)).hexdigest()

    def _pieces(self) -> list[tuple[MappedFile, int]]:
        return [(file, at) for file, _ in self._files for at in range(0, file.size, _PIECE)]

    def release(self, tensor: Tensor) -> None:
        """Drop the tensor's pages from memory once it has been repacked; its view stays valid and reads the file."""
        for data in tensor.stored:
            file = next((file for file, _ in self._files if file.contains(data)), None)
            if file:
                file.release(data)

    def close(self) -> None:
        """Forget everything read; arrays that somebody still holds keep their mapping alive."""
        self.config = {}
        self.tensors = {}
        self._files = ()


def _digest(file: MappedFile, start: int) -> bytes:
    piece = file.view(start, min(_PIECE, file.size - start))
    digest = hashlib.sha256(piece.data).digest()
    file.release(piece)
    return digest
