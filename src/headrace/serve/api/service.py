"""What the endpoints of one served model share: reading requests, submitting prompts, sending answers.

Owes: all prompts of a request submitted or none; an abort of what nobody reads. Does not know: routes, the shapes of
requests and answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from headrace.base.errors import RequestError
from headrace.base.goals import parse_goals
from headrace.base.log import log
from headrace.core.sampling import SamplingParams
from headrace.core.structured import FIELD, StructuredOutputs
from headrace.engine.messages import Terms
from headrace.engine.output import detokenizer
from headrace.engine.requests import own_defaults
from headrace.serve.api.answers import Reply, Turn, new_id
from headrace.serve.api.fields import MILLISECONDS
from headrace.serve.api.news import News, Watcher
from headrace.serve.api.prompts import Conversation, Prompts
from headrace.serve.api.requests import Asked, Limits
from headrace.serve.api.tools import Tool, ToolUse, demand
from headrace.serve.api.transcript import renamed
from headrace.serve.net.callers import caller_of
from headrace.serve.net.desk import Desk
from headrace.serve.net.http import MAX_BODY, EventStream, json_response, read_json, rename
from headrace.serve.watch.journal import Journal
from headrace.serve.watch.metrics import Metrics
from headrace.text.demands import demanded
from headrace.text.dialect import dialect_of

if TYPE_CHECKING:
    from headrace.engine.client import EngineClient, Stream
    from headrace.serve.watch.tracing import Trace
    from headrace.text import Tokenizer

_T = TypeVar("_T")
TIMEOUT_HEADER = "x-request-timeout-ms"


@dataclass(frozen=True, slots=True)
class AppSettings:
    """names: under which the model is served, the first is the one in answers; none: the reference it was loaded by.

    prefix_cache_per_key: callers find only their own prompts in the prefix cache.
    docs: whether /docs and /openapi.json are there. trusts_templates: requests may bring their own chat templates.
    reasoning_fields: names under which chat tells what the model thought. price_per_hour, goodput: as of
    `ServeSettings`. log_requests: a line for each; log_texts: with its texts, at most max_log_len characters of each.
    any_name: requests may call the model what they like.
    """

    names: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY
    prefix_caching: bool = True
    prefix_cache_per_key: bool = False
    docs: bool = True
    trusts_templates: bool = False
    reasoning_fields: tuple[str, ...] = ("reasoning",)
    price_per_hour: float | None = None
    log_requests: bool = False
    log_texts: bool = False
    max_log_len: int = 1000
    goodput: tuple[str, ...] = ()
    any_name: bool = False


class Service:
    """One served model. Must be made on the event loop that serves."""

    def __init__(self, engine: EngineClient, settings: AppSettings) -> None:
        self.engine = engine
        self.names = settings.names or (engine.info.name,)
        self.limits = limits_of(engine, self.names, settings)
        self.desk = Desk()
        self.metrics = Metrics(
            engine,
            self.names[0],
            settings.prefix_caching,
            price_per_hour=settings.price_per_hour,
            goals=parse_goals(settings.goodput),
        )
        self.prompts = Prompts(engine.tokenizer, engine.template, self.limits)
        self.settings = settings
        self._journal = Journal(engine.tokenizer, settings.log_texts, settings.max_log_len)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.engine.tokenizer

    async def read(self, request: Request, parse: Callable[[Any, Limits], _T]) -> _T:
        """The request's body, checked by `parse`."""
        return await read_json(request, lambda body: parse(body, self.limits), self.settings.max_body_bytes)

    async def submit(
        self, request: Request, prefix: str, asked: Asked, prompts: Sequence[list[int]]
    ) -> tuple[str, News]:
        """(id of the answer, its news): all prompts, or, when one is refused, none.

        The engine's ids are unique whatever clients choose.
        """
        if asked.request_id:
            rename(request, asked.request_id)
        id = new_id(prefix, request.state.request_id)
        base = new_id(f"{id}-") if request.state.request_id_given else id
        caller = caller_of(request)
        salt = f"{caller.name}\0{asked.cache_salt}" if self.settings.prefix_cache_per_key else asked.cache_salt
        terms = Terms(
            priority=asked.priority,
            cache_salt=salt,
            tenant=caller.name,
            weight=caller.weight,
            deadline=_deadline(request, asked.timeout_ms),
            drafted=asked.drafted,
        )
        with renamed(asked.form_names):
            grammar = await self.engine.grammar(asked.params)
        n, trace = asked.params.n, trace_of(request)
        streams: list[Stream] = []
        try:
            with self.engine.queue.room(n * len(prompts), n * sum(map(len, prompts))) as room:
                for i, ids in enumerate(prompts):
                    name = base if len(prompts) == 1 else f"{base}-{i}"
                    params = dataclasses.replace(asked.params)
                    stream = self.engine.submit(ids, params, request_id=name, terms=terms, room=room, grammar=grammar)
                    stream.accounted = asked.timings or self.settings.price_per_hour is not None or trace is not None
                    stream.token_times = {} if asked.timings else None
                    streams.append(stream)
                    await asyncio.sleep(0)  # many long prompts take a while, and others wait for the event loop
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        watchers: list[Watcher] = []
        if self.settings.log_requests:
            watchers.append(self._journal.entry(id, caller.name, asked.stream, asked.params, prompts))
        if trace is not None:
            trace.submitted(id, request.state.request_id, caller.name, asked.params, streams)
            watchers.append(trace)
        return id, News(streams, self.metrics, self.settings.price_per_hour, watchers)

    async def turns(self, conversation: Conversation, asked: Asked, prompt: Sequence[int]) -> Callable[[], Turn]:
        """Makes what takes a choice's text apart; `asked.params` get what the sampler must enforce.

        prompt: the rendered conversation's ids. RequestError: names the tool that cannot be enforced.
        """
        dialect, tokenizer, tools = self.limits.dialect, self.tokenizer, conversation.tools
        names, opened = tools.names, dialect.opened_by(prompt, tokenizer)
        with renamed(asked.form_names):
            wanted = demand(tools, opened, asked.params.structured_outputs)
            if wanted is not None:
                form = StructuredOutputs(grammar=demanded(wanted, dialect, opened))
                await self._check(form, tools, asked.params.structured_outputs)
                asked.params.structured_outputs = form
        size = dialect.calls.id_size if dialect.calls else 0

        def turn() -> Turn:
            return Turn(
                dialect.reader(names, tools.parallel, opened),
                lambda: secrets.token_hex(size)[:size] if size else new_id("call_"),
                (lambda: detokenizer(tokenizer, asked.params, prompt)) if dialect.thinking else None,
            )

        return turn

    async def _check(self, whole: StructuredOutputs, tools: ToolUse, form: StructuredOutputs | None) -> None:
        """RequestError that names which part of the whole cannot be enforced, or all of them together."""
        try:
            await self.engine.grammar(SamplingParams(structured_outputs=whole))
        except RequestError as error:
            for tool in tools.callable:
                await self._check_tool(tool)
            await self.engine.grammar(SamplingParams(structured_outputs=form))
            raise RequestError(f"tools cannot be enforced together: {error}", param="tools") from None

    async def _check_tool(self, tool: Tool) -> None:
        place = f"{tool.place}.parameters"
        try:
            await self.engine.grammar(SamplingParams(structured_outputs=StructuredOutputs(json=tool.schema)))
        except RequestError as error:
            why = str(error).replace(f"{FIELD}.json", place)
            raise RequestError(f"The tool {tool.name}: {why}", param=place) from None

    async def answer(self, request: Request, reply: Reply) -> Response:
        """The response: a stream of events or one body, as was asked."""
        if reply.asked.stream:
            return EventStream(reply, self.desk, request.state.request_id)
        try:
            body = await self.desk.attend(reply.whole(), request.receive)
        finally:
            await reply.news.aclose()
        return json_response(body)


