"""Conversations of other APIs, item by item, become the messages of a chat.

Owes: chat messages as `text.messages` reads them, in which what one turn of the assistant is made of (reasoning, text,
calls of tools) is one message; the names that clients know for what the chat's checks find wrong. Does not know: either
API, templates. What it is given is checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from headrace.base.errors import RequestError

# Fields that chat takes under the same name.
PASSED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "logit_bias",
    "priority", "cache_salt", "return_tokens_as_token_ids", "chat_template_kwargs",
    "timeout_ms", "request_id", "structured_outputs", "timings", "num_speculative_tokens",
)  # fmt: skip


class Transcript:
    """joined: roles whose messages become one when they follow each other."""

    def __init__(self, joined: Collection[str] = ("assistant",)) -> None:
        self.messages: list[dict[str, Any]] = []
        self._joined = joined
        self._tools: dict[str, str] = {}  # names, by the ids of their calls

    def say(self, role: str, texts: Iterable[str]) -> None:
        """Parts of a message."""
        parts = [{"type": "text", "text": text} for text in texts]
        self._message(role)["content"] += parts

    def think(self, text: str) -> None:
        """Reasoning of the assistant."""
        message = self._message("assistant")
        message["reasoning"] = message.get("reasoning", "") + text

    def call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        """A call of a tool."""
        self._tools[id] = name
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._message("assistant").setdefault("tool_calls", []).append(call)

    def result(self, id: str, texts: Iterable[str]) -> None:
        """What a call gave. Some templates read the tool's name there, which only the call tells."""
        name = {"name": self._tools[id]} if id in self._tools else {}
        parts = [{"type": "text", "text": text} for text in texts]
        self.messages.append({"role": "tool", "tool_call_id": id, "content": parts, **name})

    def _message(self, role: str) -> dict[str, Any]:
        if role not in self._joined or not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]


@contextmanager
def renamed(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """A RequestError about a field of a chat request is one about the client's own.

    names: beginnings of paths, chat's and the client's; the first that fits is taken. ``[]`` stands for any index.
    """
    try:
        yield
    except RequestError as error:
        path = error.param or ""
        for old, new in names:
            if found := _beginning(old).match(path):
                own = new.replace("[]", "".join(found.groups())) + path[found.end() :]
                raise type(error)(str(error).replace(path, own), param=own, code=error.code) from None
        raise


@cache
def _beginning(path: str) -> re.Pattern[str]:
    return re.compile(re.escape(path).replace(r"\[\]", r"(\[\d+\])") + r"(?=$|[.\[])")
