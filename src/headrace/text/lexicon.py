"""What a tokenizer is made of, as plain data: the hand-over from a file format to `Tokenizer`.

Owes: the record that `gguf` and `folder` fill, and which token texts end a turn or look like control tokens.
Does not know: where the parts came from, chat templates, streams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

# Texts that end a turn or a generation in published models (model cards and tokenizer_config.json files of the
# families).
END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|eos|>",
        "<|return|>",
        "<|call|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "<EOT>",
    }
)

# Tokens that open or close a turn although some files do not mark them as control tokens.
_CONTROL = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>｜]+｜>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT)\]|</?s>")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text before the rest is tokenized.

    control: only the system writes it (a turn marker, BOS); False for plain text that has a token of its own.
    lstrip, rstrip: the token swallows the white space on that side (tokenizer.json).
    """

    id: int
    text: str
    control: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class Lexicon:
    """Everything a `Tokenizer` is made of.

    size: ids are 0..size-1.
    encode: ids of a piece of text that holds no added token.
    token_bytes: the bytes of an id below `size`.
    prefix, suffix: ids that `encode` puts around a text when it adds special tokens.
    strip_space: one space at the start of a decoded sequence is the tokenizer's own, not the text's.
    first_space: a space is put before a text that has none at its start.
    names: special tokens by role (``"bos_token"`` -> ``"<s>"``), which templates may print.
    """

    size: int
    encode: Callable[[str], list[int]]
    token_bytes: Callable[[int], bytes]
    added: tuple[AddedToken, ...] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    stop_ids: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    strip_space: bool = False
    first_space: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)


def looks_like_control(text: str) -> bool:
    """Whether a token of this text marks a turn, whatever type its file gives it."""
    return text in END_TEXTS or _CONTROL.fullmatch(text) is not None


def end_ids(ids: Mapping[str, int], declared: Iterable[int | None]) -> frozenset[int]:
    """All ids that end a generation: those the model declares and those whose text says so.

    ids: token text -> id. Where a model has both ``<|return|>`` and ``<|call|>`` (the Harmony format of gpt-oss),
    ``<|end|>`` closes a message, not the generation.
    """
    texts = END_TEXTS - {"<|end|>"} if "<|return|>" in ids and "<|call|>" in ids else END_TEXTS
    return frozenset(i for i in declared if i is not None) | {ids[text] for text in texts if text in ids}
