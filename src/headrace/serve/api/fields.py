"""Every field that a request may carry: one table an API, from which come its checks, its errors and its documentation.

A row is a `Field`. What is in no table is refused by name; nothing is ignored. Null always equals absent.

SAMPLING   go to the sampler under their own names.
HINTS      say something about the request that cannot change its answer: checked, then dropped.
neutral    rows for what is not done here: accepted only with a value that changes nothing, so that no client is told
           less than it asked for.

Field names: OpenAI's API reference, and vLLM's extensions of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from headrace.base.rules import (
    Rule,
    Schema,
    anything,
    either,
    flag,
    integer,
    list_of,
    map_of,
    matching,
    nothing,
    nullable,
    number,
    one_of,
    open_object,
    record,
    refuse,
    refused,
    text,
    told,
    unknown,
)
from headrace.base.speculation import MOST
from headrace.core import sampling
from headrace.serve.api.formats import FORMATS
from headrace.serve.api.tools import TOOL_CHOICE, TOOLS

INT32 = 2**31 - 1
MAX_HINT = 4096  # characters of what is checked and dropped
MAX_ITEMS = 1 << 20
MAX_TEMPLATE = 1 << 17  # characters
MAX_VARIABLES = 128  # of a template, with names of so many characters
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Bounds(NamedTuple):
    """What of a served model decides about rules. reads: variables of its chat template.

    trusts_templates: requests may bring their own.
    """

    vocab_size: int
    max_logprobs: int
    max_model_len: int
    reads: frozenset[str] = frozenset()
    trusts_templates: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """One field. rule: what it may be, or a function of what the model allows. help: what it does, for its readers.

    refuses: why other values are refused, for what is not done here (see `neutral`). default: if there is one to tell.
    needs: another field that must be there too, and its value if it is not None.
    """

    rule: Rule | Callable[[Bounds], Rule]
    help: str
    refuses: str = ""
    default: Any = None
    needs: tuple[str, Any] | None = None

    def of(self, bounds: Bounds) -> Rule:
        """The rule for one served model."""
        return self.rule if isinstance(self.rule, Rule) else self.rule(bounds)

    def schema(self, bounds: Bounds, required: bool = False) -> Schema:
        """For the documentation."""
        rule = self.of(bounds)
        told = f"Not supported: {self.refuses} Only" if self.refuses else f"{self.help} Value"
        schema = {**(rule if required else nullable(rule)).schema, "description": f"{told}: {rule.wanted}."}
        return schema if self.default is None else {**schema, "default": self.default}


Fields = dict[str, Field]


def neutral(rule: Rule, why: str) -> Field:
    """A field of which only what changes nothing is accepted. why: the reason, for a reader whose value is refused."""
    return Field(rule, "", refuses=why)


def check_fields(body: Mapping[str, Any], fields: Fields, bounds: Bounds) -> dict[str, Any]:
    """The fields that are not null, all known and right; RequestError names the first that is not."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        field = fields.get(name)
        if field is None:
            unknown(name, fields)
        rule = field.of(bounds)
        if field.refuses and not rule.accepts(value):
            either_way = "leave it out" if rule is nothing else f"leave it out, or give {rule.wanted}"
            message = f"is not supported here: {field.refuses} Please {either_way}; got {told(value)}"
            refuse(name, message, code="unsupported_parameter")
        rule.check(name, value)
    for name in given:
        _check_needs(name, fields[name], given)
    return given


def _check_needs(name: str, field: Field, given: Mapping[str, Any]) -> None:
    if field.needs is None:
        return
    other, value = field.needs
    if other not in given or value not in (None, given[other]):
        refuse(name, f"needs {other}" + ("" if value is None else f": {told(value)}"))


def body_schema(fields: Fields, bounds: Bounds, required: Collection[str]) -> dict[str, Any]:
    """JSON schema of a body: what it must have first, what is not supported last."""
    needs = [_needs(name, *field.needs) for name, field in fields.items() if field.needs is not None]
    order = sorted(fields, key=lambda name: (name not in required, bool(fields[name].refuses)))
    return {
        "type": "object",
        "properties": {name: fields[name].schema(bounds, name in required) for name in order},
        "required": sorted(required),
        "additionalProperties": False,
        **({"allOf": needs} if needs else {}),
    }


