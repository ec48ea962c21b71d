"""Element and block formats of weights: how many values share a block, and how many bytes a block takes.

Names and type numbers are those of the GGUF specification (ggml-org/ggml, docs/gguf.md).
Block layouts are described where they are unpacked: `headrace.quant.blocks` is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """One way to store numbers.

    name: lower case, as in ``"q4_1"``.
    block: values in a block (1 for plain numbers).
    bytes: bytes a block takes.
    ggml_type: the type number in a GGUF file; -1 for what GGUF doesn't have.
    """

    name: str
    block: int
    bytes: int
    ggml_type: int

    @property
    def bits(self) -> float:
        """Bits a value takes, scales included."""
        return 8 * self.bytes / self.block

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values; the caller has checked that whole blocks fill it."""
        return columns // self.block * self.bytes


_ALL = (
    Format("f32", 1, 4, 0),
    Format("f16", 1, 2, 1),
    Format("q4_0", 32, 18, 2),
    Format("q4_1", 32, 20, 3),
    Format("q5_0", 32, 22, 6),
    Format("q5_1", 32, 24, 7),
    Format("q8_0", 32, 34, 8),
    Format("q4_k", 256, 144, 12),
    Format("q5_k", 256, 176, 13),
    Format("q6_k", 256, 210, 14),
    Format("bf16", 1, 2, 30),
)

FORMATS: dict[str, Format] = {f.name: f for f in _ALL}
"""What weights of GGUF files are made of."""
Q4_Z = Format("q4_z", 32, 19, -1)
"""Four bits with a zero point of their own, in which other libraries' checkpoints are kept exactly."""
COMPUTED: dict[str, Format] = {**FORMATS, Q4_Z.name: Q4_Z}
"""What back ends compute with."""
INTEGERS: dict[str, Format] = {name: Format(name, 1, size, -1) for name, size in (("i8", 1), ("i32", 4), ("i64", 8))}
"""Parts of packed weights, which say nothing alone."""
BY_GGML_TYPE: dict[int, Format] = {f.ggml_type: f for f in _ALL}

F32, F16, BF16 = FORMATS["f32"], FORMATS["f16"], FORMATS["bf16"]
FLOATS = (F32, F16, BF16)
ENCODED = ("q8_0", "q6_k", "q5_0", "q4_k", "q4_1", "q4_0")  # into which floats can be quantised
