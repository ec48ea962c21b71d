"""Model folders: ids equal those of the tokenizers library reading the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcases import SPACE
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from headrace.base.errors import BadModelFile
from headrace.text import Detokenizer, Tokenizer
from headrace.text.bytelevel import _alphabet


def byte_level() -> Library:
    library = Library(
        models.BPE({char: n for n, char in enumerate([*_alphabet().values(), "he", "hel"])}, [("h", "e"), ("he", "l")])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>", AddedToken("<|end|>", rstrip=True, special=True)])
    library.add_tokens([AddedToken("<tool>", normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 258), ("</s>", 259)]
    )
    return library


def spaced(scheme: str) -> Library:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), SPACE, *"abc", SPACE + "a", "bc"]
    ids = {word: n for n, word in enumerate(words)}
    library = Library(models.BPE(ids, [(SPACE, "a"), ("b", "c")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "legacy":
        library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        library.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
        library.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    library.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


KINDS = {
    "bytes": byte_level,
    **{scheme: lambda scheme=scheme: spaced(scheme) for scheme in ("first", "always", "legacy")},
}


def write(folder: Path, library: Library, **files: Any) -> Path:
    library.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(st.sampled_from([*"abchel ", "  ", "é", "\n", "<s>", "</s>", "<|end|>", "<tool>", "\U0001f33d"])).map(
        "".join
    )
)
def test_ids_equal_the_library(tmp_path_factory: pytest.TempPathFactory, kind: str, text: str) -> None:
    library = KINDS[kind]()
    tokenizer = Tokenizer.from_folder(write(tmp_path_factory.mktemp(kind), library))
    bare = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == bare
    if not text.startswith("<s>"):
        assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.decode(bare) == library.decode(bare, skip_special_tokens=False)
    stream = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(stream.push([i]) for i in bare) + stream.finish() == tokenizer.decode(bare)
    assert not set(tokenizer.encode(text, False, parse_special=False)) & tokenizer.special_ids


def test_special_tokens_and_templates(tmp_path: Path) -> None:
    write(
        tmp_path,
        byte_level(),
        tokenizer_config={
            "bos_token": {"content": "<s>"},
            "chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "T"}],
        },
        special_tokens_map={"eos_token": "</s>"},
        generation_config={"eos_token_id": [259, 65]},
    )
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (258, 259, 262)
    assert tokenizer.stop_ids == {259, 65, 260}
    assert tokenizer.special_ids == {258, 259, 260}
    assert tokenizer.chat_templates == {"default": "new", "tool_use": "T"}
    assert tokenizer.chat_template == "new"
    assert tokenizer.names == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("content", ["{", "[]", '{"model": {}}', '{"added_tokens": [{}]}', '{"added_tokens": 3}'])
def test_damaged_files_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadModelFile, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadModelFile):
        Tokenizer.from_folder(tmp_path)


def test_unsupported_kinds_are_refused_by_name(tmp_path: Path) -> None:
    library = Library(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(BadModelFile, match="WordPiece"):
        Tokenizer.from_folder(write(tmp_path, library))