def trace_of(request: Request) -> Trace | None:
    """What `serve.tracing` has begun for it; None where nobody asked for traces."""
    trace: Trace | None = getattr(request.state, "trace", None)
    return trace


def _deadline(request: Request, timeout_ms: int | None) -> float:
    """time.monotonic seconds, 0 for none: from the field or the header, whichever ends sooner."""
    given = [] if timeout_ms is None else [timeout_ms]
    header = request.headers.get(TIMEOUT_HEADER)
    if header is not None:
        milliseconds = int(header) if header.isascii() and header.isdigit() and len(header) <= 9 else header
        MILLISECONDS.check(TIMEOUT_HEADER, milliseconds)
        given.append(int(milliseconds))
    return request.state.arrived + min(given) / 1000 if given else 0.0


def limits_of(engine: EngineClient, names: tuple[str, ...], settings: AppSettings) -> Limits:
    """What requests are checked against, the model's own sampling defaults among it."""
    info = engine.info
    defaults, max_new_tokens, refused = own_defaults(info.generation)
    for name in refused:
        log.warning("generation_config.json: %s is not usable and was left out", name)
    return Limits(
        names=names,
        vocab_size=min(info.vocab_size, engine.tokenizer.vocab_size),
        max_model_len=info.max_model_len,
        max_logprobs=info.max_logprobs,
        defaults=defaults,
        max_new_tokens=max_new_tokens,
        trusts_templates=settings.trusts_templates,
        dialect=dialect_of(engine.template, engine.tokenizer),
        any_name=settings.any_name,
    )
