"""A decoded JSON body becomes a checked request, or a `RequestError` that names the field.

Owes: types, ranges, defaults (request, then the model's generation_config.json, then OpenAI's). Does not know: HTTP,
tokenizers, templates. Messages are checked where they are rendered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.base.errors import ContextTooLong, RequestError, UnknownModel
from headrace.base.log import shown
from headrace.core.sampling import SamplingParams
from headrace.serve.api import fields as f
from headrace.serve.api.formats import Names, form_of
from headrace.serve.api.transcript import renamed
from headrace.text.dialect import PLAIN, Dialect


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model sets. names: under which it is served. defaults: sampling fields from its own file.

    max_new_tokens: of its file, or None. trusts_templates: requests may bring their own chat templates.
    any_name: requests may call the model what they like.
    vocab_size: ids that a request may name are 0..vocab_size-1. dialect: how it writes calls and reasoning.
    """

    names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    defaults: Mapping[str, Any] | None = None
    max_new_tokens: int | None = None
    trusts_templates: bool = False
    dialect: Dialect = PLAIN
    any_name: bool = False

    @property
    def bounds(self) -> f.Bounds:
        """What decides about rules."""
        reads, trusts = self.dialect.variables, self.trusts_templates
        return f.Bounds(self.vocab_size, self.max_logprobs, self.max_model_len, reads, trusts)


@dataclass(frozen=True, slots=True)
class Cut:
    """How longer prompts are cut: to `most` tokens, None for what the context holds; `side`: the end that goes."""

    most: int | None
    side: str = "left"

    def of(self, ids: list[int], room: int) -> list[int]:
        """What is left of a prompt."""
        most = room if self.most is None else self.most
        return ids if len(ids) <= most else ids[-most:] if self.side == "left" else ids[:most]


@dataclass(frozen=True, slots=True)
class Asked:
    """What both kinds of request have in common. logprobs: alternatives to show a token; None: no logprobs.

    prompt_logprobs: the client asked for them by that name. timeout_ms: from the request's arrival; None: no limit.
    interval: tokens of a choice that are sent together. drafted: most tokens to guess ahead; None: as the server does.
    form_names: how the client calls `params.structured_outputs`.
    """

    params: SamplingParams
    form_names: Names
    stream: bool
    include_usage: bool
    usage_always: bool
    interval: int
    request_id: str
    logprobs: int | None
    prompt_logprobs: bool
    priority: int
    timeout_ms: int | None
    cache_salt: str
    prompt_text: bool
    token_ids: bool
    tokens_as_ids: bool
    timings: bool = False
    drafted: int | None = None


def checked(body: Any, limits: Limits, table: f.Fields) -> dict[str, Any]:
    """The fields of a body that are not null, all of them in `table` and right."""
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    model = body.get("model")
    if isinstance(model, str) and model and not limits.any_name and model not in limits.names:
        names = ", ".join(limits.names)
        raise UnknownModel(f"The model `{shown(model)}` does not exist. Valid aliases: {names}.", param="model")
    given = f.check_fields(body, table, limits.bounds)
    if "best_of" in given and given["best_of"] != given.get("n", 1):
        raise RequestError("best_of must equal n: all choices are told, none is picked.", param="best_of")
    return given


def asked_of(given: Mapping[str, Any], limits: Limits, max_tokens: int | None, logprobs: int | None) -> Asked:
    """max_tokens: None, as absent: up to the context. More than the context holds is cut to it by the engine."""
    stream, options = given.get("stream", False), given.get("stream_options", {})
    chosen = {**(limits.defaults or {}), **{name: given[name] for name in f.SAMPLING if name in given}}
    params = _params({**chosen, "max_tokens": max_tokens, "logit_bias": _logit_bias(given.get("logit_bias"))})
    form = form_of(given)
    params.structured_outputs = form.wanted
    params.logprobs = None if logprobs is None else min(logprobs, limits.vocab_size)
    with renamed(form.names):
        params.validate(limits.vocab_size, limits.max_logprobs)
    if stream and params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not sent in streams: ask with stream: false.", param="prompt_logprobs")
    if params.max_tokens is None and limits.max_new_tokens is not None:
        params.max_tokens = max(limits.max_new_tokens, params.min_tokens)
    return Asked(
        params=params,
        form_names=form.names,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        usage_always=bool(options.get("continuous_usage_stats")),
        interval=given.get("stream_interval", 1),
        request_id=given.get("request_id", ""),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs is not None,
        priority=given.get("priority", 0),
        timeout_ms=given.get("timeout_ms"),
        cache_salt=given.get("cache_salt", ""),
        prompt_text=given.get("return_prompt_text", False),
        token_ids=given.get("return_token_ids", False),
        tokens_as_ids=given.get("return_tokens_as_token_ids", False),
        timings=given.get("timings", False),
        drafted=given.get("num_speculative_tokens"),
    )


def cut_of(given: Mapping[str, Any]) -> Cut | None:
    """How the request's prompts are to be cut, if they are."""
    most = given.get("truncate_prompt_tokens")
    return None if most is None else Cut(None if most == -1 else most, given.get("truncation_side", "left"))


_PARAMS = {field.name for field in fields(SamplingParams)}


def _params(chosen: Mapping[str, Any]) -> SamplingParams:
    assert chosen.keys() <= _PARAMS
    return SamplingParams(**chosen)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON knows only strings as keys."""
    return None if bias is None else {int(key): value for key, value in bias.items()}


def check_length(tokens: int, most: int, param: str, exact: bool = True) -> None:
    """ContextTooLong, in the words that clients look for, if a prompt cannot fit; `exact` False: so many, or more."""
    if tokens > most:
        count = str(tokens) if exact else f"at least {tokens}"
        raise ContextTooLong(
            f"This model's maximum context length is {most} tokens. However, your prompt contains {count} input tokens"
            ", which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            param=param,
            code="context_length_exceeded",
        )
