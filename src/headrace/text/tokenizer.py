"""Text to token ids and back.

Owes: ids that equal the model's reference tokenizer, the true bytes of each token, and a way to encode a chat in which
the caller's text cannot become a control token. Safe to share between threads.
Does not know: requests, streams, how templates render.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.base.errors import RequestError
from headrace.text.added import Splitter
from headrace.text.folder import lexicon_from_folder
from headrace.text.gguf import lexicon_from_gguf
from headrace.text.lexicon import Lexicon
from headrace.text.rendered import Rendered
from headrace.text.sentencepiece import SPACE


class Tokenizer:
    """Encodes and decodes; made by `from_gguf` or `from_folder`.

    vocab_size: ids are 0..vocab_size-1; padding at the end of a model's embedding is not counted.
    stop_ids: every id that ends a generation. special_ids: every control token.
    prefix: ids before every text that is a prompt of its own, such as BOS.
    control_texts: the texts of control tokens. names: special tokens by role, as templates print them.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        self.vocab_size = lexicon.size
        self.bos_id, self.eos_id, self.stop_ids = lexicon.bos_id, lexicon.eos_id, lexicon.stop_ids
        self.prefix = tuple(lexicon.prefix)
        control = [token for token in lexicon.added if token.control]
        self.special_ids = frozenset(token.id for token in control)
        self.control_texts = frozenset(token.text for token in control)
        self.names: Mapping[str, str] = lexicon.names
        self.chat_templates: Mapping[str, str] = lexicon.templates
        self.chat_template = lexicon.templates.get("default")
        self.strips_space = lexicon.strip_space
        self._by_text = {token.text: token for token in control}
        self.control = Splitter(control)
        self._all = Splitter(lexicon.added)
        self._plain = Splitter(token for token in lexicon.added if not token.control)
        self._bytes: dict[int, bytes] = {}

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file (key -> value). Raises BadModelFile."""
        return Tokenizer(lexicon_from_gguf(metadata))

    @staticmethod
    def from_folder(folder: Path) -> Tokenizer:
        """From a model folder with a tokenizer.json. Raises BadModelFile."""
        return Tokenizer(lexicon_from_folder(folder))

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        add_special_tokens: add BOS and EOS where the model wants them; a BOS that the text already has is not doubled.
        parse_special: read control-token text as control tokens; otherwise it is text like any other.
        Raises RequestError for text that is not Unicode (lone surrogates).
        """
        _check(text)
        ids = list(self._pieces(text, self._all if parse_special else self._plain, True))
        return self._with_special(ids) if add_special_tokens else ids

    def encode_chat(self, rendered: Rendered, add_special_tokens: bool = False) -> list[int]:
        """The ids of a rendered chat: control tokens in the template's own spans only; templates write BOS themselves.

        White space that a control token swallows is swallowed as in `encode`. Raises RequestError for lone surrogates.
        """
        text = rendered.text
        _check(text)
        edges = [0, *(edge for span in rendered.spans for edge in span), len(text)]
        ids: list[int] = []
        swallow = False
        for n, (start, end) in enumerate(pairwise(edges)):
            if n % 2:
                token = self._by_text[text[start:end]]
                ids.append(token.id)
                swallow = token.rstrip
                continue
            following = self._by_text.get(text[end : edges[n + 2]]) if n + 2 < len(edges) else None
            piece = text[start:end].lstrip() if swallow else text[start:end]
            piece = piece.rstrip() if following and following.lstrip else piece
            ids.extend(self._pieces(piece, self._plain, start == 0))
        return self._with_special(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(id) for id in ids if id not in skip)
        if self.strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The true bytes of a token; a special token's text in UTF-8; nothing for an id outside the vocabulary."""
        if (known := self._bytes.get(id)) is not None:
            return known
        found = self._lexicon.token_bytes(id) if 0 <= id < self.vocab_size else b""
        self._bytes[id] = found
        return found

    def differing(self, other: Tokenizer) -> Iterator[int]:
        """Ids that both have, and that stand for other bytes in `other`."""
        ours, theirs = self._lexicon.token_bytes, other._lexicon.token_bytes
        return (id for id in range(min(self.vocab_size, other.vocab_size)) if ours(id) != theirs(id))

    def token_text(self, id: int) -> str:
        """The token as text on its own; a token that is part of a character reads as U+FFFD (see `token_bytes`)."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def _pieces(self, text: str, splitter: Splitter, first: bool) -> Iterator[int]:
        encode = self._lexicon.encode
        for piece, token in splitter.split(text):
            if piece:
                space = first and self._lexicon.first_space and not piece.startswith((" ", SPACE))
                yield from encode(" " + piece if space else piece)
            if token:
                yield token.id
            first = False

    def _with_special(self, ids: list[int]) -> list[int]:
        prefix, suffix = self._lexicon.prefix, self._lexicon.suffix
        has_prefix = prefix and tuple(ids[: len(prefix)]) == prefix
        return [*(() if has_prefix else prefix), *ids, *suffix]


def _check(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X})"
        message = f"The text is not valid Unicode: {where}; send UTF-8 text."
        raise RequestError(message, code="invalid_unicode") from None
