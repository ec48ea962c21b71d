"""A lexicon from a model folder as the Hugging Face hub lays it out.

Owes: ``tokenizer.json`` with ``tokenizer_config.json``, ``special_tokens_map.json``, ``generation_config.json`` and the
``chat_template`` files turned into a `Lexicon`. Added tokens are taken out of the file and found by `Splitter`, so
that text can be encoded with and without its control tokens by the same object. Source: huggingface/tokenizers (file
format), transformers (file names).
Does not know: downloading, GGUF.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.base.errors import BadModelFile
from headrace.text.bytelevel import library_encoder, text_bytes
from headrace.text.lexicon import AddedToken, Lexicon, end_ids, looks_like_control
from headrace.text.sentencepiece import SPACE

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_BYTE_TEXT = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE_KINDS = ("Metaspace", "Replace", "ByteFallback")


@dataclass(frozen=True)
class _Files:
    """The JSON files of a folder; {} for one that is not there."""

    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]
    special: Mapping[str, Any]
    generation: Mapping[str, Any]
    model: Mapping[str, Any]


def lexicon_from_folder(folder: Path) -> Lexicon:
    """The lexicon that a model folder describes. Raises BadModelFile."""
    if not (folder / "tokenizer.json").is_file():
        raise BadModelFile(folder, "has no tokenizer.json; save the model's fast tokenizer into it (save_pretrained)")
    files = _Files(
        _read(folder / "tokenizer.json"),
        _read(folder / "tokenizer_config.json"),
        _read(folder / "special_tokens_map.json"),
        _read(folder / "generation_config.json"),
        _read(folder / "config.json"),
    )
    try:
        return _lexicon(folder, files)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadModelFile(folder / "tokenizer.json", f"has an unexpected layout: {error!r}") from error


def _lexicon(folder: Path, files: _Files) -> Lexicon:
    library, first_space = _library(folder / "tokenizer.json", files.tokenizer)
    added = _added(files.tokenizer)
    ids: dict[str, int] = library.get_vocab() | {token.text: token.id for token in added}
    names = _names(files)
    bos, eos = (ids.get(names.get(role, "")) for role in ("bos_token", "eos_token"))
    prefix, suffix = _around(files, bos)
    declared = files.generation.get("eos_token_id", files.model.get("eos_token_id"))
    stops = end_ids(ids, [eos, *(declared if isinstance(declared, list) else [declared])])
    size = max(ids.values()) + 1
    return Lexicon(
        size=size,
        encode=library_encoder(library),
        token_bytes=_token_bytes(folder, files.tokenizer, library, added),
        added=_mark_ends(added, stops),
        bos_id=bos,
        eos_id=eos,
        stop_ids=frozenset(id for id in stops if 0 <= id < size),
        prefix=prefix,
        suffix=suffix,
        strip_space=_strips_space(files.tokenizer),
        first_space=first_space,
        names=names,
        templates=_templates(folder, files.config),
    )


def _library(path: Path, tokenizer: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """The library's tokenizer without added tokens and post-processor, and whether a first space was taken out of it.

    A "first" space means the first piece of the whole text; the library, which gets pieces, cannot know that.
    """
    bare = {**tokenizer, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    first_space = False
    parts = bare["pre_tokenizer"] = json.loads(json.dumps(tokenizer.get("pre_tokenizer")))
    for part in _flat(parts):
        if part["type"] == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"], first_space = "never", True
    try:
        return Tokenizer.from_str(json.dumps(bare, ensure_ascii=False)), first_space
    except Exception as error:  # the library raises bare Exception
        raise BadModelFile(path, f"is not a tokenizer that the tokenizers library reads: {error}") from error


def _added(tokenizer: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    return tuple(
        AddedToken(
            token["id"],
            token["content"],
            bool(token.get("special")) or looks_like_control(token["content"]),
            bool(token.get("lstrip")),
            bool(token.get("rstrip")),
        )
        for token in tokenizer.get("added_tokens") or ()
        if token["content"]
    )


def _mark_ends(added: tuple[AddedToken, ...], stops: frozenset[int]) -> tuple[AddedToken, ...]:
    return tuple(
        AddedToken(token.id, token.text, token.control or token.id in stops, token.lstrip, token.rstrip)
        for token in added
    )


def _flat(part: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The steps of a pre-tokenizer, decoder or post-processor, sequences opened up."""
    if not part:
        return
    inner = next((part[key] for key in ("pretokenizers", "decoders", "processors", "normalizers") if key in part), None)
    if inner is None:
        yield part if isinstance(part, dict) else dict(part)
    for step in inner or ():
        yield from _flat(step)


def _token_bytes(
    folder: Path, tokenizer: Mapping[str, Any], library: Tokenizer, added: tuple[AddedToken, ...]
) -> Callable[[int], bytes]:
    texts = {id: text for text, id in library.get_vocab().items()}
    plain = {token.id: token.text for token in added}
    control = frozenset(token.id for token in added if token.control)
    decoders = [step["type"] for step in _flat(tokenizer.get("decoder"))]
    steps = decoders or [step["type"] for step in _flat(tokenizer.get("pre_tokenizer"))]

    def byte_level(id: int) -> bytes:
        return plain[id].encode("utf-8") if id in plain else text_bytes(texts.get(id, ""))

    def spaced(id: int) -> bytes:
        text = plain.get(id) or texts.get(id, "")
        if id not in plain and (match := _BYTE_TEXT.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return (text if id in control else text.replace(SPACE, " ")).encode("utf-8")

    if "ByteLevel" in steps:
        return byte_level
    if any(kind in steps for kind in _SPACE_KINDS):
        return spaced
    raise BadModelFile(
        folder / "tokenizer.json", f"decoder {steps} is not supported; byte-level and SentencePiece kinds are"
    )


def _strips_space(tokenizer: Mapping[str, Any]) -> bool:
    steps = list(_flat(tokenizer.get("decoder")))
    if any(step["type"] == "Strip" and step.get("content") == " " and step.get("start") for step in steps):
        return True
    schemes = [step.get("prepend_scheme", "always") for step in steps if step["type"] == "Metaspace"]
    return any(scheme != "never" for scheme in schemes)


def _around(files: _Files, bos: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and after a text."""
    for step in _flat(files.tokenizer.get("post_processor")):
        if step["type"] == "TemplateProcessing":
            return _template_around(step)
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            return (int(step["cls"][1]),), (int(step["sep"][1]),)
    return ((bos,) if files.config.get("add_bos_token") and bos is not None else ()), ()


def _template_around(step: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sides: tuple[list[int], list[int]] = ([], [])
    after = 0
    for item in step["single"]:
        if "Sequence" in item:
            after = 1
        else:
            sides[after].extend(step["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return tuple(sides[0]), tuple(sides[1])


def _names(files: _Files) -> dict[str, str]:
    """Special tokens by role; each is a string or an object with its content."""
    found = {}
    for name in _NAMES:
        value = files.config.get(name) or files.special.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    declared = config.get("chat_template")
    found = {"default": declared} if isinstance(declared, str) else {}
    if isinstance(declared, list):
        found = {entry["name"]: entry["template"] for entry in declared}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _text(path)
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _text(folder / "chat_template.jinja")
    return found


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadModelFile(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFile(path, "must hold a JSON object")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFile(path, f"cannot be read: {error}") from error
