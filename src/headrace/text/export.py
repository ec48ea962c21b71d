"""The tokenizer of a model folder as GGUF metadata: what `headrace.text.gguf` and llama.cpp read.

Owes: ``tokenizer.ggml.*`` and the chat templates from ``tokenizer.json`` and its neighbours, tried on a text that holds
what tokenizers differ in: a tokenizer whose ids would not be the same is refused. Source: the GGUF specification
(ggml-org/ggml, docs/gguf.md).
Does not know: how the file is written, what the model is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import BadModelFile
from headrace.text.bytelevel import PRE, Pre, byte_level_encoder
from headrace.text.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BYTE_TEXT = re.compile("<0x[0-9A-Fa-f]{2}>")
_ROLES = {"unk_token": "unknown", "pad_token": "padding"}  # bos and eos are known by number
_LEAST = -1e6  # the score of a token that no merge gives

PROBE = (
    "Hello, World!  It's 3.14159 or 1234567890; WE'LL don't IT'S you'Re\n\n\n  indented\tTAB \r\n"
    "naïve café ÆØÅ straße İstanbul Ωmega дом שלום مرحبا 東京 カタカナ ひらがな 한국어 ไทย ٣٤٥ ½ ² 👩‍👩‍👧 🙂🙂\n"
    "def f(x):\n        return x**2 + a[i]==b->c // !!! ??? ... --- $5.00 #tag @me <b>HTML</b> &amp; \\n `q` ~^|\n"
    "CamelCaseHTTPServer snake_case 0xDEADBEEF 1,000 1st 2nd x86_64 e.g. i.e. http://a.b/c?d=e%20f \u00a0\u3000 end "
)


def tokenizer_metadata(folder: Path, rows: int) -> dict[str, Any]:
    """The metadata of a folder's tokenizer. rows: of the embedding; ids without a token are filled up.

    BadModelFile for a tokenizer that GGUF has no words for, or that would not give the same ids.
    """
    ours = Tokenizer.from_folder(folder)
    file = _read(folder / "tokenizer.json")
    model = file.get("model") or {}
    if model.get("type") != "BPE":
        raise BadModelFile(
            folder / "tokenizer.json", f"a tokenizer of type {model.get('type')!r} cannot be written as GGUF; BPE can"
        )
    if ours.vocab_size > rows:
        raise BadModelFile(folder, f"its tokenizer has {ours.vocab_size} tokens, its embedding {rows} rows")
    tokens, types = _tokens(file, rows)
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    kind = _scored if model.get("byte_fallback") or "▁" in model["vocab"] else _byte_level
    found = {**kind(ours, tokens, types, merges), **_special(ours), **_templates(ours)}
    if Tokenizer.from_gguf(found).encode(PROBE) != ours.encode(PROBE):
        raise BadModelFile(folder / "tokenizer.json", "cuts text in a way that GGUF has no name for")
    return found


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))  # `Tokenizer` has read it before
    return found


def _tokens(file: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Tokens and their types by id."""
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [_UNUSED] * rows
    bytes_ = bool(file["model"].get("byte_fallback"))
    for text, id in file["model"]["vocab"].items():
        tokens[id], types[id] = text, _BYTE if bytes_ and _BYTE_TEXT.fullmatch(text) else _NORMAL
    for added in file.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added.get("special") else _USER_DEFINED
    if (unknown := file["model"].get("unk_token")) in tokens:
        types[tokens.index(unknown)] = _UNKNOWN
    return tokens, types


Kind = Callable[[Tokenizer, list[str], list[int], Sequence[tuple[str, ...]]], dict[str, Any]]


def _byte_level(
    ours: Tokenizer, tokens: list[str], types: list[int], merges: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    ids = {token: i for i, token in enumerate(tokens)}
    joined = [" ".join(pair) for pair in merges]
    wanted = ours.encode(PROBE, add_special_tokens=False, parse_special=False)
    tried: dict[str, Pre] = {}
    for name in sorted(PRE, key=lambda name: name == "default"):
        if PRE[name] not in tried.values():
            tried[name] = PRE[name]
            if byte_level_encoder(ids, joined, PRE[name])(PROBE) == wanted:
                break
    else:
        raise BadModelFile("tokenizer.json", f"cuts words like none of {', '.join(PRE)}: GGUF has no name for it")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": joined,
    }


def _scored(ours: Tokenizer, tokens: list[str], types: list[int], merges: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """A token scores by the first merge that gives it: what merges first, scores best."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(ranks[token]) if token in ranks else _LEAST for token in tokens],
        "tokenizer.ggml.add_space_prefix": ours.strips_space,
    }


def _special(ours: Tokenizer) -> dict[str, Any]:
    around = ours.encode("")
    found: dict[str, Any] = {
        "tokenizer.ggml.add_bos_token": ours.bos_id is not None and around[:1] == [ours.bos_id],
        "tokenizer.ggml.add_eos_token": ours.eos_id is not None and around[-1:] == [ours.eos_id] != around[:1],
    }
    numbered = {"bos": ours.bos_id, "eos": ours.eos_id}
    for name, role in _ROLES.items():
        if (text := ours.names.get(name)) in ours.control_texts:
            numbered[role] = next(iter(ours.encode(str(text), add_special_tokens=False)), None)
    others = sorted(ours.stop_ids - {ours.eos_id})
    if others:
        numbered["eot"] = others[0]
    return found | {f"tokenizer.ggml.{role}_token_id": id for role, id in numbered.items() if id is not None}


def _templates(ours: Tokenizer) -> dict[str, Any]:
    named = {name: text for name, text in ours.chat_templates.items() if name != "default"}
    found: dict[str, Any] = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    if named:
        found["tokenizer.chat_templates"] = sorted(named)
    if ours.chat_template:
        found["tokenizer.chat_template"] = ours.chat_template
    return found
