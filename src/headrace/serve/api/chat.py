"""/v1/chat/completions: a conversation in, the next message out.

Source: OpenAI's API reference, and vLLM's additions to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import RequestError
from headrace.base.rules import refuse
from headrace.serve.api import fields as f
from headrace.serve.api import logprobs as lp
from headrace.serve.api.answers import Choice, OpenAIReply, Turn, event
from headrace.serve.api.news import News
from headrace.serve.api.openapi import Operation
from headrace.serve.api.prompts import Conversation
from headrace.serve.api.requests import Asked, Cut, Limits, asked_of, checked, cut_of
from headrace.serve.api.service import Service
from headrace.serve.api.shapes import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    FunctionCall,
    FunctionDelta,
    Message,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)
from headrace.serve.api.tools import prepare, tool_use
from headrace.text import normalise_messages
from headrace.text.dialect import Dialect
from headrace.text.speech import Piece, gathered

if TYPE_CHECKING:
    from headrace.engine.output import Delta
    from headrace.text import Tokenizer

_TEMPLATE_OWN = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "self",
)
SWITCHES = ("enable_thinking", "thinking")  # variables by which templates let the model think, or not
_NOTHING = MessageDelta()


OPERATION = Operation(
    "The next message of a conversation.",
    body=f.CHAT,
    required=("messages",),
    answer=Answer[ChatChoice],
    events=Answer[ChatChunkChoice],
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request."""

    asked: Asked
    conversation: Conversation
    cut: Cut | None
    echo: bool
    include_reasoning: bool


class Chat:
    """The endpoint of one served model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        service = self._service
        with service.desk.seat():
            given = await service.read(request, parse_chat)
            ids = await service.prompts.of_chat(given.conversation, given.cut)
            turn = await service.turns(given.conversation, given.asked, ids)
            shows = service.settings.reasoning_fields if given.include_reasoning else ()
            id, news = await service.submit(request, "chatcmpl-", given.asked, [ids])
            reply = ChatReply(id, service.names[0], given, news, service.tokenizer, turn, shows)
            return await service.answer(request, reply)


def parse_chat(body: Any, limits: Limits) -> ChatRequest:
    """RequestError(param) for what cannot be served as asked, UnknownModel for another model's name."""
    given = checked(body, limits, f.CHAT)
    shows = given.get("logprobs", False)
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    asked = asked_of(given, limits, most, given.get("top_logprobs", 0) if shows else None)
    conversation = conversation_of(given, limits)
    prepare(asked.params, conversation.tools, limits.dialect)
    told = given.get("include_reasoning", True)
    return ChatRequest(asked, conversation, cut_of(given), given.get("echo", False), told)


def conversation_of(given: Mapping[str, Any], limits: Limits) -> Conversation:
    """What is to be rendered, out of checked fields."""
    if "messages" not in given:
        raise RequestError("messages is missing: a list of at least one message.", param="messages")
    begins, continues = given.get("add_generation_prompt"), given.get("continue_final_message", False)
    if continues and begins:
        raise RequestError("continue_final_message needs add_generation_prompt: false.", param="continue_final_message")
    return Conversation(
        given["messages"],
        tools=tool_use(given, limits.dialect),
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        template_kwargs=_template_kwargs(given, limits.dialect),
        documents=given.get("documents"),
        template=given.get("chat_template"),
        add_special_tokens=given.get("add_special_tokens", False),
    )


def spoken(message: Any) -> str:
    """What the assistant has said in a message; nothing if it is another's."""
    content: str = normalise_messages([message])[0]["content"]
    return content if message["role"] == "assistant" else ""


