"""Texts and conversations as token ids, and back, as vLLM and llama.cpp have it; and what a tokenizer is.

Owes: the ids that a completion or a chat of the same would get. Does not know: the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import RequestError
from headrace.base.rules import Rule, flag, list_of, text
from headrace.core import sampling
from headrace.serve.api import fields as f
from headrace.serve.api.chat import conversation_of
from headrace.serve.api.openapi import Operation
from headrace.serve.api.prompts import Conversation, Prompts
from headrace.serve.api.requests import Limits, checked
from headrace.serve.api.service import Service
from headrace.serve.net.http import json_response

MAX_COUNTED = 1 << 17  # tokens, whatever the context is
MAX_CHARACTERS = 1 << 20  # of a text: what is longer has more tokens, but for texts of few long words

_CONVERSATION = (
    "messages", "tools", "tool_choice", "reasoning_effort", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "documents",
)  # fmt: skip
TOKENIZE: f.Fields = {name: f.CHAT[name] for name in ("model", *_CONVERSATION)} | {
    "prompt": f.Field(text(MAX_CHARACTERS), "A text. One of prompt, content and messages is needed."),
    "content": f.Field(text(MAX_CHARACTERS), "A text, to which nothing is added if not asked for."),
    "add_special_tokens": f.Field(flag, "Add what the tokenizer adds to texts; true if absent, with prompt."),
    "add_special": f.Field(flag, "The same, by another name."),
    "return_token_strs": f.Field(flag, "Tell each token's text as well (token_strs).", default=False),
    "with_pieces": f.Field(flag, "Tell each token with its text, or its bytes if they are none.", default=False),
}


def _ids(bounds: f.Bounds) -> Rule:
    return list_of(sampling.token_id(bounds.vocab_size), f.MAX_ITEMS, of="token ids")


DETOKENIZE: f.Fields = {"model": f.CHAT["model"], "tokens": f.Field(_ids, "Token ids.")}


class Piece(Struct, frozen=True):
    """piece: the token's text, or its bytes when they are no text."""

    id: int
    piece: str | list[int]


class Tokens(Struct, frozen=True, kw_only=True):
    """tokens: ids, or `Piece` if these were asked for."""

    count: int
    max_model_len: int
    tokens: list[int | Piece]
    token_strs: list[str] | None = None


class Text(Struct, frozen=True, kw_only=True):
    """The same under the names of vLLM and of llama.cpp."""

    prompt: str
    content: str


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """What evaluation harnesses ask for. Tokens are None where the model has none."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    model_max_length: int


INFO = Operation("The model's special tokens and chat template.", answer=TokenizerInfo)
TOKENIZING = Operation("A text or a conversation as token ids.", body=TOKENIZE, answer=Tokens)
DETOKENIZING = Operation("Token ids as text.", body=DETOKENIZE, required=("tokens",), answer=Text)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checked request. what: a text or a conversation."""

    what: str | Conversation
    add_special: bool
    strings: bool
    pieces: bool


class Tokenizing:
    """The endpoints of one served model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        limits = dataclasses.replace(service.limits, max_model_len=MAX_COUNTED)
        self._prompts = Prompts(service.tokenizer, service.engine.template, limits)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        with self._service.desk.seat():
            wanted = await self._service.read(request, parse_tokenize)
            return json_response(await asyncio.to_thread(self._answer, wanted, await self._tokens(wanted)))

    async def _tokens(self, wanted: Wanted) -> list[int]:
        if isinstance(wanted.what, Conversation):
            return await self._prompts.of_chat(wanted.what)
        return (await self._prompts.of_texts([wanted.what], wanted.add_special))[0] if wanted.what else []

    def _answer(self, wanted: Wanted, ids: list[int]) -> bytes:
        tokenizer = self._service.tokenizer
        strings = [tokenizer.token_text(id) for id in ids] if wanted.strings else None
        tokens = [Piece(id, _text(tokenizer.token_bytes(id))) for id in ids] if wanted.pieces else ids
        most = self._service.limits.max_model_len
        answer = Tokens(count=len(ids), max_model_len=most, tokens=list(tokens), token_strs=strings)
        return msgspec.json.encode(answer)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        with self._service.desk.seat():
            ids = await self._service.read(request, parse_detokenize)
            told = await asyncio.to_thread(self._service.tokenizer.decode, ids)
            return json_response(msgspec.json.encode(Text(prompt=told, content=told)))

    async def info(self, request: Request) -> Response:
        """GET /tokenizer_info"""
        tokenizer, template = self._service.tokenizer, self._service.engine.template
        answer = TokenizerInfo(
            bos_token=tokenizer.names.get("bos_token"),
            eos_token=tokenizer.names.get("eos_token"),
            chat_template=template.source if template else None,
            model_max_length=self._service.limits.max_model_len,
        )
        return json_response(msgspec.json.encode(answer))


def _text(raw: bytes) -> str | list[int]:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


def parse_tokenize(body: Any, limits: Limits) -> Wanted:
    """RequestError(param) for what cannot be served as asked."""
    given = checked(body, limits, TOKENIZE)
    sources = [name for name in ("prompt", "content", "messages") if name in given]
    if len(sources) != 1:
        raise RequestError("give one of prompt, content and messages.", param=sources[1] if sources else "prompt")
    if "add_special" in given and "add_special_tokens" in given:
        raise RequestError("add_special is add_special_tokens: give one.", param="add_special")
    chat = sources == ["messages"]
    if not chat:
        _refuse_others(given)
    special = given.get("add_special_tokens", given.get("add_special", sources == ["prompt"]))
    what = conversation_of({**given, "add_special_tokens": special}, limits) if chat else given[sources[0]]
    return Wanted(what, special, given.get("return_token_strs", False), given.get("with_pieces", False))


def _refuse_others(given: Mapping[str, Any]) -> None:
    for name in _CONVERSATION:
        if name in given:
            raise RequestError(f"{name} needs messages.", param=name)


def parse_detokenize(body: Any, limits: Limits) -> list[int]:
    """RequestError(param) for what is no list of ids."""
    given = checked(body, limits, DETOKENIZE)
    if "tokens" not in given:
        raise RequestError("tokens is missing: a list of token ids.", param="tokens")
    ids: list[int] = given["tokens"]
    return ids
