"""A lexicon from the metadata of a GGUF file.

Owes: ``tokenizer.ggml.*`` and ``tokenizer.chat_template*`` checked and turned into a `Lexicon`; a file that is wrong
or of a kind that is not supported is refused by name. Source of keys and token types: the GGUF specification
(ggml-org/ggml, docs/gguf.md).
Does not know: how the file is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.errors import BadModelFile
from headrace.text.bytelevel import PRE, byte_level_encoder, text_bytes
from headrace.text.lexicon import AddedToken, Lexicon, end_ids, looks_like_control
from headrace.text.sentencepiece import SPACE, ScoredBpe

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ROLES = ("bos", "eos", "unknown", "padding")
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_BYTE_TEXT = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class _Table:
    """The vocabulary as the file holds it, cut to the ids in use. types: by id, int. special: role -> id."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    special: Mapping[str, int]
    added: tuple[AddedToken, ...]


def lexicon_from_gguf(metadata: Mapping[str, Any]) -> Lexicon:
    """The lexicon that a GGUF file's metadata describes. Raises BadModelFile."""
    kind = _need(metadata, "model", str)
    build = _KINDS.get(kind)
    if build is None:
        raise _bad(f"tokenizer.ggml.model is {kind!r}; supported are {', '.join(sorted(_KINDS))}")
    return build(metadata, _table(metadata))


def _byte_level(metadata: Mapping[str, Any], table: _Table) -> Lexicon:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    pre = PRE.get(name)
    if pre is None:
        raise _bad(f"tokenizer.ggml.pre is {name!r}, which is not known here; known are {', '.join(sorted(PRE))}")
    merges = _need(metadata, "merges", list)
    try:
        encode = byte_level_encoder(table.ids, merges, pre)
    except ValueError as error:
        raise _bad(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    plain = frozenset(token.id for token in table.added)
    tokens = table.tokens

    def token_bytes(id: int) -> bytes:
        return tokens[id].encode("utf-8", "replace") if id in plain else text_bytes(tokens[id])

    return _lexicon(metadata, table, encode, token_bytes, add_bos=pre.bos)


def _scored(metadata: Mapping[str, Any], table: _Table) -> Lexicon:
    scores: list[float] = np.asarray(_need(metadata, "scores", list), np.float64)[: len(table.tokens)].tolist()
    if len(scores) != len(table.tokens) or not np.isfinite(scores).all():
        raise _bad("tokenizer.ggml.scores must hold one finite number a token")
    types, tokens = table.types, table.tokens
    mergeable = table.ids
    if set(types) - {_NORMAL}:
        mergeable = {token: i for token, i in table.ids.items() if types[i] == _NORMAL}
    bytes_ = _byte_ids(table)
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    encode = ScoredBpe(mergeable, scores, bytes_, table.special.get("unknown"), space)
    byte_of = {id: bytes([byte]) for byte, id in enumerate(bytes_)}

    def token_bytes(id: int) -> bytes:
        if (byte := byte_of.get(id)) is not None:
            return byte
        text = tokens[id] if types[id] == _CONTROL else tokens[id].replace(SPACE, " ")
        return text.encode("utf-8", "replace")

    return _lexicon(metadata, table, encode, token_bytes, add_bos=True, strip_space=space)


_KINDS: Mapping[str, Callable[[Mapping[str, Any], _Table], Lexicon]] = {"gpt2": _byte_level, "llama": _scored}


def _lexicon(
    metadata: Mapping[str, Any],
    table: _Table,
    encode: Callable[[str], list[int]],
    token_bytes: Callable[[int], bytes],
    *,
    add_bos: bool,
    strip_space: bool = False,
) -> Lexicon:
    bos, eos = table.special.get("bos"), table.special.get("eos")
    ends = [_special_id(metadata, role, len(table.tokens)) for role in ("eos", "eot", "eom")]
    with_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos) and bos is not None
    with_eos = metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None
    return Lexicon(
        size=len(table.tokens),
        encode=encode,
        token_bytes=token_bytes,
        added=table.added,
        bos_id=bos,
        eos_id=eos,
        stop_ids=end_ids(table.ids, ends),
        prefix=(bos,) if with_bos and bos is not None else (),
        suffix=(eos,) if with_eos and eos is not None else (),
        strip_space=strip_space,
        names={_NAMES[role]: table.tokens[id] for role, id in table.special.items()},
        templates=_templates(metadata),
    )


def _table(metadata: Mapping[str, Any]) -> _Table:
    tokens = list(_need(metadata, "tokens", list))
    types = np.asarray(metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)))
    if len(types) != len(tokens) or types.ndim != 1 or types.dtype.kind not in "iu":
        raise _bad("tokenizer.ggml.token_type must hold one integer a token")
    used = np.flatnonzero(types != _UNUSED)
    size = int(used[-1]) + 1 if len(used) else 0
    if size == 0 or not all(isinstance(token, str) for token in tokens):
        raise _bad("tokenizer.ggml.tokens must be a list of strings, not empty")
    tokens, types = tokens[:size], types[:size]
    ids = dict(zip(tokens, range(size), strict=True))
    special = {role: id for role in _ROLES if (id := _special_id(metadata, role, size)) is not None}
    return _Table(tokens, types.tolist(), ids, special, _added(tokens, types, ids, special))


def _added(
    tokens: list[str], types: np.ndarray[Any, Any], ids: Mapping[str, int], special: Mapping[str, int]
) -> tuple[AddedToken, ...]:
    """Tokens to find before tokenizing: those of control and user-defined type, and turn markers of any type."""
    control = set(np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist())
    control |= {special[role] for role in ("bos", "eos") if role in special} | end_ids(ids, ())
    chosen = control | set(np.flatnonzero(types == _USER_DEFINED).tolist())
    return tuple(
        AddedToken(id, tokens[id], id in control or looks_like_control(tokens[id]))
        for id in sorted(chosen)
        if tokens[id]
    )


def _byte_ids(table: _Table) -> list[int]:
    """Ids of the byte tokens in the order of their bytes; [] unless all 256 are there."""
    found = {}
    for id in np.flatnonzero(np.asarray(table.types) == _BYTE).tolist():
        if match := _BYTE_TEXT.fullmatch(table.tokens[id]):
            found[int(match[1], 16)] = id
    return [found[byte] for byte in range(256)] if len(found) == 256 else []


def _special_id(metadata: Mapping[str, Any], role: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _bad(f"{key} must be an integer, not {value!r}")
    if 0 <= value < size:
        return int(value)
    if int(value) in (-1, 0xFFFFFFFF):  # how files say "none"
        return None
    raise _bad(f"{key} is {value}, but the vocabulary has {size} tokens")


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    head = "tokenizer.chat_template"
    named = [(key.removeprefix(head), text) for key, text in metadata.items() if key.startswith(head)]
    return {name[1:] or "default": text for name, text in named if isinstance(text, str) and name[:1] in ("", ".")}


def _need(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    fits = isinstance(value, list | tuple | np.ndarray) if kind is list else isinstance(value, kind)
    if not fits:
        raise _bad(f"tokenizer.ggml.{name} is {'missing' if value is None else 'of the wrong type'}")
    return value


def _bad(reason: str) -> BadModelFile:
    return BadModelFile("GGUF metadata", reason)
