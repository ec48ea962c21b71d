"""A file mapped into memory, read-only: what every tensor is a view of.

Owes: bytes without a copy, and giving pages back to the system once they have been used. Does not know file formats.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.base.errors import BadModelFile, ModelNotFound

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """`buffer` is the mapping, `bytes` the same as uint8 [size]; arrays that view it keep it alive after `close`."""

    __slots__ = ("buffer", "bytes", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                if self.size == 0:
                    raise BadModelFile(path, "the file is empty")
                self.buffer = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFound(f"{path}: no such file") from None
        except (OSError, ValueError) as error:
            raise BadModelFile(path, f"cannot be read: {error}") from error
        self.bytes: Bytes = np.frombuffer(self.buffer, np.uint8)

    def view(self, start: int, length: int) -> Bytes:
        """uint8 [length] from byte `start` on; the caller has checked the bounds."""
        assert 0 <= start <= start + length <= self.size, (start, length, self.size)
        return self.bytes[start : start + length]

    def contains(self, view: Bytes) -> bool:
        return _address(self.bytes) <= _address(view) <= _address(self.bytes) + self.size - view.nbytes

    def release(self, view: Bytes) -> None:
        """Drop the pages under `view` from memory; whoever looks again reads them from the file again."""
        if view.nbytes == 0:
            return
        start = _address(view) - _address(self.bytes)
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.buffer.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
