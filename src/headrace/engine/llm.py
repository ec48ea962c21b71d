"""`LLM`: a model in this process, for scripts and notebooks. vLLM's class, names and meanings."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.base.errors import RequestError
from headrace.base.settings import EngineSettings
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.grammars import compiled
from headrace.engine.loading import load
from headrace.engine.messages import NO_TERMS, Add, ModelInfo, Terms, Update
from headrace.engine.output import ChoiceText, CompletionOutput, RequestMetrics, RequestOutput, readable_prompt
from headrace.engine.requests import checked, own_defaults
from headrace.text import Tokenizer, normalise_messages
from headrace.text.grammar import Grammars, Vocabulary

Prompt = str | Mapping[str, Any] | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model that answers batches of prompts.

    model and settings: those of `EngineSettings`, as keywords. Use it as a context manager, or `close` it, to free its
    memory and threads. Not thread-safe. Nobody waits for single tokens here, so `max_inter_token_ms` is 0 unless given.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.settings = EngineSettings.of(model, **{"max_inter_token_ms": 0, **settings})
        text, self._engine = load(self.settings)
        self._tokenizer, self._template = text.tokenizer, text.template
        self._numbers = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory and threads."""
        self._engine.close()

    @property
    def info(self) -> ModelInfo:
        """What was loaded: sizes, context, instruction set."""
        return self._engine.info

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(Vocabulary.of(self._tokenizer, self.info.vocab_size))

    @property
    def engine(self) -> Engine:
        """The engine underneath: its step trace and statistics."""
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (its generation_config.json) over the neutral ones."""
        usable, most, _ = own_defaults(self.info.generation)
        return SamplingParams(**usable) if most is None else SamplingParams(**usable, max_tokens=most)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, in the order given.

        prompts: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, or a list of these.
        sampling_params: one for all, or one for each. RequestError names what is wrong before anything runs.
        """
        each = _prompts(prompts)
        tokenized = [self._tokenize(prompt) for prompt in each]
        return self._run(tokenized, self._params(sampling_params, len(each)), use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them. Text in messages never becomes a control token."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        if self._template is None:
            raise RequestError("this model has no chat template: give one with chat_template=", param="messages")
        tokenized: list[tuple[str | None, list[int]]] = []
        for conversation in conversations:
            rendered = self._template.render(
                normalise_messages(conversation),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            tokenized.append((rendered.text, self._tokenizer.encode_chat(rendered)))
        return self._run(tokenized, self._params(sampling_params, len(tokenized)), use_tqdm, None)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return prompt["prompt"], self._tokenizer.encode(prompt["prompt"])
        raise RequestError(
            f"a prompt is a text, {{'prompt': text}} or {{'prompt_token_ids': ids}}, not {type(prompt).__name__}",
            param="prompts",
        )

    def _params(self, given: Params, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise RequestError(
                f"there are {count} prompts and {len(given)} sampling_params; give one, or as many as prompts",
                param="sampling_params",
            )
        return list(given)

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        params: list[SamplingParams],
        show: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if priority is not None and len(priority) != len(prompts):
            raise RequestError("priority needs one number for each prompt", param="priority")
        calls = [
            checked(
                ids,
                p,
                self.info,
                self._tokenizer,
                request_id=str(next(self._numbers)),
                terms=NO_TERMS if priority is None else Terms(priority=priority[i]),
            )
            for i, ((_, ids), p) in enumerate(zip(prompts, params, strict=True))
        ]
        answers = {
            call.request_id: _Answer(call, text, self._tokenizer)
            for call, (text, _) in zip(calls, prompts, strict=True)
        }
        try:
            for call in calls:
                self._engine.add(call, None if call.grammar is None else compiled(self._grammars, call))
            with _progress(len(calls), show) as advance:
                for _ in self._drive(answers):
                    advance()
        except BaseException:
            for call in calls:
                self._engine.abort(call.request_id)
            raise
        return [answers[call.request_id].output for call in calls]

    def _drive(self, answers: dict[str, _Answer]) -> Iterator[str]:
        """Step until all have ended; yields each request as it ends."""
        left = len(answers)
        while left:
            for update in self._engine.step():
                answer = answers.get(update.request_id)
                if answer is None or answer.output.finished:
                    continue
                stop = answer.push(update)
                if stop is not None:
                    for last in self._engine.stopped(update.request_id, update.choice, stop):
                        answer.settle(last)
                if answer.output.finished:
                    left -= 1
                    yield update.request_id


class _Answer:
    """A request's output as it grows. Text that no stop string waits for is made at the end, in one go."""

    def __init__(self, call: Add, text: str | None, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices = [ChoiceText(tokenizer, call.params, i, call.prompt) for i in range(call.params.n)]
        outputs = [CompletionOutput(i) for i in range(call.params.n)]
        metrics = RequestMetrics(arrival=call.arrival)
        self._at_once = not call.params.stop_strings and call.params.logprobs is None
        self._held: list[list[int]] = [[] for _ in self._choices]
        self.output = RequestOutput(call.request_id, text, call.prompt, outputs, call.seed, metrics=metrics)

    def settle(self, update: Update) -> None:
        """Keep a choice's account, which comes with its last news."""
        if update.account is not None:
            self.output.metrics.accounts[update.choice] = update.account

    def push(self, update: Update) -> str | None:
        """Take in news; the stop string, if the engine has to be told of one."""
        out, choice, held = self.output, self._choices[update.choice], self._held[update.choice]
        if self._at_once and update.reason is None and out.metrics.first_token:
            held += update.tokens
            return None
        if choice.finished:
            return None
        self.settle(update)
        if held:
            update = replace(update, tokens=held + update.tokens)
        if update.choice == 0:
            out.num_cached_tokens = update.cached
        out.metrics.scheduled = out.metrics.scheduled or update.scheduled
        out.metrics.first_token = out.metrics.first_token or time.monotonic()
        out.metrics.preemptions = max(out.metrics.preemptions, update.preemptions)
        out.metrics.note_drafts(update)
        if update.prompt_logprobs is not None and out.prompt_logprobs is None:
            out.prompt_logprobs = readable_prompt(update.prompt_logprobs, self._tokenizer)
        delta = choice.push(update)
        out.outputs[update.choice].add(delta)
        if all(c.finished for c in self._choices):
            out.finished = True
            out.metrics.finished = time.monotonic()
        return str(delta.stop_reason) if choice.finished and update.reason is None else None


def _prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(given, str | Mapping):
        return [given]
    if not isinstance(given, Sequence):
        raise RequestError(f"prompts is a text or a list, not {type(given).__name__}", param="prompts")
    if given and isinstance(given[0], int):
        raise RequestError("a prompt of ids is given as {'prompt_token_ids': [...]}", param="prompts")
    prompts: list[Any] = list(given)
    return prompts


@contextlib.contextmanager
def _progress(total: int, show: bool) -> Iterator[Any]:
    """A bar on standard error where that is a terminal."""
    if not (show and sys.stderr.isatty()):
        yield lambda: None
        return
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
