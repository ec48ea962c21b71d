"""What an answer must look like: `StructuredOutputs` become grammars, and grammars say which tokens may come next.

    source(wanted)                 checks and brings to one form; needs no vocabulary
    Grammars(vocabulary).compile   a `Constraint`, which walks the grammar with the tokens of one sequence

Owes: a `RequestError` that names the place for what cannot be enforced, within bounded time and memory; masks that
never allow an end before the grammar is complete, nor a special token that the grammar does not name. Does not know:
the scheduler, logits, HTTP. The grammars are llguidance's (`matcher`), schemas are checked by us (`schema`).

Lark grammars may hold schemas, `%json {...}`, which are checked and normalised like others; `embedded` makes one of a
schema. Special tokens are named by their text if that is in angle brackets, `<|im_start|>`, else by id, `<[151644]>`.
An end token that is named may come only where the grammar is complete with it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import RequestError
from headrace.core.structured import FIELD, StructuredOutputs
from headrace.text import schema as schemas
from headrace.text.matcher import SPECIAL, GrammarError, Limits, Matcher, Trie
from headrace.text.tokenizer import Tokenizer

I32 = NDArray[np.int32]

LIMITS: Final = Limits(step_lexer_fuel=50_000, max_lexer_states=20_000)
"""A mask takes 5 to 100 us; none more than about 5 ms."""

_SMALL = 1024  # more tokens than `Vocabulary.small` needs


@dataclass(frozen=True, slots=True)
class Grammar:
    """A checked grammar. kind: "json" (a schema), "regex" or "lark"."""

    kind: str
    text: str


# -- sources


def source(wanted: StructuredOutputs) -> Grammar:
    """The grammar of what is wanted; RequestError with the place that cannot be."""
    wanted.validate()
    if wanted.json is not None:
        return Grammar("json", _schema(wanted.json, f"{FIELD}.json"))
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex)
    if wanted.choice is not None:
        return Grammar("regex", "|".join(map(_literal, wanted.choice)))
    if wanted.grammar is not None:
        return Grammar("lark", _lark(wanted.grammar))
    return Grammar("json", _schema({"type": "object"}, f"{FIELD}.json_object"))


def embedded(schema: Any, param: str) -> str:
    """A schema as a part of a Lark grammar; RequestError(param)."""
    return f"%json {_schema(schema, param)}"


def _schema(schema: Any, param: str) -> str:
    try:
        return json.dumps(schemas.normalised(schema))
    except schemas.SchemaError as error:
        raise RequestError(f"{param} cannot be enforced {error}.", param=param) from None


def _literal(text: str) -> str:
    """A regular expression for one text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


# What may hold "%json" without meaning it: strings, regular expressions, comments.
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|%json\b\s*')
_OPTIONS = re.compile(r"^[ \t]*[\w.!?-]+[ \t]*\[[^\]\n]*\b(temperature|stop)[ \t]*=", re.MULTILINE)


def _lark(text: str) -> str:
    """The grammar with the schemas in it checked."""
    param = f"{FIELD}.grammar"
    if option := _OPTIONS.search(text):
        raise RequestError(f"{param}: the rule option {option[1]} is not supported.", param=param)
    if "::=" in _LARK.sub("", text):
        raise RequestError(f"{param} looks like GBNF: write it in Lark (name: ..., from start).", param=param)
    decoder, parts, at = json.JSONDecoder(), [], 0
    for found in _LARK.finditer(text):
        if found.start() < at or not found[0].startswith("%json"):
            continue
        try:
            schema, end = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param}: after %json comes no JSON: {error}.", param=param) from None
        parts += [text[at : found.start()], embedded(schema, param)]
        at = end
    return "".join([*parts, text[at:]])


# -- vocabularies


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token: `lengths` (int32, little-endian, one a token) and `data`, one after another.

    Special tokens begin with `matcher.SPECIAL`.
    """

    lengths: bytes
    data: bytes

    @staticmethod
    def of(tokenizer: Tokenizer, size: int) -> Vocabulary:
        """The tokenizer's first `size` tokens."""
        special = _special(tokenizer)
        return _packed((SPECIAL if i in special else b"") + tokenizer.token_bytes(i) for i in range(size))

    @staticmethod
    def small(tokenizer: Tokenizer, size: int) -> Vocabulary:
        """The special tokens alone, under their own ids, and the 256 bytes: enough to check a grammar, in 30 ms."""
        special = _special(tokenizer)
        if size < _SMALL + len(special):
            return Vocabulary.of(tokenizer, size)
        tokens = [b""] * size
        plain = (i for i in range(size) if i not in special)
        for byte, i in zip(range(256), plain, strict=False):
            tokens[i] = bytes([byte])
        for i in special:
            if i < size:
                tokens[i] = SPECIAL + tokenizer.token_bytes(i)
        return _packed(tokens)


def _special(tokenizer: Tokenizer) -> frozenset[int]:
    """A token that ends a generation is none of a text's, whatever its file calls it."""
    return tokenizer.special_ids | tokenizer.stop_ids


