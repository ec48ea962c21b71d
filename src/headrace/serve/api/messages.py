"""/v1/messages: Anthropic's API. A conversation in, the next message out, in blocks.

Owes: a request of this API as one of chat, under this API's names; answers as blocks and their events. Does not know:
what chat makes of it. Source: Anthropic's API reference; the sampling fields that it lacks are vLLM's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
import pydantic_core
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import RequestError
from headrace.base.rules import (
    anything,
    either,
    flag,
    integer,
    list_of,
    nothing,
    number,
    one_of,
    open_object,
    record,
    refuse,
    tagged,
    text,
)
from headrace.core.sampling import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from headrace.serve.api import fields as f
from headrace.serve.api import message_shapes as shapes
from headrace.serve.api.answers import Turn
from headrace.serve.api.blocks import Block, Blocks, Change, Kind, Step
from headrace.serve.api.chat import SWITCHES, ChatRequest, parse_chat
from headrace.serve.api.news import News
from headrace.serve.api.openapi import Operation
from headrace.serve.api.requests import Limits, checked
from headrace.serve.api.service import Service
from headrace.serve.api.tools import MAX_TOOLS
from headrace.serve.api.transcript import PASSED, Transcript, renamed
from headrace.serve.errors import AnthropicError, Problem
from headrace.serve.net.http import json_response
from headrace.serve.watch.accounts import Timings
from headrace.text.dialect import Dialect

MAX_ID = 512  # characters of ids and names that clients send back

_ID = text(MAX_ID)
_CACHE = record({"type": one_of("ephemeral"), "ttl": one_of("5m", "1h")}, ("type",))
_DIRECT = record({"type": one_of("direct")}, ("type",))
_TEXT = record(
    {
        "type": one_of("text"),
        "text": text(),
        "cache_control": _CACHE,
        "citations": list_of(anything, 0, of="citations"),
    },
    ("type", "text"),
)
_TOOL_RESULT = record(
    {
        "type": one_of("tool_result"),
        "tool_use_id": _ID,
        "content": either(text(), list_of(tagged("type", {"text": _TEXT}), f.MAX_ITEMS, of="blocks")),
        "is_error": flag,
        "cache_control": _CACHE,
        "toolset_name": nothing,
    },
    ("type", "tool_use_id"),
)
_TOOL_USE = record(
    {
        "type": one_of("tool_use"),
        "id": _ID,
        "name": _ID,
        "input": open_object(),
        "cache_control": _CACHE,
        "caller": _DIRECT,
        "toolset_name": nothing,
    },
    ("type", "id", "name", "input"),
)
_THINKING = record(
    {"type": one_of("thinking"), "thinking": text(), "signature": text()},
    ("type", "thinking"),
)
_REDACTED = record({"type": one_of("redacted_thinking"), "data": text()}, ("type", "data"))

_SAYS = {
    "user": {"text": _TEXT, "tool_result": _TOOL_RESULT},
    "assistant": {"text": _TEXT, "tool_use": _TOOL_USE, "thinking": _THINKING, "redacted_thinking": _REDACTED},
    "system": {"text": _TEXT},
}
_MESSAGES = {
    role: record(
        {"role": one_of(role), "content": either(text(), list_of(tagged("type", kinds), f.MAX_ITEMS, of="blocks"))},
        ("role", "content"),
    )
    for role, kinds in _SAYS.items()
}
_FORMAT = record(
    {"type": one_of("json_schema"), "schema": open_object()},
    ("type", "schema"),
)
_TOOL = record(
    {
        "type": one_of("custom"),
        "name": text(64, 1),
        "description": text(),
        "input_schema": open_object(),
        "strict": flag,
        "cache_control": _CACHE,
        "eager_input_streaming": flag,
        "defer_loading": one_of(False),
        "allowed_callers": one_of(["direct"]),
    },
    ("name", "input_schema"),
)
_PARALLEL = {"disable_parallel_tool_use": flag}
_CHOICES = {
    "auto": record({"type": one_of("auto"), **_PARALLEL}, ("type",)),
    "any": record({"type": one_of("any"), **_PARALLEL}, ("type",)),
    "tool": record({"type": one_of("tool"), "name": text(64, 1), **_PARALLEL}, ("type", "name")),
    "none": record({"type": one_of("none")}, ("type",)),
}
_THINKS = {
    "disabled": record({"type": one_of("disabled")}, ("type",)),
    "enabled": record(
        {"type": one_of("enabled"), "budget_tokens": integer(1, 2**63 - 1), "display": one_of("summarized")},
        ("type", "budget_tokens"),
    ),
    "adaptive": record({"type": one_of("adaptive"), "display": one_of("summarized")}, ("type",)),
}

_INPUT: f.Fields = {
    "model": f.CHAT["model"],
    "messages": f.Field(list_of(tagged("role", _MESSAGES), f.MAX_ITEMS, least=1, of="messages"), "The conversation."),
    "system": f.Field(either(text(), list_of(tagged("type", {"text": _TEXT}), f.MAX_ITEMS, of="blocks")), "Before it."),
    "tools": f.Field(list_of(tagged("type", {"custom": _TOOL}, "custom"), MAX_TOOLS, of="tools"), "Tools to use."),
    "tool_choice": f.Field(tagged("type", _CHOICES), "Whether, or which, to use."),
    "thinking": f.Field(
        tagged("type", _THINKS),
        "Whether to think first, for models that can. budget_tokens: not used, max_tokens bounds all; no summaries.",
    ),
    "output_config": f.Field(
        record({"format": _FORMAT, "effort": one_of("low", "medium", "high", "xhigh", "max")}),
        "format: JSON of a schema. effort: as chat's reasoning_effort.",
    ),
    "output_format": f.Field(_FORMAT, "The older name of output_config.format."),
    "cache_control": f.Field(_CACHE, "Not used, here and in blocks: prefixes are found by their tokens."),
    "speed": f.neutral(one_of("standard"), "there is one speed."),
}  # fmt: skip

_STOPS = list_of(text(MAX_STOP_CHARACTERS, 1), MAX_STOP_STRINGS, of="strings")
MESSAGES: f.Fields = {name: f.CHAT[name] for name in PASSED} | _INPUT | {
    "max_tokens": f.Field(f.CHAT["max_tokens"].rule, "Most tokens of the answer; cut to what the context holds."),
    "stop_sequences": f.Field(_STOPS, "Texts that end the answer, which does not hold them."),
    "temperature": f.Field(number(0, 1), "Divides the logits; 0 takes the likeliest token."),
    "metadata": f.Field(record({"user_id": text(f.MAX_HINT)}), "Not used."),
    "service_tier": f.neutral(one_of("auto", "standard_only"), "there is one tier."),
}  # fmt: skip

# Beginnings of paths: chat's, and ours.
_NAMES = (
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    ("continue_final_message", "messages"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("tool_choice.function", "tool_choice"),
    ("tools[].function.parameters", "tools[].input_schema"),
    ("tools[].function", "tools[]"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
)

CREATE = Operation(
    "The next message of a conversation, as Anthropic's API has it.",
    body=MESSAGES,
    required=("messages", "max_tokens"),
    answer=shapes.MessageAnswer,
    events=shapes.AnyEvent,
    error=AnthropicError,
)
COUNT = Operation(
    "How many tokens a conversation has.",
    body=_INPUT,
    required=("messages",),
    answer=shapes.TokenCount,
    error=AnthropicError,
)


class Messages:
    """The endpoints of one served model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/messages"""
        service = self._service
        with service.desk.seat():
            given = await service.read(request, parse_message)
            with renamed(_NAMES):
                ids = await service.prompts.of_chat(given.conversation)
                turn = await service.turns(given.conversation, given.asked, ids)
                id, news = await service.submit(request, "msg_", given.asked, [ids])
            reply = MessageReply(id, service.names[0], given, news, turn(), request.state.request_id)
            return await service.answer(request, reply)

    async def count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        service = self._service
        with service.desk.seat():
            given = await service.read(request, parse_count)
            with renamed(_NAMES):
                ids = await service.prompts.of_chat(given.conversation)
            return json_response(_encode(shapes.TokenCount(input_tokens=len(ids))))


def parse_message(body: Any, limits: Limits) -> ChatRequest:
    """RequestError(param) for what cannot be served as asked, UnknownModel for another model's name."""
    given = checked(body, limits, MESSAGES)
    if "max_tokens" not in given:
        raise RequestError("max_tokens is missing: an integer of at least 1.", param="max_tokens")
    return _chat(given, limits)


