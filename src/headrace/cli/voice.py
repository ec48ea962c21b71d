"""A model in this process that says its answer as it comes: what ``generate`` and ``chat`` speak with.

Owes: text in pieces, a clean end on Ctrl-C (the step is finished first, so the engine stays whole). Does not know:
the terminal.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import EngineError, RequestError
from headrace.base.settings import EngineSettings
from headrace.core.sampling import SamplingParams
from headrace.engine.loading import load
from headrace.engine.output import ChoiceText, Delta
from headrace.engine.requests import checked, own_defaults
from headrace.text import normalise_messages

_MILD = {"temperature": 0.7, "top_p": 0.95}  # for people at a terminal; the server's defaults are neutral


@dataclass(slots=True)
class Spoken:
    """What an answer took. Seconds from the request to the first token, and from there to the last."""

    prompt_tokens: int = 0
    tokens: int = 0
    first_seconds: float = 0.0
    decode_seconds: float = 0.0
    seed: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first."""
        return (self.tokens - 1) / self.decode_seconds if self.decode_seconds and self.tokens > 1 else 0.0


class Voice:
    """A loaded model. Raises HeadraceError when it cannot be had."""

    def __init__(self, settings: EngineSettings) -> None:
        start = time.perf_counter()
        text, self._engine = load(settings)
        self.tokenizer, self.template = text.tokenizer, text.template
        self._numbers = itertools.count()
        self.load_seconds = time.perf_counter() - start
        self.spoken = Spoken()

    def params(self, **given: Any) -> SamplingParams:
        """Sampling parameters: what is given (None: not given), then the model's own, then mild ones."""
        own, _, _ = own_defaults(self._engine.info.generation)
        said = {name: value for name, value in given.items() if value is not None}
        chosen: dict[str, Any] = {"max_tokens": None, **_MILD, **own, **said}
        return SamplingParams(**chosen)

    def rendered(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as token ids."""
        if self.template is None:
            raise RequestError("this model has no chat template: use --raw, or give one with --chat-template")
        return self.tokenizer.encode_chat(self.template.render(normalise_messages(messages)))

    def say(self, prompt: list[int], params: SamplingParams) -> Iterator[list[Delta]]:
        """The answer, a list of news a step; `spoken` tells afterwards. KeyboardInterrupt between steps on Ctrl-C."""
        name = str(next(self._numbers))
        request = checked(prompt, params, self._engine.info, self.tokenizer, request_id=name)
        choices = [ChoiceText(self.tokenizer, request.params, i, prompt) for i in range(params.n)]
        self.spoken = Spoken(prompt_tokens=len(prompt), seed=request.seed)
        self._engine.add(request)
        try:
            with _interruptible() as interrupted:
                while not all(choice.finished for choice in choices):
                    deltas = self._step(name, choices)
                    self._time(request.arrival, deltas)
                    yield deltas
                    if interrupted:
                        raise KeyboardInterrupt
        finally:
            self._engine.abort(name)

    def close(self) -> None:
        """Free the model's memory and threads."""
        self._engine.close()

    def _step(self, name: str, choices: Sequence[ChoiceText]) -> list[Delta]:
        deltas = []
        for update in self._engine.step():
            choice = choices[update.choice]
            if choice.finished:
                continue
            delta = choice.push(update)
            if delta.finish_reason == "error":
                raise EngineError(delta.error or "the request failed inside the engine")
            if choice.finished and update.reason is None:
                self._engine.stopped(name, update.choice, str(delta.stop_reason))
            deltas.append(delta)
        return deltas

    def _time(self, arrival: float, deltas: Sequence[Delta]) -> None:
        since, spoken = time.monotonic() - arrival, self.spoken
        spoken.tokens += sum(len(delta.token_ids) for delta in deltas)
        if not spoken.first_seconds and spoken.tokens:
            spoken.first_seconds = since
        spoken.decode_seconds = since - spoken.first_seconds


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C is only noted in the list (a second one is not waited for), so that no step is cut in two."""
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, before)

    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: signals are somebody else's business
        yield noted
        return
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
