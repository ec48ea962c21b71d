"""/v1/completions: prompts in, their continuations out.

Source: OpenAI's API reference, and vLLM's additions to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import RequestError
from headrace.base.rules import is_whole
from headrace.serve.api import fields as f
from headrace.serve.api import logprobs as lp
from headrace.serve.api.answers import Choice, OpenAIReply
from headrace.serve.api.news import News
from headrace.serve.api.openapi import Operation
from headrace.serve.api.prompts import Prompt
from headrace.serve.api.requests import Asked, Cut, Limits, asked_of, checked, cut_of
from headrace.serve.api.service import Service
from headrace.serve.api.shapes import Answer, TextChoice, TextLogprobs

if TYPE_CHECKING:
    from headrace.engine.output import Delta
    from headrace.text import Tokenizer

DEFAULT_TOKENS = 16  # OpenAI's
MAX_SEQUENCES = 2048  # choices of one request over all its prompts


OPERATION = Operation(
    "The continuations of prompts.",
    body=f.COMPLETION,
    required=("prompt",),
    answer=Answer[TextChoice],
    events=Answer[TextChoice],
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request."""

    asked: Asked
    prompts: list[Prompt]
    echo: bool
    add_special_tokens: bool
    cut: Cut | None


class Completions:
    """The endpoint of one served model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """POST /v1/completions"""
        service = self._service
        with service.desk.seat():
            given = await service.read(request, parse_completion)
            ids = await service.prompts.of_texts(given.prompts, given.add_special_tokens, given.cut)
            echoes = await service.prompts.echoes(given.prompts if given.cut is None else ids) if given.echo else None
            id, news = await service.submit(request, "cmpl-", given.asked, ids)
            reply = TextReply(id, service.names[0], given.asked, news, service.tokenizer, echoes)
            return await service.answer(request, reply)


def parse_completion(body: Any, limits: Limits) -> CompletionRequest:
    """RequestError(param) for what cannot be served as asked, UnknownModel for another model's name."""
    given = checked(body, limits, f.COMPLETION)
    top = given.get("logprobs")
    asked = asked_of(given, limits, given.get("max_tokens", limits.max_new_tokens or DEFAULT_TOKENS), top)
    prompts = _prompts(given.get("prompt"))
    if len(prompts) * asked.params.n > MAX_SEQUENCES:
        raise RequestError(f"prompts times n must be at most {MAX_SEQUENCES}.", param="prompt")
    echo = given.get("echo", False)
    if echo and top is not None:
        asked.params.prompt_logprobs = max(top, asked.params.prompt_logprobs or 0)
    return CompletionRequest(asked, prompts, echo, given.get("add_special_tokens", True), cut_of(given))


def _prompts(prompt: Any) -> list[Prompt]:
    """One prompt or a list of them, as a list."""
    if prompt is None:
        raise RequestError("prompt is missing: a string, token ids, or a list of them.", param="prompt")
    return [prompt] if isinstance(prompt, str) or is_whole(prompt[0]) else list(prompt)


class TextReply(OpenAIReply):
    """Answers /v1/completions. echoes: the text of each prompt to be said before its continuation, or None."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, id: str, model: str, asked: Asked, news: News, tokenizer: Tokenizer, echoes: Sequence[str] | None
    ) -> None:
        super().__init__(id, model, asked, news, tokenizer)
        self._echoes = echoes
        skip = asked.params.skip_special_tokens
        starts = [len(echo) for echo in echoes or [""] * len(news.streams)]
        self._offsets = [lp.TextOffsets(self.names, start, skip) for start in starts for _ in range(asked.params.n)]

    async def whole(self) -> bytes:
        """See `Reply`."""
        choices = [self._choice(i, choice) for i, choice in enumerate(await self.collected())]
        return self.answer(choices, self.usage(), chunk=False, timings=self.timings())

    def first(self, prompt: int) -> Iterable[bytes]:
        """For each of its choices the prompt, if it is to be echoed or told."""
        n = self.asked.params.n
        if self._echoes is None and not self.tells_prompt:
            return
        echo, shown = self._echoes[prompt] if self._echoes else "", self._prompt_logprobs(prompt)
        ids, text = self.ids(self.news.streams[prompt].prompt_token_ids), self.prompt_text(prompt)
        for i in range(prompt * n, (prompt + 1) * n):
            piece = self._piece(i, echo, shown)
            yield self.chunk(msgspec.structs.replace(piece, prompt_token_ids=ids, prompt_text=text))

    def more(self, index: int, delta: Delta) -> Iterable[bytes]:
        """Text and end together."""
        if (
            delta.text
            or delta.logprobs
            or delta.finish_reason is not None
            or (delta.token_ids and self.asked.token_ids)
        ):
            shown = self._logprobs(index, delta.logprobs or (), delta.token_ids)
            yield self.chunk(self._piece(index, delta.text, shown, delta))

    def _piece(self, index: int, text: str, logprobs: TextLogprobs | None, delta: Delta | None = None) -> TextChoice:
        return TextChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason if delta else None,
            stop_reason=delta.stop_reason if delta else None,
            token_ids=self.ids(delta.token_ids) if delta else UNSET,
        )

    def _choice(self, index: int, choice: Choice) -> TextChoice:
        prompt = index // self.asked.params.n
        stream = self.news.streams[prompt]
        shown = self._logprobs(index, choice.logprobs, choice.token_ids)
        before = self._prompt_logprobs(prompt) if self._echoes is not None else None
        if shown is not None and before is not None:
            shown = lp.joined(before, shown)
        asks = self.asked.prompt_logprobs and stream.prompt_logprobs is not None
        return TextChoice(
            index=index,
            text=(self._echoes[prompt] if self._echoes is not None else "") + "".join(choice.text),
            logprobs=shown,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            seed=stream.seed,
            token_ids=self.ids(choice.token_ids),
            prompt_token_ids=self.ids(stream.prompt_token_ids),
            prompt_text=self.prompt_text(prompt),
            prompt_logprobs=lp.prompt_logprobs(stream.prompt_logprobs or []) if asks else UNSET,
        )

    def _logprobs(self, index: int, steps: Sequence[Any], tokens: Sequence[int]) -> TextLogprobs | None:
        if self.asked.logprobs is None:
            return None
        return lp.text_logprobs(steps, tokens[: len(steps)], self.names, self._offsets[index], self.asked.logprobs)

    def _prompt_logprobs(self, prompt: int) -> TextLogprobs | None:
        steps, count = self.news.streams[prompt].prompt_logprobs, self.asked.logprobs
        if steps is None or count is None or self._echoes is None:
            return None
        ids = self.news.streams[prompt].prompt_token_ids
        # What tokenizers add (a BOS, a space) is not in the text: begin so much before it that the ends meet.
        start = len(self._echoes[prompt]) - len(b"".join(map(self.names.bytes, ids)).decode("utf-8", "replace"))
        shown = lp.text_logprobs(steps, ids, self.names, lp.TextOffsets(self.names, start, False), count)
        return msgspec.structs.replace(shown, text_offset=[max(at, 0) for at in shown.text_offset])