def _needs(name: str, other: str, value: Any) -> Schema:
    there: Schema = {"not": {"type": "null"}}
    return {
        "if": {"properties": {name: there}, "required": [name]},
        "then": {"properties": {other: there if value is None else {"const": value}}, "required": [other]},
    }


def _sampled(name: str) -> Callable[[Bounds], Rule]:
    return lambda bounds: sampling.rules(bounds.vocab_size, bounds.max_logprobs)[name]


_SAMPLING_HELP: Mapping[str, str] = {
    "n": "How many choices to draw for each prompt.",
    "presence_penalty": "Lowers the logits of tokens that the answer already has.",
    "frequency_penalty": "Lowers the logits of tokens by how often the answer already has them.",
    "repetition_penalty": "Divides positive logits, multiplies negative ones, of tokens in prompt and answer.",
    "temperature": "Divides the logits; 0 takes the likeliest token.",
    "top_p": "Draws from the likeliest tokens that together have this probability.",
    "top_k": "Draws from so many of the likeliest tokens; 0 or -1: from all.",
    "min_p": "Draws from tokens at least this fraction as likely as the likeliest.",
    "seed": "With the same seed the same request has the same answer. Drawn, and told in the answer, when absent.",
    "stop": "Texts that end the answer, which does not hold them.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "Go on after the model's own end.",
    "min_tokens": "No end before so many tokens.",
    "skip_special_tokens": "Leave control tokens out of the text.",
    "spaces_between_special_tokens": "Only true: tokens are joined as they are.",
    "include_stop_str_in_output": "Keep the text or token that ended the answer.",
    "allowed_token_ids": "Draw from these tokens only.",
    "bad_words": "Texts whose tokens may not follow each other.",
    "repetition_detection": "End an answer that says a pattern of so many tokens again and again; its finish_reason is"
    " repetition.",
    "prompt_logprobs": "Log-probabilities of the prompt's tokens, with so many alternatives each.",
}
MAX_TEMPERATURE = 2
SAMPLING: Final[Fields] = {name: Field(_sampled(name), help) for name, help in _SAMPLING_HELP.items()} | {
    "temperature": Field(number(0, MAX_TEMPERATURE), _SAMPLING_HELP["temperature"]),
}

HINTS: Final[Fields] = {
    "user": Field(text(MAX_HINT), "Who asks, as the client calls them. Not used."),
    "metadata": Field(open_object(), "The client's own notes. Not used."),
    "safety_identifier": Field(text(MAX_HINT), "Who asks. Not used."),
    "prompt_cache_key": Field(text(MAX_HINT), "Not used: prefixes are found by their tokens."),
    "session_id": Field(text(MAX_HINT), "Not used: prefixes are found by their tokens."),
    "prompt_cache_retention": Field(one_of("in_memory", "in-memory", "24h"), "Not used: prefixes stay while they can."),
    "prompt_cache_options": Field(open_object(), "Not used: prefixes are found by their tokens."),
}

REQUEST_ID = "[A-Za-z0-9_.:-]{1,128}"
STREAM_OPTIONS = record({
    "include_usage": flag,
    "continuous_usage_stats": flag,
    "include_obfuscation": one_of(False),
})  # fmt: skip

_BIAS_KEY = matching("0|[1-9][0-9]{0,18}", "a token id in decimal")
_BIAS = map_of(_BIAS_KEY, number(-100, 100), sampling.MAX_BIASES, "token ids to numbers from -100 to 100")
_COUNT = integer(1, 2**63 - 1, says="an integer of at least 1")

MILLISECONDS = integer(1, 86_400_000, says="milliseconds from 1 to 86400000")

