"""/v1/responses: items in, the items that come next out. Nothing is kept: each request brings the whole conversation.

Owes: a request of this API as one of chat, under this API's names; answers as items and their events. Does not know:
what chat makes of it. Source: OpenAI's API reference, and vLLM's additions to it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import RequestError
from headrace.base.log import shown
from headrace.base.rules import (
    anything,
    either,
    flag,
    list_of,
    map_of,
    nothing,
    one_of,
    open_object,
    record,
    tagged,
    text,
)
from headrace.core.sequence import TIMEOUT
from headrace.serve.api import fields as f
from headrace.serve.api import logprobs as lp
from headrace.serve.api import response_shapes as shapes
from headrace.serve.api.answers import Turn, new_id
from headrace.serve.api.blocks import Block, Blocks, Change, Kind, Step
from headrace.serve.api.chat import ChatRequest, parse_chat
from headrace.serve.api.news import News
from headrace.serve.api.openapi import Operation
from headrace.serve.api.requests import Limits, checked
from headrace.serve.api.service import Service
from headrace.serve.api.shapes import ChatToken
from headrace.serve.api.tools import MAX_TOOLS
from headrace.serve.api.transcript import PASSED, Transcript, renamed
from headrace.serve.errors import Problem
from headrace.serve.net.http import error_response
from headrace.text.messages import call_arguments

if TYPE_CHECKING:
    from headrace.text import Tokenizer

MAX_ID = 512  # characters of ids and names that clients send back
MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"

_STATUS = one_of("in_progress", "completed", "incomplete")
_ID = text(MAX_ID)
_LEFT_OUT = list_of(anything, f.MAX_ITEMS)  # what answers carry and histories bring back: it cannot change the next one

_IN_TEXT = record(
    {"type": one_of("input_text"), "text": text(), "prompt_cache_breakpoint": open_object()}, ("type", "text")
)
_OUT_TEXT = record(
    {"type": one_of("output_text"), "text": text(), "annotations": _LEFT_OUT, "logprobs": _LEFT_OUT}, ("type", "text")
)
_PARTS = {
    "input_text": _IN_TEXT,
    "output_text": _OUT_TEXT,
    "refusal": record({"type": one_of("refusal"), "refusal": text()}, ("type", "refusal")),
}
_SUMMARY = record({"type": one_of("summary_text"), "text": text()}, ("type", "text"))
_THOUGHT = record({"type": one_of("reasoning_text"), "text": text()}, ("type", "text"))

_ITEMS = {
    "message": record(
        {
            "type": one_of("message"),
            "id": _ID,
            "status": _STATUS,
            "role": one_of("user", "assistant", "system", "developer"),
            "content": either(text(), list_of(tagged("type", _PARTS), f.MAX_ITEMS, of="parts")),
            "phase": one_of("commentary", "final_answer"),
        },
        ("role", "content"),
    ),
    "function_call": record(
        {
            "type": one_of("function_call"),
            "id": _ID,
            "status": _STATUS,
            "call_id": _ID,
            "name": _ID,
            "arguments": text(),
            "namespace": nothing,
            "caller": nothing,
        },
        ("type", "call_id", "name", "arguments"),
    ),
    "function_call_output": record(
        {
            "type": one_of("function_call_output"),
            "id": _ID,
            "status": _STATUS,
            "call_id": _ID,
            "output": either(text(), list_of(tagged("type", {"input_text": _IN_TEXT}), f.MAX_ITEMS, of="parts")),
            "name": _ID,
            "namespace": nothing,
            "caller": nothing,
        },
        ("type", "call_id", "output"),
    ),
    "reasoning": record(
        {
            "type": one_of("reasoning"),
            "id": _ID,
            "status": _STATUS,
            "summary": list_of(_SUMMARY, f.MAX_ITEMS, of="summaries"),
            "content": list_of(_THOUGHT, f.MAX_ITEMS, of="thoughts"),
            "encrypted_content": text(),
        },
        ("type",),
    ),
}

_FORMATS = {
    "text": record({"type": one_of("text")}, ("type",)),
    "json_object": record({"type": one_of("json_object")}, ("type",)),
    "json_schema": record(
        {
            "type": one_of("json_schema"),
            "name": text(64),
            "schema": open_object(),
            "description": text(f.MAX_HINT),
            "strict": flag,
        },
        ("type", "name", "schema"),
    ),
}
_FUNCTION = record(
    {
        "type": one_of("function"),
        "name": text(64, 1),
        "description": text(),
        "parameters": open_object(),
        "strict": flag,
    },
    ("type", "name"),
)
_CHOICE = record({"type": one_of("function"), "name": text(64, 1)}, ("type", "name"))

_PASSED = (*PASSED, "stop")

RESPONSES: f.Fields = {name: f.CHAT[name] for name in _PASSED} | {
    "input": f.Field(
        either(text(), list_of(tagged("type", _ITEMS, "message"), f.MAX_ITEMS, least=1, of="items")),
        "The conversation: what the user says, or messages, calls of functions, their outputs, reasoning.",
    ),
    "instructions": f.Field(text(), "A system message before the input."),
    "max_output_tokens": f.Field(f.CHAT["max_tokens"].rule, "Most tokens of the answer; up to the context if absent."),
    "text": f.Field(
        record({"format": tagged("type", _FORMATS), "verbosity": one_of("medium")}),
        "format: text, an object of JSON, or JSON of a schema.",
    ),
    "tools": f.Field(list_of(tagged("type", {"function": _FUNCTION}), MAX_TOOLS, of="tools"), "Functions to call."),
    "tool_choice": f.Field(either(one_of("none", "auto", "required"), _CHOICE), "Whether, or which, to call."),
    "parallel_tool_calls": f.Field(flag, "Whether several may be called at once.", default=True),
    "reasoning": f.Field(
        record({
            "effort": one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
            "summary": one_of("auto"),
            "generate_summary": one_of("auto"),
        }),
        "effort: as chat's reasoning_effort. There are no summaries: the reasoning itself is told.",
    ),
    "include": f.Field(
        list_of(one_of(LOGPROBS, _ENCRYPTED), 8),
        f"{LOGPROBS}: tell each token's. {_ENCRYPTED}: nothing more, reasoning is told as it is.",
    ),
    "top_logprobs": f.Field(f.CHAT["top_logprobs"].rule, f"And so many likely others; needs include: {LOGPROBS}."),
    "stream_options": f.Field(record({"include_obfuscation": one_of(False)}), "Of streams.", needs=("stream", True)),
    "metadata": f.Field(map_of(text(64), text(512), MAX_METADATA, "notes"), "The client's own; said again."),
    "user": f.Field(text(f.MAX_HINT), "Who asks, as the client calls them; said again."),
    "safety_identifier": f.Field(text(f.MAX_HINT), "Who asks; said again."),
    "prompt_cache_key": f.Field(text(f.MAX_HINT), "Said again; prefixes are found by their tokens."),
    "prompt_cache_retention": f.Field(one_of("in_memory", "24h"), "Not used: prefixes stay while there is room."),
    "store": f.neutral(one_of(False), "responses are not kept."),
    "previous_response_id": f.neutral(nothing, "responses are not kept: send the whole conversation as input."),
    "conversation": f.neutral(nothing, "conversations are not kept: send them as input."),
    "prompt": f.neutral(nothing, "no prompts are kept here."),
    "background": f.neutral(one_of(False), "an answer ends with its connection."),
    "truncation": f.neutral(one_of("disabled"), "nothing of the input is dropped."),
    "service_tier": f.CHAT["service_tier"],
    "max_tool_calls": f.neutral(nothing, "there are no built-in tools to be called."),
}  # fmt: skip

_ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "prompt_cache_key", "reasoning",
           "safety_identifier", "tools", "top_logprobs", "user")  # fmt: skip

# Beginnings of paths: chat's, and ours.
_NAMES = (
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
    ("tool_choice.function", "tool_choice"),
    ("tools[].function", "tools[]"),
)


OPERATION = Operation(
    "The items that come next in a conversation; nothing is kept.",
    body=RESPONSES,
    required=("input",),
    answer=shapes.ResponseObject,
    events=shapes.AnyEvent,
)
MISSING = Operation("Always 404: responses are not kept.", path={"id": text()}, errors=(404,))


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A checked request, and what of it the answer says again."""

    chat: ChatRequest
    echo: shapes.Echo


