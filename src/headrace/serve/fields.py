"""Every field that a request may carry, as tables. What is in none of them is refused by name.

SAMPLING   goes to the sampler under its own name; `SamplingParams.validate` holds its type and range.
COMMON, CHAT, COMPLETION   handled in `requests`; the rule here checks the type.
NEUTRAL    accepted only with a value that changes nothing, so that no client is told less than it asked for.
HINTS      say something about the request that cannot change its answer: checked, then dropped.

Null always equals absent. Field names: OpenAI's API reference, and vLLM's extensions of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Final

from headrace.base.errors import RequestError
from headrace.serve.errors import shown

Rule = Callable[[Any], bool]
Rules = dict[str, tuple[Rule, str]]

SAMPLING: Final = frozenset({
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "prompt_logprobs",
})  # fmt: skip


def is_flag(value: Any) -> bool:
    """True or false, nothing like them."""
    return isinstance(value, bool)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_map(value: Any) -> bool:
    return isinstance(value, dict)


def is_list(value: Any) -> bool:
    return isinstance(value, list)


def _within(low: int, high: int) -> Rule:
    return lambda value: is_whole(value) and low <= value <= high


def _short(value: Any) -> bool:
    return is_text(value) and len(value) <= 512


def _only(*values: Any) -> Rule:
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def _text_format(value: Any) -> bool:
    return is_map(value) and value == {"type": "text"}


_INT32 = 2**31 - 1

COMMON: Rules = {
    "model": (is_text, "a string"),
    "stream": (is_flag, "true or false"),
    "stream_options": (is_map, "an object"),
    "max_tokens": (is_whole, "an integer"),
    "logit_bias": (is_map, "an object of token ids to numbers"),
    "priority": (_within(-_INT32, _INT32), "an integer of 32 bits"),
    "cache_salt": (_short, "a string of at most 512 characters"),
    "return_token_ids": (is_flag, "true or false"),
    "return_tokens_as_token_ids": (is_flag, "true or false"),
}

CHAT: Rules = COMMON | {
    "messages": (is_list, "a list of messages"),
    "max_completion_tokens": (is_whole, "an integer"),
    "logprobs": (is_flag, "true or false"),
    "top_logprobs": (is_whole, "an integer"),
    "add_generation_prompt": (is_flag, "true or false"),
    "continue_final_message": (is_flag, "true or false"),
    "chat_template_kwargs": (is_map, "an object"),
}

COMPLETION: Rules = COMMON | {
    "prompt": (
        lambda v: is_text(v) or is_list(v),
        "a string, a list of strings, token ids, or a list of lists of them",
    ),
    "logprobs": (is_whole, "an integer"),
    "echo": (is_flag, "true or false"),
    "add_special_tokens": (is_flag, "true or false"),
}

STREAM_OPTIONS: Rules = {
    "include_usage": (is_flag, "true or false"),
    "continuous_usage_stats": (_only(False), "false"),
    "include_obfuscation": (_only(False), "false"),
}

HINTS: Rules = {
    "user": (is_text, "a string"),
    "metadata": (is_map, "an object"),
    "safety_identifier": (is_text, "a string"),
    "prompt_cache_key": (is_text, "a string"),
    "session_id": (is_text, "a string"),
    "parallel_tool_calls": (is_flag, "true or false"),
}

_NEUTRAL_ANYWHERE: Rules = {
    "store": (_only(False), "false"),
    "service_tier": (_only("auto", "default"), "'auto' or 'default'"),
    "response_format": (_text_format, "{'type': 'text'}"),
    "use_beam_search": (_only(False), "false"),
    "length_penalty": (_only(1, 1.0), "1"),
    "stream_interval": (_only(1), "1"),
    "return_prompt_text": (_only(False), "false"),
    "vllm_xargs": (_only({}), "{}"),
}

CHAT_NEUTRAL: Rules = _NEUTRAL_ANYWHERE | {
    "tools": (_only([]), "[]"),
    "functions": (_only([]), "[]"),
    "tool_choice": (_only("none", "auto"), "'none' or, without tools, 'auto'"),
    "function_call": (_only("none", "auto"), "'none' or, without functions, 'auto'"),
    "modalities": (_only(["text"]), "['text']"),
    "documents": (_only([]), "[]"),
    "reasoning_effort": (_only("none"), "'none'"),
    "verbosity": (_only("medium"), "'medium'"),
    "include_reasoning": (_only(True), "true"),
    "echo": (_only(False), "false"),
    "add_special_tokens": (_only(False), "false"),
}

COMPLETION_NEUTRAL: Rules = _NEUTRAL_ANYWHERE | {
    "suffix": (_only(""), "''"),
    "best_of": (_only(1), "1"),
}


def check_fields(body: Mapping[str, Any], handled: Rules, neutral: Rules) -> dict[str, Any]:
    """The fields that are not null, all known and of their types; RequestError names the first that is not."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in handled:
            check_type(name, value, handled)
        elif name in HINTS:
            check_type(name, value, HINTS)
        elif name in neutral:
            _check_neutral(name, value, neutral)
        elif name not in SAMPLING:
            raise _unknown(name, [*handled, *SAMPLING, *neutral, *HINTS])
    return given


def check_type(name: str, value: Any, rules: Rules, where: str = "") -> None:
    """RequestError unless `value` follows the rule of `name`."""
    rule, wanted = rules[name]
    if not rule(value):
        raise RequestError(f"{where}{name} must be {wanted} or null, got {kind(value)}.", param=where + name)


def check_stream_options(options: Mapping[str, Any]) -> None:
    """RequestError that names ``stream_options.<field>``."""
    for name, value in options.items():
        if name not in STREAM_OPTIONS:
            raise _unknown(name, STREAM_OPTIONS, "stream_options.")
        if value is not None:
            check_type(name, value, STREAM_OPTIONS, "stream_options.")


def _check_neutral(name: str, value: Any, neutral: Rules) -> None:
    rule, wanted = neutral[name]
    if not rule(value):
        message = f"{name} is not supported here yet: leave it out, or give {wanted}; got {kind(value)}."
        raise RequestError(message, param=name, code="unsupported_parameter")


def _unknown(name: str, known: Any, where: str = "") -> RequestError:
    near = difflib.get_close_matches(name[:64], list(known), n=1, cutoff=0.8)
    hint = f" Did you mean {near[0]!r}?" if near else " Leave it out."
    told = shown(name, 64)
    return RequestError(f"{where}{told} is not supported here.{hint}", param=where + told, code="unsupported_parameter")


def kind(value: Any) -> str:
    """A value for a message: short ones as they are, others by type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string '{shown(value, 40)}'"
    if isinstance(value, int | float):
        return str(value)[:40] if abs(value) < 1e30 else "a huge number"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else "null"
