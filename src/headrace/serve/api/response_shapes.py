"""What /v1/responses sends over the wire, field by field, as OpenAI's API reference has it. Ours are `seed` and
`timings`, after OpenRouter `cost`."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from headrace.serve.api.shapes import ChatToken
from headrace.serve.watch.accounts import CostDetails, Timings


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatToken] = []


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """arguments: JSON text of an object."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


Item = OutputMessage | ReasoningItem | FunctionCall


class InputDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    cost: float | UnsetType = UNSET
    cost_details: CostDetails | UnsetType = UNSET


class Incomplete(Struct, frozen=True, kw_only=True):
    reason: str


class Failure(Struct, frozen=True, kw_only=True):
    code: str
    message: str


class Echo(Struct, frozen=True, kw_only=True):
    """What was asked, said again in the answer."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] = {}
    safety_identifier: str | None = None
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float
    user: str | None = None


class ResponseObject(Echo, frozen=True, kw_only=True):
    """A response, done or not. created_at, completed_at: seconds since 1970."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    model: str
    output: list[Item]
    usage: ResponseUsage | None = None
    seed: int
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"
    timings: Timings | UnsetType = UNSET


class Event(Struct, kw_only=True, tag_field="type"):
    """sequence_number: of the event in its stream, given when it is sent."""

    sequence_number: int = 0

    @property
    def kind(self) -> str:
        """Its type."""
        return str(self.__struct_config__.tag)


class ErrorEvent(Event, kw_only=True, tag="error"):
    """error: the same once more, where OpenAI's clients look for what ends a stream."""

    code: str | None
    message: str
    param: str | None
    error: dict[str, Any]


class _OfResponse(Event, kw_only=True):
    response: ResponseObject


class Created(_OfResponse, tag="response.created"):
    pass


class InProgress(_OfResponse, tag="response.in_progress"):
    pass


class Completed(_OfResponse, tag="response.completed"):
    pass


class Stopped(_OfResponse, tag="response.incomplete"):
    pass


class Failed(_OfResponse, tag="response.failed"):
    pass


class _OfItem(Event, kw_only=True):
    output_index: int
    item: Item


class ItemAdded(_OfItem, tag="response.output_item.added"):
    pass


class ItemDone(_OfItem, tag="response.output_item.done"):
    pass


class _Within(Event, kw_only=True):
    item_id: str
    output_index: int


class ArgumentsDelta(_Within, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_Within, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class _WithinPart(_Within, kw_only=True):
    content_index: int = 0


class _OfPart(_WithinPart, kw_only=True):
    part: OutputText | ReasoningText


class PartAdded(_OfPart, tag="response.content_part.added"):
    pass


class PartDone(_OfPart, tag="response.content_part.done"):
    pass


class TextDelta(_WithinPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatToken]


class TextDone(_WithinPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatToken]


class ReasoningDelta(_WithinPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_WithinPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


OF_STATUS = {"in_progress": InProgress, "completed": Completed, "incomplete": Stopped, "failed": Failed}

AnyEvent = (
    Created | InProgress | Completed | Stopped | Failed | ErrorEvent | ItemAdded | ItemDone | PartAdded | PartDone
    | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
)  # fmt: skip