class Responses:
    """The endpoints of one served model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/responses"""
        service = self._service
        with service.desk.seat():
            given = await service.read(request, parse_response)
            chat = given.chat
            with renamed(_NAMES):
                ids = await service.prompts.of_chat(chat.conversation)
                turn = await service.turns(chat.conversation, chat.asked, ids)
                id, news = await service.submit(request, "resp_", chat.asked, [ids])
            reply = ResponseReply(id, service.names[0], given, news, turn(), service.tokenizer)
            return await service.answer(request, reply)

    async def missing(self, request: Request) -> Response:
        """GET, DELETE /v1/responses/{id}"""
        id = shown(request.path_params["id"], 64)
        message = f"There is no response `{id}`: responses are not kept here."
        return error_response(Problem(404, "invalid_request_error", message, code="response_not_found"))


def parse_response(body: Any, limits: Limits) -> ResponseRequest:
    """RequestError(param) for what cannot be served as asked, UnknownModel for another model's name."""
    given = checked(body, limits, RESPONSES)
    if "input" not in given:
        raise RequestError("input is missing: a text or a list of at least one item.", param="input")
    if given.get("top_logprobs") and LOGPROBS not in given.get("include", ()):
        raise RequestError(f"top_logprobs needs include: ['{LOGPROBS}'].", param="top_logprobs")
    with renamed(_NAMES):
        chat = parse_chat(_chat_body(given), limits)
    return ResponseRequest(chat, _echo(given, chat))


