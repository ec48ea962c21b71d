"""What a caller may ask of the sampler, and the check that refuses the rest.

Owes: the parameters with vLLM's names, order and defaults, and one `RequestError` that names the field for each value
that cannot be honoured. Does not know: logits, text, tokenizers, HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.base.errors import RequestError

MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 128
MAX_ALLOWED_IDS = 1 << 20
GREEDY_BELOW = 1e-5
INT32_MAX = 2**31 - 1


@dataclass(slots=True)
class SamplingParams:
    """How to draw tokens. Names, order, defaults: vLLM's `SamplingParams`; `bad_token_ids` is ours.

    stop: strings that end the text. stop_token_ids: ids that end it. max_tokens: None means up to the context.
    logprobs, prompt_logprobs: how many alternatives to report; -1 all of them.
    logit_bias: token id to a value in -100..100. bad_words: strings; bad_token_ids: the id sequences they become.
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

    @property
    def greedy(self) -> bool:
        """Temperatures under 1e-5 take the likeliest token."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def validate(self, vocab_size: int | None = None, max_logprobs: int = 20) -> None:
        """Raise `RequestError` for the first value that is illegal; its `param` is the field.

        vocab_size: ids must lie in 0..vocab_size-1; None checks the lower end only.
        max_logprobs: the most alternatives a request may ask for; -1 is no limit.
        """
        for name, rule in _RULES.items():
            rule(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            _check_logprobs(name, getattr(self, name), max_logprobs)
        limit = INT32_MAX if vocab_size is None else vocab_size
        for name, ids in self._id_lists():
            _check_ids(name, ids, limit)
        self._check_together()

    def _id_lists(self) -> Iterable[tuple[str, Iterable[object]]]:
        yield "stop_token_ids", self.stop_token_ids or ()
        yield "logit_bias", self.logit_bias or ()
        yield "allowed_token_ids", self.allowed_token_ids or ()
        for ids in self.bad_token_ids or ():
            yield "bad_token_ids", ids

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.stop and not self.detokenize:
            _refuse("stop", "needs text to look in: leave detokenize on, or use stop_token_ids")
        if self.allowed_token_ids is not None:
            left = set(self.allowed_token_ids) - {ids[0] for ids in self.bad_token_ids or () if len(ids) == 1}
            if self.min_tokens:
                left -= set(self.stop_token_ids or ())
            if not left:
                _refuse("allowed_token_ids", "leaves no token beside bad words and, with min_tokens, stop ids")


Rule = Callable[[str, object], None]


def _refuse(name: str, why: str) -> None:
    raise RequestError(f"{name} {why}.", param=name)


def _show(value: object) -> str:
    """A value for a message: escaped and short, whatever the client sent."""
    try:
        text = ascii(value)
    except ValueError:  # an int of more than 4300 digits
        return "a number too long to show"
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(low: int, high: int, optional: bool = False, says: str = "") -> Rule:
    span = says or f"an integer from {low} to {high}"

    def rule(name: str, value: object) -> None:
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            _refuse(name, f"must be {span}{' or null' * optional}, got {_show(value)}")

    return rule


def _number(low: float, high: float, says: str, above: bool = False) -> Rule:
    """A finite number of low..high; `above` leaves `low` itself out."""

    def rule(name: str, value: object) -> None:
        if not _is_number(value, low, high) or (above and value == low):
            _refuse(name, f"must be {says}, got {_show(value)}")

    return rule


def _is_number(value: object, low: float, high: float) -> bool:
    # The comparison is exact for ints of any size, and False for NaN.
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, f"must be true or false, got {_show(value)}")


def _only_true(name: str, value: object) -> None:
    _boolean(name, value)
    if value is False:
        _refuse(name, "cannot be turned off here; leave it out")


def _list(most: int, of: str, least: int = 0) -> Rule:
    def rule(name: str, value: object) -> None:
        if value is None:
            return
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            _refuse(name, f"must be null or a list of {least} to {most} {of}, got {_show_size(value)}")

    return rule


def _show_size(value: object) -> str:
    return f"{len(value)} of them" if isinstance(value, list | tuple | dict) else _show(value)


def _strings(most: int, longest: int) -> Rule:
    is_list = _list(most, "strings")

    def rule(name: str, value: object) -> None:
        is_list(name, value)
        for text in value if isinstance(value, list | tuple) else ():
            _check_text(name, text, longest)

    return rule


def _check_text(name: str, text: object, longest: int) -> None:
    if not isinstance(text, str) or not 1 <= len(text) <= longest:
        _refuse(name, f"must hold strings of 1 to {longest} characters, got {_show(text)}")
    elif any("\ud800" <= c <= "\udfff" for c in text):
        _refuse(name, f"holds half of a surrogate pair, which is no character: {_show(text)}")


def _check_stop(name: str, value: object) -> None:
    _strings(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)(name, [value] if isinstance(value, str) else value)


def _check_bias(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        _refuse(name, f"must be null or a map of at most {MAX_BIASES} token ids to numbers, got {_show_size(value)}")
        return
    for bias in value.values():
        if not _is_number(bias, -100, 100):
            _refuse(name, f"must map to numbers from -100 to 100, got {_show(bias)}")


def _check_bad_ids(name: str, value: object) -> None:
    _list(MAX_BAD_WORDS, "lists of token ids")(name, value)
    for ids in value if isinstance(value, list | tuple) else ():
        if ids is None:
            _refuse(name, "must hold lists of token ids, got None")
        _list(MAX_STOP_IDS, "token ids", least=1)(name, ids)


def _check_ids(name: str, ids: Iterable[object], limit: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limit:
            _refuse(name, f"must hold token ids from 0 to {limit - 1}, got {_show(token)}")


def _check_logprobs(name: str, value: int | None, most: int) -> None:
    if value is None or most == -1:
        return
    if value == -1:
        _refuse(name, f"of -1 (all) is more than the {most} that this server allows; ask for at most {most}")
    elif value > most:
        _refuse(name, f"must be at most {most} on this server, got {value}")


_HUGE = math.nextafter(math.inf, 0)
_LOGPROBS = _integer(-1, INT32_MAX, optional=True, says="an integer, -1 (all) or more,")
_PENALTY = _number(-2, 2, "a number from -2 to 2")
_RULES: dict[str, Rule] = {
    "n": _integer(1, MAX_CHOICES),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    # Beyond these bounds a penalised logit can leave float32.
    "repetition_penalty": _number(1e-4, 1e4, "a number from 0.0001 to 10000"),
    "temperature": _number(0, _HUGE, "a finite number, 0 or more"),
    "top_p": _number(0, 1, "a number above 0 and at most 1", above=True),
    "top_k": _integer(-1, INT32_MAX, says="an integer: -1 or 0 (off), or the number of tokens to keep"),
    "min_p": _number(0, 1, "a number from 0 to 1"),
    "seed": _integer(-(2**63), 2**64 - 1, optional=True, says="an integer of 64 bits"),
    "stop": _check_stop,
    "stop_token_ids": _list(MAX_STOP_IDS, "token ids"),
    "ignore_eos": _boolean,
    # What is more than the context holds is cut to it, so any size is fine: nothing is allocated by it.
    "max_tokens": _integer(0, 2**63 - 1, optional=True, says="an integer, 0 or more,"),
    "min_tokens": _integer(0, INT32_MAX, says="an integer, 0 or more"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "detokenize": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _only_true,
    "include_stop_str_in_output": _boolean,
    "logit_bias": _check_bias,
    "allowed_token_ids": _list(MAX_ALLOWED_IDS, "token ids", least=1),
    "bad_words": _strings(MAX_BAD_WORDS, MAX_BAD_CHARACTERS),
    "bad_token_ids": _check_bad_ids,
}
