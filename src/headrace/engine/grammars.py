"""Grammars on their way to the engine: refused where they are wrong, compiled where nobody waits.

`Checker` is the front end's: a request whose grammar cannot be enforced ends there, before anything is sent.
`Compiler` is the engine process's: it makes the constraint while the engine steps, and only that request waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from headrace.base.errors import EngineError, HeadraceError, RequestError
from headrace.base.log import log
from headrace.core.sequence import stop_ids_of
from headrace.core.structured import FIELD, StructuredOutputs
from headrace.engine.messages import Add
from headrace.text import Tokenizer
from headrace.text.grammar import Constraint, Grammar, Grammars, Vocabulary, source

SECONDS = 10.0  # that a grammar may take to be checked, those before it included


class Checker:
    """Says whether grammars can be enforced, on a thread of its own, with the vocabulary of bytes.

    vocab_size: ids that the engine draws from.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._size = vocab_size
        self._pool = ThreadPoolExecutor(1, "grammar")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the engine needs before the first grammar."""
        return Vocabulary.of(self._tokenizer, self._size)

    @cached_property
    def _small(self) -> Grammars:
        return Grammars(Vocabulary.small(self._tokenizer, self._size))

    async def grammar(self, wanted: StructuredOutputs) -> Grammar:
        """The grammar of what is wanted; RequestError if it cannot be enforced, or takes too long to tell."""
        check = asyncio.get_running_loop().run_in_executor(self._pool, self.checked, wanted)
        try:
            return await asyncio.wait_for(check, SECONDS)
        except TimeoutError:
            name = f"{FIELD}.{wanted.kind}"
            raise RequestError(f"{name} takes too long to compile: use a smaller one.", param=name) from None

    def checked(self, wanted: StructuredOutputs) -> Grammar:
        """The same, here and now."""
        grammar = source(wanted)
        try:
            self._small.compile(grammar)
        except RequestError as error:
            name = f"{FIELD}.{wanted.kind}"
            raise RequestError(str(error).replace(FIELD, name, 1), param=name) from None
        self.vocabulary  # noqa: B018 - made here, so that nobody waits for it on an event loop
        return grammar

    def close(self) -> None:
        """End the thread, after what it does."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose constraint is there, or the reason why there is none."""

    request: Add
    constraint: Constraint | None = None
    error: HeadraceError | None = None


class Compiler:
    """Compiles the grammars of requests on a thread, which the first one starts. done: told from that thread."""

    def __init__(self, done: Callable[[Compiled], None]) -> None:
        self._done = done
        self._vocabulary: Vocabulary | None = None
        self._pool = ThreadPoolExecutor(1, "grammar")

    def learn(self, vocabulary: Vocabulary) -> None:
        """What tokens are; before the first request."""
        self._vocabulary = vocabulary

    @cached_property
    def _grammars(self) -> Grammars:
        if self._vocabulary is None:
            raise EngineError("the engine was told of no vocabulary")
        return Grammars(self._vocabulary)

    def submit(self, request: Add) -> None:
        """Compile a request's grammar; `done` hears of it."""
        self._pool.submit(self._compile, request)

    def _compile(self, request: Add) -> None:
        try:
            constraint, error = compiled(self._grammars, request), None
        except HeadraceError as refusal:
            constraint, error = None, refusal
        except Exception:
            log.exception("a grammar could not be compiled")
            constraint, error = None, EngineError("the grammar could not be compiled")
        self._done(Compiled(request, constraint, error))


def compiled(grammars: Grammars, request: Add) -> Constraint | None:
    """The constraint of a request that has a grammar."""
    if request.grammar is None:
        return None
    return grammars.compile(request.grammar, stop_ids_of(request.params, request.stop_ids))