def _packed(tokens: Iterable[bytes]) -> Vocabulary:
    each = list(tokens)
    return Vocabulary(np.array([len(token) for token in each], "<i4").tobytes(), b"".join(each))


# -- constraints


class Grammars:
    """Compiles grammars for one vocabulary. Safe to share between threads.

    Keeps the last that were compiled, up to `most` of them whose texts have up to `most_bytes`: the next request that
    wants the same begins with a copy, and what was learnt about the grammar's lexer. RequestError.param begins with
    `FIELD`.
    """

    def __init__(self, vocabulary: Vocabulary, *, most: int = 64, most_bytes: int = 1 << 22) -> None:
        self._trie = Trie(np.frombuffer(vocabulary.lengths, "<i4"), vocabulary.data)
        self._kept: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def compile(self, grammar: Grammar, stop_ids: Iterable[int] = ()) -> Constraint:
        """A constraint at its beginning. stop_ids: all that end the sequence. RequestError if it cannot be."""
        with self._lock:
            if (known := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return Constraint(known.copy(), stop_ids)
        matcher = self._compiled(grammar)
        with self._lock:
            if grammar not in self._kept:
                self._keep(grammar, matcher)
            return Constraint(matcher.copy(), stop_ids)

    def _compiled(self, grammar: Grammar) -> Matcher:
        try:
            matcher = Matcher.compile(self._trie, grammar.kind, grammar.text, LIMITS)
        except GrammarError as error:
            raise _refusal(grammar, str(error)) from None
        first = np.zeros(self._trie.words, np.int32)
        if not matcher.copy().fill(first):
            raise _refusal(grammar, "it is too complex")
        if not first.any():
            raise _refusal(grammar, "no text fits it")
        return matcher

    def _keep(self, grammar: Grammar, matcher: Matcher) -> None:
        self._kept[grammar] = matcher
        self._bytes += len(grammar.text)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[0].text)


def _refusal(grammar: Grammar, why: str) -> RequestError:
    """Its param is for the caller to complete, who knows which of the fields it was."""
    for end in ("; following special tokens", "\n   1 |"):  # lists of tokens, and the grammar once more
        why = why.split(end)[0]
    shown = "".join(c if c.isprintable() else "?" for c in " ".join(why.split()))[:300]
    return RequestError(f"{FIELD}: this {_WHAT[grammar.kind]} cannot be enforced: {shown}.", param=FIELD)


_WHAT: Final = {"json": "schema", "regex": "regular expression", "lark": "grammar"}


class Constraint:
    """Which tokens may come next in one sequence.

    complete: the text so far is whole; ends are allowed. stopped: nothing else may follow. Both are of the tokens taken
    so far.
    """

    __slots__ = ("_ends", "_ids", "_matcher", "_scratch", "_view", "_whole")

    def __init__(self, matcher: Matcher, stop_ids: Iterable[int]) -> None:
        trie = matcher.trie
        self._matcher = matcher
        self._ids = sorted(i for i in set(stop_ids) if i < trie.end)
        self._ends: dict[int, int] = {}  # words of the mask that hold their bits, and these
        for i in self._ids:
            self._ends[i >> 5] = self._ends.get(i >> 5, 0) | 1 << (i & 31)
        self._whole = trie.end >> 5, 1 << (trie.end & 31)
        self._scratch = np.zeros(trie.words, np.int32)
        self._view = self._scratch.data.cast("B").cast("I")

    def copy(self) -> Constraint:
        """Another one at the same place, for another sequence."""
        return Constraint(self._matcher.copy(), self._ids)

    @property
    def complete(self) -> bool:
        return self._matcher.accepting

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped and self._matcher.error is None

    @property
    def error(self) -> str | None:
        """Why there are no more masks: the grammar met a limit."""
        return self._matcher.error

    def mask(self, row: I32) -> bool:
        """Write what may come next; False on an error. row int32 [ceil(n / 32)]: bit i of word w allows 32 w + i."""
        if not self._matcher.fill(self._scratch):
            return False
        words = self._view
        word, bit = self._whole
        complete = words[word] & bit
        words[word] &= ~bit
        for word, bits in self._ends.items():
            if complete:
                words[word] |= bits
            elif named := words[word] & bits:
                words[word] ^= named ^ self._last(word, named)
        row[:] = self._scratch[: len(row)]
        return True

    def _last(self, word: int, named: int) -> int:
        """Of the ends that the grammar names here, those that complete it."""
        last = 0
        for bit in range(32):
            after = self._matcher.copy() if named >> bit & 1 else None
            if after is not None and after.consume(32 * word + bit) and after.accepting:
                last |= 1 << bit
        return last

    def accept(self, token: int) -> bool:
        """Take a token in, which the mask allowed; False if the grammar does not."""
        return self._matcher.consume(token)

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, may follow one another here: for drafts."""
        return self._matcher.valid(tokens)
