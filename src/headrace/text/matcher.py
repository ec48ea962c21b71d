"""llguidance through its C interface: a vocabulary's trie, and matchers that walk a grammar over it.

Owes: the few calls that constrained sampling needs. None of them holds the GIL, so a trie of a quarter of a million
tokens (0.3 s) and a large grammar are made while the engine steps; llguidance's Python classes hold it there. Source:
parser/llguidance.h of guidance-ai/llguidance 1.9, whose structures grow at their ends only.
Does not know: requests, schemas, what the tokens mean.
"""

from __future__ import annotations

import ctypes as c
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]

SPECIAL: Final = b"\xff"
"""Begins the bytes of a special token: no text holds that byte."""

_ROOM = 1024  # bytes kept for a structure that the library may have grown


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or has outgrown a limit; the text is llguidance's."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a grammar may cost: llguidance's `ParserLimits`, whose defaults these are where no reason is given.

    initial_lexer_fuel: of a compilation (50,000 take about 1 ms). step_lexer_fuel, step_max_items: of one mask (14,000
    and 20,000 take about 1 ms). max_lexer_states: 1 to 2 kB each. max_grammar_size: symbols.
    """

    max_items_in_row: int = 2000
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 50_000
    max_lexer_states: int = 250_000
    max_grammar_size: int = 500_000


class _Limits(c.Structure):
    _fields_ = (
        ("max_items_in_row", c.c_size_t),
        ("initial_lexer_fuel", c.c_uint64),
        ("step_lexer_fuel", c.c_uint64),
        ("step_max_items", c.c_size_t),
        ("max_lexer_states", c.c_size_t),
        ("max_grammar_size", c.c_size_t),
        ("precompute_large_lexemes", c.c_bool),
        ("verbose_errors", c.c_bool),
    )


class _Init(c.Structure):
    _fields_ = (
        ("tokenizer", c.c_void_p),
        ("log_buffer_level", c.c_uint32),
        ("log_stderr_level", c.c_uint32),
        ("ff_tokens_ok", c.c_bool),
        ("backtrack_ok", c.c_bool),
        ("limits", _Limits),
        ("grown", c.c_byte * _ROOM),
    )


class _TokenizerInit(c.Structure):
    _fields_ = (
        ("struct_size", c.c_size_t),
        ("vocab_size", c.c_uint32),
        ("tok_eos", c.c_uint32),
        ("token_lens", c.c_void_p),
        ("token_bytes", c.c_char_p),
        ("tokenizer_json", c.c_char_p),
        ("tokenize_assumes_string", c.c_bool),
        ("tokenize_fn", c.c_void_p),
        ("use_approximate_greedy_tokenize_fn", c.c_bool),
        ("tokenize_user_data", c.c_void_p),
        ("slices", c.c_void_p),
        ("tok_eos_extra", c.c_void_p),
        ("tok_eos_extra_count", c.c_uint32),
    )


_P = c.c_void_p
_CALLS: Final[dict[str, tuple[Any, ...]]] = {  # name -> result, arguments
    "llg_new_tokenizer_v2": (_P, c.POINTER(_TokenizerInit), c.c_char_p, c.c_size_t),
    "llg_free_tokenizer": (None, _P),
    "llg_constraint_init_set_defaults": (None, c.POINTER(_Init), _P),
    "llg_new_matcher": (_P, c.POINTER(_Init), c.c_char_p, c.c_char_p),
    "llg_clone_matcher": (_P, _P),
    "llg_free_matcher": (None, _P),
    "llg_matcher_get_error": (c.c_char_p, _P),
    "llg_matcher_is_accepting": (c.c_bool, _P),
    "llg_matcher_is_stopped": (c.c_bool, _P),
    "llg_matcher_compute_mask_into": (c.c_int32, _P, _P, c.c_size_t),
    "llg_matcher_consume_token": (c.c_int32, _P, c.c_uint32),
    "llg_matcher_validate_tokens": (c.c_int32, _P, c.POINTER(c.c_uint32), c.c_size_t),
}


@cache
def _library() -> Any:
    """The shared library inside the package, without the package's Python."""
    spec = find_spec("llguidance")
    assert spec is not None and spec.origin is not None, "llguidance is a dependency"
    (path,) = (p for p in Path(spec.origin).parent.glob("_lib*") if p.suffix in (".so", ".pyd"))
    library = c.CDLL(str(path))
    for name, (result, *arguments) in _CALLS.items():
        call = getattr(library, name)
        call.restype, call.argtypes = result, arguments
    return library