def parse_count(body: Any, limits: Limits) -> ChatRequest:
    """As `parse_message`."""
    return _chat(checked(body, limits, _INPUT), limits)


def _chat(given: Mapping[str, Any], limits: Limits) -> ChatRequest:
    if "messages" not in given:
        raise RequestError("messages is missing: a list of at least one message.", param="messages")
    with renamed(_NAMES):
        return parse_chat(_chat_body(given, limits.dialect), limits)


def _chat_body(given: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The same request to /v1/chat/completions."""
    config = given.get("output_config", {})
    choice = given.get("tool_choice", {})
    thinks = given.get("thinking", {}).get("type")
    switches = {} if thinks in (None, "disabled") else _switches(dialect)
    return {name: given[name] for name in PASSED if name in given} | {
        **_messages(given),
        "max_completion_tokens": given.get("max_tokens"),
        "stop": given.get("stop_sequences"),
        "reasoning_effort": "none" if thinks == "disabled" else config.get("effort"),
        "chat_template_kwargs": {**switches, **given.get("chat_template_kwargs", {})},
        "response_format": _response_format(config.get("format") or given.get("output_format")),
        "tools": [_tool(tool) for tool in given["tools"]] if given.get("tools") else None,
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
    }


def _switches(dialect: Dialect) -> dict[str, bool]:
    """Variables by which the template lets the model think; none for a model that always does."""
    switches = {name: True for name in SWITCHES if name in dialect.variables}
    if not switches and dialect.thinking is None:
        why = "must be 'disabled' with this model: its chat template knows no thinking"
        refuse("thinking.type", why, code="unsupported_parameter")
    return switches


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form["schema"], "strict": True}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    more = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | more}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return "required" if kind == "any" else kind


def _messages(given: Mapping[str, Any]) -> dict[str, Any]:
    """The messages, and whether the last is to be gone on with."""
    transcript = Transcript(joined=("user", "assistant"))
    if given.get("system"):
        transcript.say("system", _texts(given["system"]))
    for message in given["messages"]:
        _add(transcript, message)
    last = transcript.messages[-1]
    if last["role"] != "assistant":
        return {"messages": transcript.messages}
    where = f"messages[{len(given['messages']) - 1}].content"
    if "tool_calls" in last:
        refuse(where, "uses tools: their results must follow, in a message of the user's")
    if not any(part["text"] for part in last["content"]):
        if "reasoning" in last:
            refuse(where, "must hold text for the answer to go on with")
        return {"messages": transcript.messages[:-1]}
    return {"messages": transcript.messages, "add_generation_prompt": False, "continue_final_message": True}


def _add(transcript: Transcript, message: Mapping[str, Any]) -> None:
    role, content = message["role"], message["content"]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role != "user" or not blocks:
        transcript.say(role, [])  # a message, though nothing of it may be shown
    for block in blocks:
        match block["type"]:
            case "text":
                transcript.say(role, [block["text"]])
            case "thinking":
                transcript.think(block["thinking"])
            case "tool_use":
                transcript.call(block["id"], block["name"], block["input"])
            case "tool_result":
                transcript.result(block["tool_use_id"], _texts(block.get("content") or ""))


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [block["text"] for block in content]


_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_encode = msgspec.json.Encoder().encode


class MessageReply:
    """Answers /v1/messages."""

    def __init__(self, id: str, model: str, given: ChatRequest, news: News, turn: Turn, request_id: str) -> None:
        self.asked, self.news = given.asked, news
        self._id, self._model, self._request_id = id, model, request_id
        self._blocks = Blocks(news, turn)

    async def whole(self) -> bytes:
        """See `Reply`."""
        await self._blocks.collect()
        return _encode(self._message([_block(block) for block in self._blocks.all], self._ending()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """See `Reply`."""
        begun = False
        async for changes in self._blocks.changes():
            head = b"" if begun else self._begun()
            begun = True
            yield head + b"".join([_sent(_told(change)) for change in changes])
        ended = shapes.MessageDelta(self._ending(), self._usage(), self._timings())
        yield _sent(ended) + _sent(shapes.MessageStop())

    def failed(self, problem: Problem) -> bytes:
        """See `Reply`."""
        return b"event: error\ndata: " + problem.anthropic_json(self._request_id) + b"\n\n"

    def _begun(self) -> bytes:
        """It waits for the first news, which tells how much was cached."""
        nothing_yet = shapes.Ending(stop_reason=None, stop_sequence=None)
        return _sent(shapes.MessageStart(self._message([], nothing_yet))) + _sent(shapes.Ping())

    def _message(self, content: list[shapes.ContentBlock], ending: shapes.Ending) -> shapes.MessageAnswer:
        return shapes.MessageAnswer(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=self._usage(),
            seed=self.news.streams[0].seed,
            timings=self._timings(),
        )

    def _timings(self) -> Timings | UnsetType:
        return self._blocks.timings() if self.asked.timings else UNSET

    def _ending(self) -> shapes.Ending:
        reason, by = self._blocks.finish_reason, self._blocks.stop_reason
        if reason == "stop" and isinstance(by, str):
            return shapes.Ending(stop_reason="stop_sequence", stop_sequence=by)
        return shapes.Ending(stop_reason=_REASONS.get(reason or "", "end_turn"), stop_sequence=None)

    def _usage(self) -> shapes.MessageUsage:
        blocks, cost = self._blocks, self._blocks.cost()
        thought = blocks.reasoning_tokens
        return shapes.MessageUsage(
            input_tokens=blocks.input_tokens - blocks.cached_tokens,
            output_tokens=blocks.output_tokens,
            cache_read_input_tokens=blocks.cached_tokens,
            output_tokens_details=UNSET if thought is None else shapes.ThinkingDetails(thinking_tokens=thought),
            cost=UNSET if cost is UNSET else cost.prompt + cost.completion,
            cost_details=cost,
        )


def _sent(event: shapes.Event) -> bytes:
    """One server-sent event."""
    return f"event: {event.kind}\ndata: ".encode() + _encode(event) + b"\n\n"


def _told(change: Change) -> shapes.Event:
    block = change.block
    if change.step is Step.BEGIN:
        return shapes.BlockStart(block.index, _block(block))
    if change.step is Step.END:
        return shapes.BlockStop(block.index)
    return shapes.BlockDelta(block.index, _DELTAS[block.kind](change.text))


_DELTAS: dict[Kind, Any] = {
    Kind.TEXT: shapes.TextDelta,
    Kind.REASONING: shapes.ThinkingDelta,
    Kind.CALL: shapes.InputDelta,
}


def _block(block: Block) -> shapes.ContentBlock:
    match block.kind:
        case Kind.TEXT:
            return shapes.TextBlock(text=block.text)
        case Kind.REASONING:
            return shapes.ThinkingBlock(thinking=block.text)
        case Kind.CALL:
            return shapes.ToolUseBlock(id=block.call, name=block.name, input=_input(block.text))


def _input(arguments: str) -> dict[str, Any]:
    """What there is of arguments that were cut off: the members that are whole, as Anthropic's clients read them."""
    try:
        given = pydantic_core.from_json(arguments, allow_partial=True) if arguments else {}
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}
