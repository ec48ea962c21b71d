"""`AsyncLLM`: a model in a process of its own, for asyncio programs. vLLM's class and method names."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from headrace.base.errors import EngineError
from headrace.base.settings import EngineSettings
from headrace.core.sampling import SamplingParams
from headrace.engine.client import EngineClient, Stream
from headrace.engine.output import CompletionOutput, RequestOutput


class AsyncLLM:
    """Generates for many callers at once.

    model and settings: those of `EngineSettings`. Use it as an asynchronous context manager, which loads the model and
    ends its process; or await `start` and `shutdown`.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.settings = EngineSettings.of(model, **settings)
        self._client: EngineClient | None = None
        self._streams: dict[str, Stream] = {}

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    @property
    def client(self) -> EngineClient:
        """The engine's client; EngineError before `start` and after `shutdown`."""
        if self._client is None:
            raise EngineError("the model is not loaded: use `async with AsyncLLM(...)`, or await start() first")
        return self._client

    async def start(self) -> None:
        """Load the model, in a process of its own; raises what went wrong."""
        if self._client is None:
            self._client = await EngineClient.start(self.settings)

    async def generate(
        self, prompt: str | dict[str, Any], sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answer so far, each time with what came since; the last one is `finished`.

        prompt: a text, or ``{"prompt_token_ids": ids}``. Leaving the loop gives the request up.
        """
        text = prompt if isinstance(prompt, str) else prompt.get("prompt")
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) and "prompt_token_ids" in prompt else None
        if ids is None:
            ids = self.client.tokenizer.encode(text or "")
        name = request_id or uuid.uuid4().hex
        grammar = await self.client.grammar(sampling_params)
        stream = self.client.submit(ids, sampling_params, request_id=name, grammar=grammar)
        self._streams[name] = stream
        out = RequestOutput(name, text, ids, [CompletionOutput(i) for i in range(sampling_params.n)], stream.seed)
        stream.accounted, out.metrics = True, stream.metrics
        try:
            async with stream:
                async for deltas in stream:
                    for delta in deltas:
                        out.outputs[delta.index].add(delta)
                    out.num_cached_tokens, out.prompt_logprobs = stream.cached_tokens, stream.prompt_logprobs
                    out.finished = all(choice.finish_reason is not None for choice in out.outputs)
                    yield out
        finally:
            self._streams.pop(name, None)

    async def abort(self, request_id: str) -> None:
        """Give a request up; its iterator ends, with finish reason "abort"."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cancel()

    async def shutdown(self) -> None:
        """End the process."""
        if self._client is not None:
            await self._client.close()
            self._client = None