COMMON: Final[Fields] = {
    "model": Field(text(), "One of the names under which the model is served; that model, if absent."),
    "stream": Field(flag, "Send the answer in pieces, as server-sent events.", default=False),
    "stream_options": Field(STREAM_OPTIONS,
        "With stream only. include_usage: a last event with the usage; continuous_usage_stats: usage in all events.",
        needs=("stream", True),
    ),
    "logit_bias": Field(_BIAS, "Added to the logits of these tokens, by id."),
    "priority": Field(integer(-INT32, INT32), "Requests with smaller numbers run first.", default=0),
    "timeout_ms": Field(MILLISECONDS, "Ends the answer after so long; refused at once if none could begin by then."),
    "cache_salt": Field(text(512), "Prompts share cached prefixes only with prompts of the same salt."),
    "request_id": Field(
        matching(REQUEST_ID, "1 to 128 of the characters A-Za-z0-9_.:-"), "The request's id; goes before x-request-id."
    ),
    "stream_interval": Field(integer(1, INT32), "Tokens of a choice that are sent together in streams.", default=1),
    "truncate_prompt_tokens": Field(
        either(one_of(-1), integer(1, INT32)), "Cut longer prompts to so many tokens; -1: to what the context holds."
    ),
    "truncation_side": Field(
        one_of("left", "right"), "Which end is cut off; left if absent.", needs=("truncate_prompt_tokens", None)
    ),
    "best_of": Field(integer(1, sampling.MAX_CHOICES), "Only as much as n: all choices are told."),
    "return_prompt_text": Field(flag, "Tell the text that the prompt's tokens stand for (prompt_text).", default=False),
    "return_token_ids": Field(flag, "Tell the ids of the prompt's and the answer's tokens.", default=False),
    "num_speculative_tokens": Field(
        integer(0, MOST), "Most tokens that are guessed ahead of the model, 0: none; only the speed depends on it."
    ),
    "timings": Field(flag, "Tell where its time went: queue, chunks of the prompt, tokens, company.", default=False),
    "return_tokens_as_token_ids": Field(flag, "Call tokens token_id:N in log-probabilities.", default=False),
} | SAMPLING | {name: Field(rule, help) for name, (rule, help) in FORMATS.items()}  # fmt: skip

_NEUTRAL: Final[Fields] = {
    "store": neutral(one_of(False), "answers are not kept."),
    "service_tier": neutral(one_of("auto", "default"), "there is one tier."),
    "use_beam_search": neutral(one_of(False), "there is no beam search."),
    "length_penalty": neutral(one_of(1), "it belongs to beam search."),
    "vllm_xargs": neutral(record({}), "there are no plugins."),
    "mm_processor_kwargs": neutral(record({}), "the model reads text only."),
    "logprob_token_ids": neutral(list_of(anything, 0, of="ids"), "use logprobs for the likeliest tokens."),
    "kv_transfer_params": neutral(nothing, "the KV cache stays in this process."),
    "thinking_token_budget": neutral(nothing, "use max_tokens."),
}

_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_PART: Final[Schema] = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "refusal"]}, "text": {"type": "string"}, "refusal": {"type": "string"}},
    "oneOf": [{"properties": {"type": {"const": kind}}, "required": ["type", kind]} for kind in ("text", "refusal")],
}
_CALL: Final[Schema] = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["object", "null"]}},
            "required": ["name"],
        }
    },
    "required": ["function"],
}
_MESSAGE: Final[Schema] = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "examples": ["user", "assistant", "system", "developer", "tool"]},
        "content": {"anyOf": [_TEXT_OR_NULL, {"type": "array", "items": _PART}]},
        "name": _TEXT_OR_NULL,
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
        "tool_call_id": _TEXT_OR_NULL,
        "reasoning": _TEXT_OR_NULL,
        "reasoning_content": _TEXT_OR_NULL,
    },
    "required": ["role", "content"],
}
# Checked where it is rendered (`text.messages`); a template may refuse more, or read other roles.
MESSAGE = Rule("a message", _MESSAGE, lambda value: True)


def _alternatives(bounds: Bounds) -> Rule:
    return sampling.logprobs_rule(bounds.max_logprobs)


