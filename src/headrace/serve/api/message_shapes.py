"""What /v1/messages sends over the wire, field by field, as Anthropic's API reference has it. Ours are `seed`
and `timings`, after OpenRouter `cost`."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from headrace.serve.watch.accounts import CostDetails, Timings


class TextBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str = ""
    citations: None = None


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """signature: always empty; nobody checks it when the block comes back."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingDetails(Struct, frozen=True, kw_only=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """input_tokens: of the prompt, without those read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens_details: ThinkingDetails | UnsetType = UNSET
    cost: float | UnsetType = UNSET
    cost_details: CostDetails | UnsetType = UNSET


class MessageAnswer(Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    seed: int
    timings: Timings | UnsetType = UNSET


class TokenCount(Struct, frozen=True, kw_only=True):
    input_tokens: int


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class Ending(Struct, frozen=True, kw_only=True):
    stop_reason: str | None
    stop_sequence: str | None


class Event(Struct, frozen=True, tag_field="type"):
    @property
    def kind(self) -> str:
        """Its type."""
        return str(self.__struct_config__.tag)


class MessageStart(Event, frozen=True, tag="message_start"):
    message: MessageAnswer


class Ping(Event, frozen=True, tag="ping"):
    pass


class BlockStart(Event, frozen=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class BlockDelta(Event, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Event, frozen=True, tag="content_block_stop"):
    index: int


class MessageDelta(Event, frozen=True, tag="message_delta"):
    """usage: of the whole message."""

    delta: Ending
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET


class MessageStop(Event, frozen=True, tag="message_stop"):
    pass


AnyEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
