"""Byte-level BPE as GGUF files describe it: the byte alphabet, and how each `pre` kind cuts text into words.

Owes: a tokenizer for ``tokenizer.ggml.model = "gpt2"``. Sources: the byte alphabet of GPT-2 (openai/gpt-2, encoder.py);
the word patterns of the models' published tokenizer.json files, under the names that GGUF gives them
(ggml-org/llama.cpp).
Does not know: added tokens, chat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+", r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_TEKKEN = "|".join((*_CASED, r"\p{N}", _CASED_TAIL))
_GPT4O = "|".join((*(cased + _CONTRACTIONS + "?" for cased in _CASED), r"\p{N}{1,3}", _CASED_TAIL))
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    _ASCII_PUNCTUATION
    + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Pre:
    """How text is cut into words before merging.

    cuts: patterns applied one after another; each match is a word of its own, so is what lies between.
    gpt2: whether GPT-2's own pattern comes last.
    whole: a word that is itself a token is taken as that token, without merging.
    bos: whether BOS is added when the file does not say.
    """

    cuts: tuple[str, ...] = ()
    gpt2: bool = False
    whole: bool = False
    bos: bool = False


_GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = Pre(gpt2=True)
_DIGITS = Pre((r"\p{N}",), gpt2=True)

PRE: Mapping[str, Pre] = {
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_CUT, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "jais": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_CUT, r"[0-9][0-9][0-9]")),
    "llama-bpe": Pre((_LLAMA3,), whole=True, bos=True),
    "llama3": Pre((_LLAMA3,), whole=True, bos=True),
    "llama-v3": Pre((_LLAMA3,), whole=True, bos=True),
    "dbrx": Pre((_LLAMA3,)),
    "smaug-bpe": Pre((_LLAMA3,)),
    "qwen2": Pre((_QWEN2,)),
    "stablelm2": Pre((_QWEN2,)),
    "deepseek-r1-qwen": Pre((_QWEN2,)),
    "tekken": Pre((_TEKKEN,), whole=True, bos=True),
    "gpt-4o": Pre((_GPT4O,)),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": Pre((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3)),
}


def _alphabet() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


_BYTE_OF = {ord(char): chr(byte) for byte, char in _alphabet().items()}


def text_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token that is not in the byte alphabet is plain text."""
    try:
        return token.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def _cutter(pre: Pre) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in pre.cuts]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2)])


def byte_level_encoder(ids: dict[str, int], merges: Sequence[str], pre: Pre) -> Callable[[str], list[int]]:
    """A function from text without added tokens to ids.

    ids: token -> id. merges: ``"left right"`` in the byte alphabet, best first.
    Raises ValueError where the merges do not fit the vocabulary.
    """
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=pre.whole))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from error
    tokenizer.pre_tokenizer = _cutter(pre)
    return library_encoder(tokenizer)


def library_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The ids of a text, by the tokenizers library; nothing added around them.

    The library lets other Python threads run in its batch calls only.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    return encode