def _template_kwargs(given: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    kwargs: dict[str, Any] = given.get("chat_template_kwargs", {})
    for name in _TEMPLATE_OWN:
        if name in kwargs:
            raise RequestError(f"chat_template_kwargs must not set {name}.", param=f"chat_template_kwargs.{name}")
    return {**_effort(given.get("reasoning_effort"), dialect), **kwargs}


def _effort(effort: str | None, dialect: Dialect) -> dict[str, Any]:
    """How the template is told how much to think."""
    if effort is None:
        return {}
    if "reasoning_effort" in dialect.variables:
        return {"reasoning_effort": effort}
    if effort == "none":
        return {name: False for name in SWITCHES if name in dialect.variables}
    why = "is not supported by this model: its chat template reads no effort; please leave it out, or give 'none'"
    refuse("reasoning_effort", why, code="unsupported_parameter")


class ChatReply(OpenAIReply):
    """Answers /v1/chat/completions. reasoning: the fields that tell it."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        id: str,
        model: str,
        given: ChatRequest,
        news: News,
        tokenizer: Tokenizer,
        turn: Callable[[], Turn],
        reasoning: Sequence[str],
    ) -> None:
        super().__init__(id, model, given.asked, news, tokenizer, turn)
        self._named = given.conversation.tools.choice == "named"
        self._reasoning = reasoning
        self._echo = spoken(given.conversation.messages[-1]) if given.echo else ""

    async def whole(self) -> bytes:
        """See `Reply`."""
        choices = [self._choice(i, choice) for i, choice in enumerate(await self.collected())]
        stream = self.news.streams[0]
        shows = self.asked.prompt_logprobs and stream.prompt_logprobs is not None
        return self.answer(
            choices,
            self.usage(),
            chunk=False,
            timings=self.timings(),
            prompt_token_ids=self.ids(stream.prompt_token_ids),
            prompt_text=self.prompt_text(0),
            prompt_logprobs=lp.prompt_logprobs(stream.prompt_logprobs or []) if shows else UNSET,
        )

    def first(self, prompt: int) -> Iterable[bytes]:
        """The role of each choice, with the first what was asked about the prompt; the echo."""
        role = MessageDelta(role="assistant", content="")
        for i in range(self.asked.params.n):
            choice = ChatChunkChoice(index=i, delta=role)
            yield self._with_prompt(choice) if i == 0 and self.tells_prompt else self.chunk(choice)
            if self._echo:
                yield self.chunk(ChatChunkChoice(index=i, delta=MessageDelta(content=self._echo)))

    def _with_prompt(self, choice: ChatChunkChoice) -> bytes:
        usage = None if self.asked.include_usage else UNSET
        ids, text = self.ids(self.news.streams[0].prompt_token_ids), self.prompt_text(0)
        return event(self.answer([choice], usage, chunk=True, prompt_token_ids=ids, prompt_text=text))

    def more(self, index: int, delta: Delta) -> Iterable[bytes]:
        """What is said, then, in an event of its own, the end."""
        turn = self.turns[index]
        says = self._says(turn.pieces(delta), turn)
        if says != _NOTHING or delta.logprobs or (delta.token_ids and self.asked.token_ids):
            shown, ids = self._logprobs(delta.logprobs or ()), self.ids(delta.token_ids)
            says = MessageDelta(content="") if says == _NOTHING else says
            yield self.chunk(ChatChunkChoice(index=index, delta=says, logprobs=shown, token_ids=ids))
        if delta.finish_reason is not None:
            reason = self._reason(turn.reason(delta))
            ended = ChatChunkChoice(
                index=index, delta=MessageDelta(), finish_reason=reason, stop_reason=delta.stop_reason
            )
            yield self.chunk(ended)

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=self._message(choice),
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=self._reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=self.ids(choice.token_ids),
        )

    def _message(self, choice: Choice) -> Message:
        said, ids = gathered(choice.pieces), choice.turn.calls
        content = self._echo + said.content
        calls = [
            ToolCall(id=id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for id, call in zip(ids, said.calls.values(), strict=True)
        ]
        return Message(
            content=content if content or not calls else None,
            tool_calls=calls or UNSET,
            **self._thought(said.reasoning),
        )

    def _says(self, pieces: Sequence[Piece], turn: Turn) -> MessageDelta:
        said = gathered(pieces)
        calls = [
            ToolCallDelta(
                index=index,
                id=turn.calls[index] if call.name else UNSET,
                type="function" if call.name else UNSET,
                function=FunctionDelta(name=call.name or UNSET, arguments=call.arguments),
            )
            for index, call in said.calls.items()
        ]
        return MessageDelta(content=said.content or UNSET, tool_calls=calls or UNSET, **self._thought(said.reasoning))

    def _thought(self, text: str) -> dict[str, Any]:
        return dict.fromkeys(self._reasoning, text) if text else {}

    def _reason(self, reason: str | None) -> str | None:
        """A call of the tool that the client named is no choice of the model's: OpenAI says "stop" then."""
        return "stop" if self._named and reason == "tool_calls" else reason

    def _logprobs(self, steps: Sequence[Any]) -> ChatLogprobs | None:
        return None if self.asked.logprobs is None else lp.chat_logprobs(steps, self.names, self.asked.logprobs)
