"""Floor 4: how ops run. The seam that every back end fits; back ends are siblings and know nothing of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.base.formats import Format
from headrace.program import Layout, Program, Sampled, Step, WeightSource
from headrace.program.roof import Rates
from headrace.quant.blocks import Bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What an executor must be able to hold, fixed at load.

    tokens: rows of a step at most. sequences: at most. pages: of the KV cache, 32 tokens each.
    context: tokens of the longest sequence.
    vocab: ids that may be sampled (rows of the head beyond it are padding and never win).
    threads: 0 takes what the machine allows.
    slots: of 32 tokens each, of the layers with windows; 0: these lie in pages as all others do.
    """

    tokens: int
    sequences: int
    pages: int
    context: int
    vocab: int
    threads: int = 0
    slots: int = 0


class Executor(Protocol):
    """A program lowered for one device, with its weights and its KV cache. `run` is not re-entrant.

    weight_bytes: of the weights as they lie in memory. page_bytes, slot_bytes: of one KV page over all layers that lie
    in pages, and of one slot over the others.
    threads, isa: what it runs on, for people to read.
    """

    weight_bytes: int
    page_bytes: int
    slot_bytes: int
    threads: int
    isa: str

    def run(self, step: Step) -> Sampled: ...

    def page(self, page: int, slot: int = -1) -> list[memoryview]:
        """Views of all the bytes of a KV page, in an order that is always the same. No step may run that changes it.

        slot: where there are slots, the page's own.
        """
        ...

    def rates(self) -> Rates | None:
        """What the machine does at best, measured now: takes a moment. None where nobody knows."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """kv: the format that keys and values are kept in."""

    name: str
    kv: str

    def page_bytes(self, program: Program) -> int:
        """Bytes of one KV page over all layers, known before anything is loaded."""
        ...

    def window_bytes(self, program: Program) -> int:
        """What layers with windows have of that."""
        ...

    def weight_bytes(self, program: Program, layouts: Mapping[str, Layout]) -> int:
        """`Executor.weight_bytes` of weights that lie so in their file, by name; known before anything is loaded."""
        ...

    def encode(self, source: Format, format: Format, rows: Bytes) -> Bytes:
        """Rows of blocks, uint8 [n, row bytes], in another format: `quant.encode.recoded`, bit for bit."""
        ...

    def executor(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        beside: Executor | None = None,
        apart: bool = False,
    ) -> Executor:
        """beside: of the same back end, whose threads it uses too; one of the two runs at a time.

        They are of the same program then, and it uses that one's KV cache, unless it has one `apart`.
        """
        ...
