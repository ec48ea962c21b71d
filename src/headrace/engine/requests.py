"""The check that every request passes before an engine sees it: a caller's mistakes end here, with the field's name."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import ContextTooLong, RequestError
from headrace.base.rules import is_whole
from headrace.core.sampling import SamplingParams
from headrace.engine.messages import NO_TERMS, Add, ModelInfo, Terms
from headrace.text import Tokenizer
from headrace.text.grammar import Grammar, source


def checked(
    prompt: Sequence[int],
    params: SamplingParams,
    info: ModelInfo,
    tokenizer: Tokenizer,
    *,
    request_id: str,
    terms: Terms = NO_TERMS,
    grammar: Grammar | None = None,
) -> Add:
    """The request as the engine takes it; RequestError (ContextTooLong) names what to change.

    grammar: of `params.structured_outputs`, if it has been made already.
    """
    params = dataclasses.replace(params)
    params.validate(info.vocab_size, info.max_logprobs)
    check_prompt(prompt, params, info)
    check_terms(terms)
    if params.bad_words:
        words = [ids for word in params.bad_words for ids in spellings(word, tokenizer)]
        params.bad_token_ids = (params.bad_token_ids or []) + words
    if params.structured_outputs is not None:
        grammar = grammar or source(params.structured_outputs)
        params.structured_outputs = None  # the grammar says it
    return Add(
        request_id=request_id,
        prompt=list(prompt),
        params=params,
        seed=(secrets.randbits(63) if params.seed is None else params.seed) & (2**64 - 1),
        stop_ids=sorted(i for i in tokenizer.stop_ids if i < info.vocab_size),
        terms=terms,
        arrival=time.monotonic(),
        grammar=grammar,
    )


def check_terms(terms: Terms) -> None:
    """RequestError names what cannot be."""
    priority = terms.priority
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority must be a 32-bit integer, got {priority!r}", param="priority")
    if not isinstance(terms.cache_salt, str):
        raise RequestError(f"cache_salt must be a string, got {terms.cache_salt!r}", param="cache_salt")
    if not isinstance(terms.tenant, str):
        raise RequestError(f"tenant must be a string, got {terms.tenant!r}", param="tenant")
    if not 0 < terms.weight < math.inf:
        raise RequestError(f"weight must be a number above 0, got {terms.weight!r}", param="weight")
    if terms.drafted is not None and not (is_whole(terms.drafted) and terms.drafted >= 0):
        raise RequestError(f"drafted must be a number of tokens, got {terms.drafted!r}", param="drafted")
    if not 0 <= terms.deadline < math.inf:
        raise RequestError(f"deadline must be seconds from 0 on, got {terms.deadline!r}", param="deadline")


OWN = (
    "skip_special_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def own_defaults(generation: Mapping[str, Any]) -> tuple[dict[str, Any], int | None, list[str]]:
    """What a generation_config.json asks of the sampler, its max_new_tokens, and the keys with values of no use.

    Other keys are not read, as in vLLM.
    """
    usable: dict[str, Any] = {}
    refused: list[str] = []
    for name in (name for name in OWN if generation.get(name) is not None):
        try:
            SamplingParams(**{name: generation[name]}).validate()
            usable[name] = generation[name]
        except RequestError:
            refused.append(name)
    most = generation.get("max_new_tokens")
    return usable, most if is_whole(most) and most > 0 else None, refused


def check_prompt(prompt: Sequence[int], params: SamplingParams, info: ModelInfo) -> None:
    """Ids within the vocabulary, at least one, and no more than the context holds."""
    if not prompt:
        raise RequestError("the prompt is empty: it must have at least one token", param="prompt")
    room = info.max_model_len - (0 if params.max_tokens == 0 else 1)
    if len(prompt) > room:
        raise ContextTooLong(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt contains "
            f"{len(prompt)} input tokens"
            + (" and an answer needs room for at least one more" if len(prompt) == info.max_model_len else "")
            + ". Please reduce the length of the input prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < info.vocab_size:
            raise RequestError(
                f"the prompt holds {token!r}, which is no token id: ids are integers from 0 to {info.vocab_size - 1}",
                param="prompt",
            )


def spellings(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """How a bad word can be spelled in tokens: at the start of a text, and after a space."""
    both = [tokenizer.encode(text, add_special_tokens=False, parse_special=False) for text in (word, " " + word)]
    unique = [ids for i, ids in enumerate(both) if ids and ids not in both[:i]]
    if not unique:
        raise RequestError(f"bad_words holds {word!r}, which has no tokens", param="bad_words")
    return unique
