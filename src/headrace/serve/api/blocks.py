"""One choice as blocks that follow each other: text, reasoning, calls of tools.

Owes: each block begun, added to and ended once, whether or not somebody watches; at least one block an answer. Does not
know: how an API shows them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from headrace.serve.api.answers import Turn
from headrace.serve.api.news import News
from headrace.serve.watch.accounts import CostDetails, Timings, cost_of, timings_of
from headrace.text.speech import CallArguments, CallStart, Content, Piece, Reasoning

if TYPE_CHECKING:
    from headrace.engine.output import Delta


class Kind(Enum):
    """What a block is."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class Step(Enum):
    """What happens to a block."""

    BEGIN = "begin"
    MORE = "more"
    END = "end"


@dataclass(slots=True)
class Block:
    """index: its number in the answer. name, call: of a call, the tool and the id to answer by.

    logprobs: of the tokens of a text, as far as they are told. whole: it was not cut off.
    """

    kind: Kind
    index: int
    name: str = ""
    call: str = ""
    said: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    whole: bool = False

    @property
    def text(self) -> str:
        """All of it; of a call, the JSON of its arguments."""
        return "".join(self.said)


@dataclass(slots=True, frozen=True)
class Change:
    """One step of one block. text, logprobs: what is new with `Step.MORE`."""

    step: Step
    block: Block
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)


_KINDS: dict[type[Piece], Kind] = {
    Content: Kind.TEXT,
    Reasoning: Kind.REASONING,
    CallStart: Kind.CALL,
    CallArguments: Kind.CALL,
}


class Blocks:
    """The only choice of the only prompt, taken apart. all: the blocks so far, the last of which may go on.

    output_tokens: how many there were. finish_reason, stop_reason: as clients of chat hear of them, at the end.
    """

    def __init__(self, news: News, turn: Turn) -> None:
        self.all: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.output_tokens = 0
        self._news = news
        self._turn = turn
        self._logprobs: list[Any] = []  # of tokens whose text is not there yet

    @property
    def input_tokens(self) -> int:
        """Of the prompt."""
        return len(self._news.streams[0].prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those whose work was done before."""
        return self._news.streams[0].cached_tokens

    @property
    def reasoning_tokens(self) -> int | None:
        """Of the output; None for a model that does not reason."""
        return self._turn.reasoning_tokens

    def cost(self) -> CostDetails | UnsetType:
        """What it cost, once it has ended, where the machine has a price."""
        price = self._news.price_per_hour
        return UNSET if price is None or self.finish_reason is None else cost_of(self._news.streams, price)

    def timings(self) -> Timings | UnsetType:
        """Where the time went, once it has ended."""
        return UNSET if self.finish_reason is None else timings_of(self._news.streams, [self.output_tokens])

    async def collect(self) -> None:
        """All blocks, when they have ended."""
        async for _ in self.changes():
            pass

    async def changes(self) -> AsyncGenerator[list[Change], None]:
        """What happens to the blocks, each time there is news."""
        async with aclosing(aiter(self._news)) as news:
            async for _, deltas in news:
                yield [change for delta in deltas for change in self._changes(delta)]

    def _changes(self, delta: Delta) -> Iterator[Change]:
        self.output_tokens += len(delta.token_ids)
        self._logprobs += delta.logprobs or ()
        for piece in self._turn.pieces(delta):
            yield from self._take(piece)
        if self.all and self.all[-1].kind is not Kind.TEXT:
            self._logprobs.clear()  # they belong to what has no place for them
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = self._turn.reason(delta), delta.stop_reason
            if not self.all:
                yield from self._begin(Kind.TEXT)
            yield from self._end(whole=delta.finish_reason == "stop")

    def _take(self, piece: Piece) -> Iterator[Change]:
        kind = _KINDS[type(piece)]
        if isinstance(piece, CallStart):
            yield from self._begin(kind, piece.name, self._turn.calls[piece.index])
        elif not self.all or self.all[-1].kind is not kind:
            yield from self._begin(kind)
        if not isinstance(piece, CallStart) and piece.text:
            yield self._more(piece.text)

    def _begin(self, kind: Kind, name: str = "", call: str = "") -> Iterator[Change]:
        yield from self._end(whole=True)
        begun = Block(kind, len(self.all), name, call)
        self.all.append(replace(begun, said=[], logprobs=[]))
        yield Change(Step.BEGIN, begun)  # stays empty, whatever comes before it is shown

    def _more(self, text: str) -> Change:
        block, logprobs = self.all[-1], []
        if block.kind is Kind.TEXT:
            logprobs, self._logprobs = self._logprobs, logprobs
        block.said.append(text)
        block.logprobs += logprobs
        return Change(Step.MORE, block, text, logprobs)

    def _end(self, whole: bool) -> Iterator[Change]:
        if self.all:
            block = self.all[-1]
            if block.kind is Kind.TEXT and self._logprobs:
                yield self._more("")
            block.whole = whole and not (block.kind is Kind.CALL and self._turn.broken)
            yield Change(Step.END, block)