def _chat_body(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same request to /v1/chat/completions."""
    reasoning, shown_text = given.get("reasoning", {}), given.get("text", {})
    body = {name: given[name] for name in _PASSED if name in given} | {
        "messages": _messages(given),
        "max_completion_tokens": given.get("max_output_tokens"),
        "reasoning_effort": reasoning.get("effort"),
        "verbosity": shown_text.get("verbosity"),
        "response_format": _response_format(shown_text.get("format")),
        "tools": [_tool(tool) for tool in given["tools"]] if given.get("tools") else None,
        "tool_choice": _tool_choice(given.get("tool_choice")),
        "parallel_tool_calls": given.get("parallel_tool_calls"),
    }
    if LOGPROBS in given.get("include", ()):
        body |= {"logprobs": True, "top_logprobs": given.get("top_logprobs")}
    return body


def _response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form["type"] == "text":
        return None
    if form["type"] == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type" and v is not None}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


def _tool_choice(choice: Any) -> Any:
    return {"type": "function", "function": {"name": choice["name"]}} if isinstance(choice, dict) else choice


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    transcript = Transcript()
    if "instructions" in given:
        transcript.say("system", [given["instructions"]])
    if isinstance(given["input"], str):
        transcript.say("user", [given["input"]])
        return transcript.messages
    for i, item in enumerate(given["input"]):
        _add(transcript, item, f"input[{i}]")
    return transcript.messages


def _add(transcript: Transcript, item: Mapping[str, Any], path: str) -> None:
    match item.get("type") or "message":
        case "message":
            transcript.say(item["role"], _texts(item["content"]))
        case "function_call":
            transcript.call(item["call_id"], item["name"], call_arguments(item["arguments"], f"{path}.arguments"))
        case "function_call_output":
            transcript.result(item["call_id"], _texts(item["output"]))
        case "reasoning":
            transcript.think("\n".join(_texts(item.get("content") or item.get("summary") or [])))


def _texts(content: Any) -> list[str]:
    """The texts of parts."""
    return [content] if isinstance(content, str) else [part.get("text", part.get("refusal")) for part in content]


def _echo(given: Mapping[str, Any], chat: ChatRequest) -> shapes.Echo:
    params = chat.asked.params
    return shapes.Echo(
        **{name: given[name] for name in _ECHOED if name in given},
        temperature=params.temperature,
        top_p=params.top_p,
        text={"format": {"type": "text"}, **given.get("text", {})},
        tool_choice=given.get("tool_choice", "auto"),
    )


_PREFIXES = {Kind.TEXT: "msg_", Kind.REASONING: "rs_", Kind.CALL: "fc_"}
_encode = msgspec.json.Encoder().encode


class ResponseReply:
    """Answers /v1/responses: each block is an item."""

    def __init__(
        self, id: str, model: str, given: ResponseRequest, news: News, turn: Turn, tokenizer: Tokenizer
    ) -> None:
        self.asked, self.news = given.chat.asked, news
        self._blocks = Blocks(news, turn)
        self._head: dict[str, Any] = {
            **msgspec.structs.asdict(given.echo),
            "id": id,
            "created_at": int(time.time()),
            "model": model,
            "seed": news.streams[0].seed,
        }
        self._names = lp.TokenNames(tokenizer, given.chat.asked.tokens_as_ids)
        self._ids: list[str] = []
        self._events = 0

    async def whole(self) -> bytes:
        """See `Reply`."""
        await self._blocks.collect()
        return _encode(self._ended())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """See `Reply`."""
        yield self._begun()
        async for changes in self._blocks.changes():
            if changes:
                yield b"".join([self._sent(event) for change in changes for event in self._told(change)])
        yield self._lifecycle(self._ended())

    def failed(self, problem: Problem) -> bytes:
        """See `Reply`. The response as far as it came, then the error itself, which OpenAI's clients raise."""
        begun = b"" if self._events else self._begun()
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        response = self._response("failed", error=shapes.Failure(code=code, message=problem.message))
        what: dict[str, Any] = {"code": problem.code, "message": problem.message, "param": problem.param}
        error = shapes.ErrorEvent(**what, error={"type": problem.type, **what})
        return begun + self._lifecycle(response) + self._sent(error)

    def _begun(self) -> bytes:
        response = self._response("in_progress")
        return self._sent(shapes.Created(response=response)) + self._lifecycle(response)

    def _lifecycle(self, response: shapes.ResponseObject) -> bytes:
        return self._sent(shapes.OF_STATUS[response.status](response=response))

    def _sent(self, event: shapes.Event) -> bytes:
        """One server-sent event."""
        event.sequence_number = self._events
        self._events += 1
        return f"event: {event.kind}\ndata: ".encode() + _encode(event) + b"\n\n"

    def _told(self, change: Change) -> Iterator[shapes.Event]:
        block = change.block
        where: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        if change.step is Step.MORE:
            yield self._more(change, where)
        elif change.step is Step.BEGIN:
            yield shapes.ItemAdded(output_index=block.index, item=self._item(block, "in_progress"))
            if block.kind is not Kind.CALL:
                yield shapes.PartAdded(part=self._part(block), **where)
        else:
            yield self._done(block, where)
            if block.kind is not Kind.CALL:
                yield shapes.PartDone(part=self._part(block), **where)
            yield shapes.ItemDone(output_index=block.index, item=self._item(block, _status(block)))

    def _more(self, change: Change, where: dict[str, Any]) -> shapes.Event:
        match change.block.kind:
            case Kind.TEXT:
                return shapes.TextDelta(delta=change.text, logprobs=self._logprobs_of(change.logprobs), **where)
            case Kind.REASONING:
                return shapes.ReasoningDelta(delta=change.text, **where)
            case Kind.CALL:
                return shapes.ArgumentsDelta(delta=change.text, **where)

    def _done(self, block: Block, where: dict[str, Any]) -> shapes.Event:
        match block.kind:
            case Kind.TEXT:
                return shapes.TextDone(text=block.text, logprobs=self._logprobs_of(block.logprobs), **where)
            case Kind.REASONING:
                return shapes.ReasoningDone(text=block.text, **where)
            case Kind.CALL:
                return shapes.ArgumentsDone(name=block.name, arguments=block.text, **where)

    def _item(self, block: Block, status: str) -> shapes.Item:
        """A block as an item; parts come only when it is done, for clients add them as they hear of them."""
        head: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind is Kind.CALL:
            return shapes.FunctionCall(**head, call_id=block.call, name=block.name, arguments=block.text)
        parts: list[Any] = [] if status == "in_progress" else [self._part(block)]
        if block.kind is Kind.TEXT:
            return shapes.OutputMessage(**head, content=parts)
        return shapes.ReasoningItem(**head, content=parts)

    def _part(self, block: Block) -> shapes.OutputText | shapes.ReasoningText:
        if block.kind is Kind.REASONING:
            return shapes.ReasoningText(text=block.text)
        return shapes.OutputText(text=block.text, logprobs=self._logprobs_of(block.logprobs))

    def _id(self, block: Block) -> str:
        while len(self._ids) <= block.index:
            self._ids.append(new_id(_PREFIXES[self._blocks.all[len(self._ids)].kind]))
        return self._ids[block.index]

    def _logprobs_of(self, steps: list[Any]) -> list[ChatToken]:
        count = self.asked.logprobs
        return [] if count is None else lp.chat_logprobs(steps, self._names, count).content

    def _ended(self) -> shapes.ResponseObject:
        if self._blocks.finish_reason == "length":
            reason = TIMEOUT if self._blocks.stop_reason == TIMEOUT else "max_output_tokens"
            return self._response("incomplete", incomplete_details=shapes.Incomplete(reason=reason))
        return self._response("completed", completed_at=int(time.time()))

    def _response(self, status: str, **more: Any) -> shapes.ResponseObject:
        begun = status == "in_progress"
        output = [] if begun else [self._item(block, _status(block)) for block in self._blocks.all]
        usage = None if begun else self._usage()
        timings = self._blocks.timings() if self.asked.timings else UNSET
        return shapes.ResponseObject(**self._head, status=status, output=output, usage=usage, timings=timings, **more)

    def _usage(self) -> shapes.ResponseUsage:
        blocks, cost = self._blocks, self._blocks.cost()
        return shapes.ResponseUsage(
            input_tokens=blocks.input_tokens,
            input_tokens_details=shapes.InputDetails(cached_tokens=blocks.cached_tokens),
            output_tokens=blocks.output_tokens,
            output_tokens_details=shapes.OutputDetails(reasoning_tokens=blocks.reasoning_tokens or 0),
            total_tokens=blocks.input_tokens + blocks.output_tokens,
            cost=UNSET if cost is UNSET else cost.prompt + cost.completion,
            cost_details=cost,
        )


def _status(block: Block) -> str:
    return "completed" if block.whole else "incomplete"
