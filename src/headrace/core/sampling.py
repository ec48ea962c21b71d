"""What a caller may ask of the sampler, and the check that refuses the rest.

Owes: the parameters with vLLM's names, order and defaults, and one `RequestError` that names the field for each value
that cannot be honoured. Does not know: logits, text, tokenizers, HTTP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from headrace.base.rules import (
    Rule,
    either,
    flag,
    integer,
    list_of,
    map_of,
    nullable,
    number,
    one_of,
    record,
    refuse,
    text,
)
from headrace.core.structured import StructuredOutputs, structured

MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 128
MAX_PATTERN = 32  # tokens, and times
MAX_ALLOWED_IDS = 1 << 20
GREEDY_BELOW = 1e-5
INT32_MAX = 2**31 - 1


@dataclass(slots=True)
class SamplingParams:
    """How to draw tokens. Names, order, defaults: vLLM's `SamplingParams`; bad_token_ids, shown_token_ids are ours.

    stop: strings that end the text. stop_token_ids: ids that end it. max_tokens: None means up to the context.
    repetition_detection: ends what ends in min_count times a pattern of min_pattern_size..max_pattern_size tokens.
    logprobs, prompt_logprobs: how many alternatives to report; -1 all of them.
    shown_token_ids: special tokens that skip_special_tokens does not leave out.
    logit_bias: token id to a value in -100..100. bad_words: strings; bad_token_ids: the id sequences they become.
    structured_outputs: what the whole answer must look like.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_token_ids: list[list[int]] | None = None
    structured_outputs: StructuredOutputs | None = None
    shown_token_ids: list[int] | None = None
    repetition_detection: dict[str, int] | None = None

    @property
    def greedy(self) -> bool:
        """Temperatures under 1e-5 take the likeliest token."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def validate(self, vocab_size: int | None = None, max_logprobs: int = 20) -> None:
        """Raise `RequestError` for the first value that is illegal; its `param` is the field, or the path of its part.

        vocab_size: ids must lie in 0..vocab_size-1; None checks the lower end only.
        max_logprobs: the most alternatives a request may ask for; -1 is no limit.
        """
        for name, rule in rules(INT32_MAX if vocab_size is None else vocab_size, max_logprobs).items():
            rule.check(name, getattr(self, name))
        self._check_together()

    def _check_together(self) -> None:
        repeats = self.repetition_detection
        if repeats is not None and (repeats.get("min_pattern_size") or 0) > repeats["max_pattern_size"]:
            refuse("repetition_detection.min_pattern_size", "must be at most max_pattern_size")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.stop and not self.detokenize:
            refuse("stop", "needs text to look in: leave detokenize on, or use stop_token_ids")
        if self.allowed_token_ids is not None:
            left = set(self.allowed_token_ids) - {ids[0] for ids in self.bad_token_ids or () if len(ids) == 1}
            if self.min_tokens:
                left -= set(self.stop_token_ids or ())
            if not left:
                refuse("allowed_token_ids", "leaves no token beside bad words and, with min_tokens, stop ids")


def _token_ids(vocab_size: int, most: int, least: int = 0) -> Rule:
    return list_of(token_id(vocab_size), most, least, of=f"token ids from 0 to {vocab_size - 1}")


@cache
def token_id(vocab_size: int) -> Rule:
    """An id of the vocabulary."""
    return integer(0, vocab_size - 1, says=f"a token id from 0 to {vocab_size - 1}")


@cache
def logprobs_rule(most: int) -> Rule:
    """How many alternatives may be asked for; -1 for all, where `most` is -1: no limit."""
    if most == -1:
        return integer(-1, INT32_MAX, says="an integer, -1 (all) or more")
    return integer(0, most, says=f"from 0 to {most}, the most that this server allows")


_structured = Rule(
    "StructuredOutputs",
    structured.schema,
    lambda value: isinstance(value, StructuredOutputs),
    lambda path, value: value.validate(),
)


@cache
def rules(vocab_size: int = INT32_MAX, max_logprobs: int = -1) -> dict[str, Rule]:
    """What each field of `SamplingParams` may be."""
    alternatives = nullable(logprobs_rule(max_logprobs))
    penalty = number(-2, 2)
    word = text(MAX_BAD_CHARACTERS, 1)
    stop = text(MAX_STOP_CHARACTERS, 1)
    pattern = integer(1, MAX_PATTERN)
    repeats = record(
        {
            "max_pattern_size": pattern,
            "min_pattern_size": integer(0, MAX_PATTERN),
            "min_count": integer(2, MAX_PATTERN),
        },
        ("max_pattern_size", "min_count"),
    )
    bias = map_of(token_id(vocab_size), number(-100, 100), MAX_BIASES, "token ids to numbers from -100 to 100")
    return {
        "n": integer(1, MAX_CHOICES),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        # Beyond these bounds a penalised logit can leave float32.
        "repetition_penalty": number(1e-4, 1e4, says="a number from 0.0001 to 10000"),
        "temperature": number(0, math.nextafter(math.inf, 0), says="a finite number, 0 or more"),
        "top_p": number(0, 1, above=True),
        "top_k": integer(-1, INT32_MAX, says="an integer: -1 or 0 (off), or the number of tokens to keep"),
        "min_p": number(0, 1),
        "seed": nullable(integer(-(2**63), 2**64 - 1, says="an integer of 64 bits")),
        "stop": nullable(either(stop, list_of(stop, MAX_STOP_STRINGS, of="strings"))),
        "stop_token_ids": nullable(_token_ids(vocab_size, MAX_STOP_IDS)),
        "ignore_eos": flag,
        # What is more than the context holds is cut to it, so any size is fine: nothing is allocated by it.
        "max_tokens": nullable(integer(0, 2**63 - 1, says="an integer, 0 or more,")),
        "min_tokens": integer(0, INT32_MAX, says="an integer, 0 or more"),
        "logprobs": alternatives,
        "prompt_logprobs": alternatives,
        "detokenize": flag,
        "skip_special_tokens": flag,
        "spaces_between_special_tokens": one_of(True),
        "include_stop_str_in_output": flag,
        "logit_bias": nullable(bias),
        "allowed_token_ids": nullable(_token_ids(vocab_size, MAX_ALLOWED_IDS, least=1)),
        "repetition_detection": nullable(repeats),
        "bad_words": nullable(list_of(word, MAX_BAD_WORDS, of="strings")),
        "bad_token_ids": nullable(
            list_of(_token_ids(vocab_size, MAX_STOP_IDS, least=1), MAX_BAD_WORDS, of="lists of token ids")
        ),
        "structured_outputs": nullable(_structured),
        "shown_token_ids": nullable(_token_ids(vocab_size, MAX_STOP_IDS)),
    }
