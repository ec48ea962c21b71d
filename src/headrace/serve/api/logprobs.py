"""Log-probabilities as OpenAI's two forms show them. Minus infinity becomes -9999: JSON has no infinities."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.serve.api.shapes import Alternative, ChatLogprobs, ChatToken, TextLogprobs

if TYPE_CHECKING:
    from headrace.engine.output import Logprob
    from headrace.text import Tokenizer

    Logprobs = Mapping[int, Logprob]

FLOOR = -9999.0


def floored(logprob: float) -> float:
    """What JSON can carry: at least `FLOOR`."""
    return logprob if logprob > FLOOR else FLOOR


class TokenNames:
    """How tokens are called in answers: by their text, or as ``token_id:N`` when the client wants that."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def bytes(self, token: int) -> bytes:
        """The token's own bytes, whether or not they are whole characters."""
        return self._tokenizer.token_bytes(token)

    def of(self, tokens: Sequence[int]) -> str:
        """The text of them all."""
        return self._tokenizer.decode(tokens)

    def text(self, token: int) -> str:
        """Readable; bytes that are no characters show as U+FFFD."""
        return f"token_id:{token}" if self._as_ids else self.bytes(token).decode("utf-8", "replace")

    def unique(self, token: int) -> str:
        r"""As `text`, but what is no character keeps its bytes (``bytes:\xf0\x9f``), so that names do not collide."""
        raw = self.bytes(token)
        try:
            return f"token_id:{token}" if self._as_ids else raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def special(self, token: int) -> bool:
        """Whether it is left out of texts."""
        return token in self._tokenizer.special_ids


def chosen(of: Logprobs) -> tuple[int, Logprob]:
    """The token that is there, which comes first."""
    return next(iter(of.items()))


def best(of: Logprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest, the likeliest first; the token that is there only if it is one of them."""
    return sorted(of.items(), key=lambda item: -item[1].logprob)[:count]


def chat_logprobs(steps: Iterable[Logprobs], names: TokenNames, count: int) -> ChatLogprobs:
    """The form of /v1/chat/completions."""
    return ChatLogprobs(content=[_chat_token(of, names, count) for of in steps])


def _chat_token(of: Logprobs, names: TokenNames, count: int) -> ChatToken:
    token, own = chosen(of)
    top = [
        Alternative(token=names.text(i), logprob=floored(lp.logprob), bytes=list(names.bytes(i)))
        for i, lp in best(of, count)
    ]
    raw = list(names.bytes(token))
    return ChatToken(token=names.text(token), logprob=floored(own.logprob), bytes=raw, top_logprobs=top)


class TextOffsets:
    """Where tokens begin in the text of one choice, which starts at `start` characters."""

    def __init__(self, names: TokenNames, start: int = 0, skip_special: bool = True) -> None:
        self._names = names
        self._at = start
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> int:
        """The offset of the next token of the text."""
        at = self._at
        if not (self._skip_special and self._names.special(token)):
            self._at += len(self._decoder.decode(self._names.bytes(token)))
        return at


def text_logprobs(
    steps: Sequence[Logprobs | None], tokens: Sequence[int], names: TokenNames, offsets: TextOffsets, count: int
) -> TextLogprobs:
    """The form of /v1/completions. steps: one a token; None for a prompt's first."""
    return TextLogprobs(
        text_offset=[offsets.add(token) for token in tokens],
        token_logprobs=[None if of is None else floored(chosen(of)[1].logprob) for of in steps],
        tokens=[names.unique(token) for token in tokens],
        top_logprobs=[None if of is None else _named(of, names, count) for of in steps],
    )


def joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """One after the other."""
    return TextLogprobs(
        text_offset=first.text_offset + second.text_offset,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        tokens=first.tokens + second.tokens,
        top_logprobs=first.top_logprobs + second.top_logprobs,
    )


def _named(of: Logprobs, names: TokenNames, count: int) -> dict[str, float]:
    """The best `count`, and the token that is there: it is always listed."""
    token, own = chosen(of)
    top = {names.unique(i): floored(lp.logprob) for i, lp in best(of, count)}
    top.setdefault(names.unique(token), floored(own.logprob))
    return top


def prompt_logprobs(steps: Sequence[Logprobs | None]) -> list[Any]:
    """vLLM's `prompt_logprobs`: token id to record, null for the first token."""
    return [
        None
        if of is None
        else {
            str(i): {"logprob": floored(lp.logprob), "rank": lp.rank, "decoded_token": lp.decoded_token}
            for i, lp in of.items()
        }
        for of in steps
    ]