class Trie:
    """The tokens of a vocabulary as llguidance walks them. Safe to share between threads.

    lengths int32 [n] and data: the bytes of each token, one after another; an empty token is never allowed, one that
    begins with `SPECIAL` only where a grammar names it. An end token of the grammar's own is added as id n.
    """

    def __init__(self, lengths: I32, data: bytes) -> None:
        end = SPECIAL + b"<|end of the grammar|>"
        lens = np.append(lengths, len(end)).astype(np.uint32)
        assert int(lens.sum()) == len(data) + len(end)
        self.end = len(lengths)
        self.words = -(-len(lens) // 32)
        init = _TokenizerInit(
            struct_size=c.sizeof(_TokenizerInit),
            vocab_size=len(lens),
            tok_eos=self.end,
            token_lens=lens.ctypes.data,
            token_bytes=data + end,
            use_approximate_greedy_tokenize_fn=True,
        )
        message = c.create_string_buffer(1024)
        self.handle = _library().llg_new_tokenizer_v2(init, message, len(message))
        if not self.handle:
            raise GrammarError(message.value.decode("utf-8", "replace"))
        weakref.finalize(self, _library().llg_free_tokenizer, self.handle)


class Matcher:
    """One walk through a grammar. One thread at a time.

    accepting: the tokens so far are a whole text of the grammar. stopped: and nothing can follow.
    """

    __slots__ = ("__weakref__", "_handle", "_lib", "trie")

    def __init__(self, trie: Trie, handle: int) -> None:
        self.trie = trie
        self._handle = handle
        self._lib = _library()
        weakref.finalize(self, self._lib.llg_free_matcher, handle)

    @classmethod
    def compile(cls, trie: Trie, kind: str, text: str, limits: Limits) -> Matcher:
        """A grammar of kind "json" (a schema), "regex" or "lark". GrammarError if llguidance refuses it."""
        assert "\0" not in text
        init = _Init()
        _library().llg_constraint_init_set_defaults(init, trie.handle)
        init.log_buffer_level = init.log_stderr_level = 0
        for name in limits.__dataclass_fields__:
            setattr(init.limits, name, getattr(limits, name))
        init.limits.verbose_errors = False
        matcher = cls(trie, _library().llg_new_matcher(init, kind.encode(), text.encode("utf-8")))
        if error := matcher.error:
            raise GrammarError(error)
        return matcher

    def copy(self) -> Matcher:
        """Another walk from here; what both learn about the grammar's lexer is shared."""
        return Matcher(self.trie, self._lib.llg_clone_matcher(self._handle))

    @property
    def error(self) -> str | None:
        """Why this walk cannot go on: a limit was met. It never recovers."""
        text = self._lib.llg_matcher_get_error(self._handle)
        return None if text is None else text.decode("utf-8", "replace")

    @property
    def accepting(self) -> bool:
        return bool(self._lib.llg_matcher_is_accepting(self._handle))

    @property
    def stopped(self) -> bool:
        return bool(self._lib.llg_matcher_is_stopped(self._handle))

    def fill(self, words: I32) -> bool:
        """Write the mask of the next token, int32 [trie.words], bit i of word w for 32 w + i; False on an error."""
        assert words.flags.c_contiguous and words.size == self.trie.words
        return bool(self._lib.llg_matcher_compute_mask_into(self._handle, words.ctypes.data, words.nbytes) == 0)

    def consume(self, token: int) -> bool:
        """Go on by a token; False, for good, if the grammar does not allow it."""
        return bool(self._lib.llg_matcher_consume_token(self._handle, token) == 0)

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, could follow."""
        array = (c.c_uint32 * len(tokens))(*tokens)
        return int(self._lib.llg_matcher_validate_tokens(self._handle, array, len(tokens)))
