"""Weight tables as data: which tensors of a file make up each of our weights.

A row says our name, the pieces that lie one under the other in it, and what each piece is called in a Hugging Face
checkpoint and in a GGUF file. Owes: the list of sources for one checkpoint. Does not read a byte of them.
Names: transformers' modelling files; ggml-org/llama.cpp, gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from headrace.models.config import Config
from headrace.models.keys import Keys
from headrace.program import Weight
from headrace.program.program import Split

Transform = Literal["", "plus_one", "neox"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that come from one tensor. rows: the name of their number (see `extents`). hf, gguf: names without ends.

    Transforms make up for what a format does to numbers: `plus_one` adds 1, `neox` parts interleaved rotary pairs.
    """

    rows: str
    hf: str
    gguf: str
    hf_transform: Transform = ""
    gguf_transform: Transform = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One of our weights. `{i}` in the name: one a layer. columns: "" for a vector. stacked: one an expert.

    optional: the flag of `Config` that says whether there is one; where the file doesn't say, the tensors do.
    """

    name: str
    columns: str
    pieces: tuple[Piece, ...]
    split: Split | None = None
    stacked: bool = False
    optional: Literal["", "attention_bias", "mlp_bias"] = ""


def vector(name: str, rows: str, hf: str, gguf: str, transform: Transform = "") -> Row:
    return Row(name, "", (Piece(rows, hf, gguf, hf_transform=transform),))


def matrix(name: str, columns: str, *pieces: Piece, split: Split | None = None, stacked: bool = False) -> Row:
    return Row(name, columns, pieces, split, stacked)


def bias(of: Row, flag: Literal["attention_bias", "mlp_bias"]) -> Row:
    """The bias of a matrix: the same pieces, under names that end in `bias`."""
    return replace(of, name=f"{of.name}.bias", columns="", split=of.split if of.split == "out" else None, optional=flag)


def interleaved(row: Row) -> Row:
    """The same weight where GGUF files have the rotary pairs of q and k side by side."""
    turned = ("attn_q", "attn_k")
    return replace(row, pieces=tuple(replace(p, gguf_transform="neox") if p.gguf in turned else p for p in row.pieces))


EMBED = matrix("embed", "dim", Piece("vocab", "embed_tokens", "token_embd"))
NORM = vector("norm", "dim", "norm", "output_norm")
HEAD = matrix("head", "dim", Piece("vocab", "lm_head", "output"), split="out")

ATTN_NORM = vector("{i}.attn.norm", "dim", "input_layernorm", "attn_norm")
Q_NORM = vector("{i}.attn.q_norm", "head", "self_attn.q_norm", "attn_q_norm")
K_NORM = vector("{i}.attn.k_norm", "head", "self_attn.k_norm", "attn_k_norm")
QKV = matrix(
    "{i}.attn.qkv",
    "dim",
    Piece("q", "self_attn.q_proj", "attn_q"),
    Piece("kv", "self_attn.k_proj", "attn_k"),
    Piece("kv", "self_attn.v_proj", "attn_v"),
    split="out",
)
O = matrix("{i}.attn.o", "q", Piece("dim", "self_attn.o_proj", "attn_output"), split="in")  # noqa: E741 - its name in papers
MLP_NORM = vector("{i}.mlp.norm", "dim", "post_attention_layernorm", "ffn_norm")
GATE_UP = matrix(
    "{i}.mlp.gate_up",
    "dim",
    Piece("hidden", "mlp.gate_proj", "ffn_gate"),
    Piece("hidden", "mlp.up_proj", "ffn_up"),
    split="out",
)
DOWN = matrix("{i}.mlp.down", "hidden", Piece("dim", "mlp.down_proj", "ffn_down"), split="in")

ENDS = (EMBED, NORM, HEAD)
ATTENTION = (ATTN_NORM, QKV, bias(QKV, "attention_bias"), O, bias(O, "attention_bias"))
MLP = (MLP_NORM, GATE_UP, bias(GATE_UP, "mlp_bias"), DOWN, bias(DOWN, "mlp_bias"))


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the file, or one expert's slice of it, as a piece of a weight. shape: the whole tensor's."""

    tensor: str
    shape: tuple[int, ...]
    transform: Transform = ""
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A weight and where its rows come from, in order. same_as: the weight whose storage it shares."""

    weight: Weight
    sources: tuple[Source, ...]
    same_as: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """All weights of one checkpoint by name, and what a user should be told about how they were found."""

    entries: dict[str, Entry]
    notes: tuple[str, ...]


def extents(c: Config) -> dict[str, int]:
    """The numbers that rows and columns are named by."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return {
        "vocab": c.vocab,
        "dim": c.dim,
        "head": c.head_dim,
        "q": q,
        "kv": kv,
        "qkv": q + 2 * kv,
        "hidden": c.hidden,
        "gate_up": 2 * c.hidden,
        "experts": c.experts,
    }


PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""Where the decoder lies in a Hugging Face checkpoint: alone, or as the text half of a larger model."""


def hf_prefix(keys: Keys) -> str:
    return next((p for p in PREFIXES if f"{p}embed_tokens.weight" in keys.shapes), PREFIXES[0])


def _heads(keys: Keys) -> tuple[str, ...]:
    return ("output.weight",) if keys.gguf else ("lm_head.weight", "language_model.lm_head.weight")


def _tensor(keys: Keys, row: Row, piece: Piece, i: int) -> str:
    end = "bias" if row.name.endswith(".bias") else "weight"
    layered = "{i}" in row.name
    if keys.gguf:
        return f"blk.{i}.{piece.gguf}.{end}" if layered else f"{piece.gguf}.{end}"
    prefix = hf_prefix(keys)
    return f"{prefix}layers.{i}.{piece.hf}.{end}" if layered else f"{prefix}{piece.hf}.{end}"


def _sources(keys: Keys, c: Config, row: Row, i: int) -> Iterator[Source]:
    sizes = extents(c)
    for e in range(c.experts) if row.stacked else (None,):
        for piece in row.pieces:
            shape = (sizes[piece.rows], sizes[row.columns]) if row.columns else (sizes[piece.rows],)
            transform = piece.gguf_transform if keys.gguf else piece.hf_transform
            name = _tensor(keys, row, piece, i)
            if e is None or not keys.gguf:
                yield Source(name.replace("{e}", str(e)), shape, transform)
            else:
                yield Source(name, (c.experts, *shape), transform, expert=e)


def _weight(c: Config, row: Row, name: str) -> Weight:
    sizes = extents(c)
    rows = sum(sizes[p.rows] for p in row.pieces)
    shape = (rows, sizes[row.columns]) if row.columns else (rows,)
    return Weight(name, (c.experts, *shape) if row.stacked else shape, row.split)


def _wanted(keys: Keys, c: Config, row: Row, notes: list[str]) -> bool:
    """Whether an optional row is there: the file's flag says so, or its tensors do."""
    if not row.optional:
        return True
    flag = getattr(c, row.optional)
    there = any(s.tensor in keys.shapes for i in range(c.layers) for s in _sources(keys, c, row, i))
    if there and flag is False:
        notes.append(f"{row.optional} is false, yet the file has {row.name.format(i=0)}: it is used")
    return bool(flag) or there


def _head(keys: Keys, c: Config, embed: Entry, notes: list[str]) -> Entry:
    weight = Weight("head", (c.vocab, c.dim), "out")
    present = next((name for name in _heads(keys) if name in keys.shapes), None)
    if present is None and c.tied is not False:
        return Entry(weight, embed.sources, same_as="embed")
    if present and c.tied:
        notes.append(f"tie_word_embeddings is true, yet the file has {present!r}: it is used as the head")
    return Entry(weight, (Source(present or _heads(keys)[0], weight.shape),))


def lay_out(keys: Keys, c: Config, rows: Iterable[Row]) -> Table:
    """Resolves a table of rows against one checkpoint."""
    entries: dict[str, Entry] = {}
    notes: list[str] = []
    for row in rows:
        if row is HEAD:
            entries["head"] = _head(keys, c, entries["embed"], notes)
        elif _wanted(keys, c, row, notes):
            for i in range(c.layers if "{i}" in row.name else 1):
                name = row.name.format(i=i)
                entries[name] = Entry(_weight(c, row, name), tuple(_sources(keys, c, row, i)))
    return Table(entries, tuple(notes))


# What the tensors of a layer are called by any of the supported architectures.
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.(.+)\.(weight|bias)$")
_EXPERT = re.compile(r"experts\.\d+\.")
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|masked_bias$|attn\.bias$|^rope_freqs\.weight$")
_OTHER_HALF = re.compile(r"(^|\.)(vision_tower|vision_model|multi_modal_projector|audio_tower)\.")


def leftovers(names: Iterable[str], table: Table, known: frozenset[str]) -> tuple[list[str], list[str]]:
    """Tensors that nothing uses: (those that a model cannot do without, those that only deserve a warning).

    known: the pieces' names of every architecture: if one of them is left over, this model is not what its config says.
    """
    used = {s.tensor for entry in table.entries.values() for s in entry.sources}
    fatal: list[str] = []
    stray: list[str] = []
    for name in names:
        if name in used or _HARMLESS.search(name) or _OTHER_HALF.search(name):
            continue
        layer = _LAYER.search(name)
        needed = layer is not None and (layer[3] == "bias" or _EXPERT.sub("experts.{e}.", layer[2]) in known)
        (fatal if needed or name.endswith(".bias") else stray).append(name)
    return fatal, stray