def _template_rule(bounds: Bounds) -> Rule:
    trusted = text(MAX_TEMPLATE, 1)
    return trusted if bounds.trusts_templates else refused("this server runs without --trust-request-chat-template")


@cache
def _documents_rule(bounds: Bounds) -> Rule:
    if "documents" in bounds.reads or bounds.trusts_templates:
        return list_of(open_object(), 1024, of="documents")
    return list_of(anything, 0, of="documents, as this model's template does not read them")


def _effort_rule(bounds: Bounds) -> Rule:
    return one_of(*EFFORTS) if "reasoning_effort" in bounds.reads else one_of("none")


CHAT: Final[Fields] = COMMON | {
    "messages": Field(list_of(MESSAGE, MAX_ITEMS, least=1, of="messages"), "The conversation."),
    "max_tokens": Field(_COUNT, "Most tokens of the answer; up to the context if absent."),
    "max_completion_tokens": Field(_COUNT, "Most tokens of the answer; goes before max_tokens."),
    "logprobs": Field(flag, "Tell each token's log-probability.", default=False),
    "top_logprobs": Field(_alternatives, "And so many likely ones.", needs=("logprobs", True)),
    "add_generation_prompt": Field(flag, "Let the template begin the assistant's turn.", default=True),
    "continue_final_message": Field(flag, "Go on with the last message.", default=False),
    "chat_template_kwargs": Field(
        map_of(text(MAX_VARIABLES, 1), anything, MAX_VARIABLES, "names to values"),
        "Further variables of the model's chat template.",
    ),
    "chat_template": Field(_template_rule, "A template in the place of the model's."),
    "documents": Field(_documents_rule, "The variable `documents` of templates that read it."),
    "add_special_tokens": Field(flag, "Add what the tokenizer adds to texts; templates write it.", default=False),
    "echo": Field(flag, "Say the last message again before its continuation, if it is the assistant's.", default=False),
    "tools": Field(TOOLS, "Functions that the model may call."),
    "tool_choice": Field(TOOL_CHOICE, "auto, the default with tools: as the model likes; required: some; or this one."),
    "parallel_tool_calls": Field(flag, "One answer may hold several calls.", default=True),
    "functions": neutral(list_of(anything, 0, of="functions"), "use tools."),
    "function_call": neutral(one_of("none", "auto"), "use tools and tool_choice."),
    "modalities": neutral(one_of(["text"]), "answers are text."),
    "audio": neutral(nothing, "answers are text."),
    "prediction": neutral(nothing, "there are no predicted outputs."),
    "moderation": neutral(nothing, "nothing is moderated."),
    "web_search_options": neutral(nothing, "nothing is searched for."),
    "reasoning_effort": Field(_effort_rule, "How much to think, for templates that read it; none: not at all."),
    "verbosity": neutral(one_of("medium"), "the model has no verbosity to set."),
    "include_reasoning": Field(flag, "Tell what the model thought before it answered.", default=True),
} | HINTS | _NEUTRAL  # fmt: skip


@cache
def _prompt_rule(bounds: Bounds) -> Rule:
    ids = list_of(sampling.token_id(bounds.vocab_size), MAX_ITEMS, least=1, of="token ids")
    return either(text(), ids, list_of(either(text(), ids), MAX_ITEMS, least=1, of="prompts"))


COMPLETION: Final[Fields] = COMMON | {
    "prompt": Field(_prompt_rule, "A text, token ids, or a list of texts and lists of ids."),
    "max_tokens": Field(
        integer(0, 2**63 - 1, says="an integer, 0 or more"),
        "Most tokens of the answer; 16 if neither the request nor the model says.",
    ),
    "logprobs": Field(_alternatives, "Log-probabilities, and so many likely ones."),
    "echo": Field(flag, "Say the prompt again before the answer.", default=False),
    "add_special_tokens": Field(flag, "Begin texts as the model was trained to see them begin.", default=True),
    "suffix": neutral(one_of(""), "nothing can be written before a given end."),
} | HINTS | _NEUTRAL  # fmt: skip
