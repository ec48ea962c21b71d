"""``headrace chat``: a conversation in the terminal. Ctrl-C ends an answer; at the prompt it ends the program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from headrace.base.errors import RequestError
from headrace.base.log import to_stderr
from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.cli import terminal
from headrace.cli.flags import ModelArgument, ModelOption, whole_or_auto, with_engine
from headrace.cli.voice import Voice
from headrace.core.sampling import SamplingParams

with suppress(ImportError):
    import readline  # noqa: F401  lines can be edited and recalled where it is there

HELP = "/help  this\n/reset  begin a new conversation\n/exit  leave (so do Ctrl-D, and Ctrl-C at the prompt)"


@with_engine
def run(
    *,
    settings: Callable[[str], EngineSettings],
    model: ModelArgument = DEFAULT_MODEL,
    model_option: ModelOption = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say after each answer how fast it was.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(parser=whole_or_auto, metavar="N|auto", help="Longest answer; auto: to the context."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: the likeliest token. [default: the model's, or 0.7]")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="[default: the model's, or 0.95]")] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answers.")] = None,
) -> None:
    """Talk to a model."""
    to_stderr()
    voice = Voice(settings(model_option or model))
    params = voice.params(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    if voice.template is None:
        raise RequestError("this model has no chat template: give one with --chat-template, or use headrace generate")
    try:
        Conversation(voice, params, system, stats).run()
    finally:
        voice.close()


class Conversation:
    """Turns of a user at the terminal and a model."""

    def __init__(self, voice: Voice, params: SamplingParams, system: str | None, stats: bool) -> None:
        self._voice = voice
        self._params = params
        self._stats = stats
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._start)
        self._out = terminal.prepare(sys.stdout)
        self._commands: dict[str, Callable[[], None]] = {"/help": lambda: self._say(HELP), "/reset": self._reset}

    def run(self) -> None:
        """Until the user leaves."""
        if sys.stdin.isatty():
            self._say("Type a message, or /help.")
        while (line := self._read()) is not None:
            if line in self._commands:
                self._commands[line]()
            elif line.startswith("/"):
                self._say(f"no such command: {line}\n{HELP}")
            elif line:
                self._turn(line)

    def _read(self) -> str | None:
        """The next line; None to leave."""
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            line = "/exit"
        except UnicodeDecodeError:
            raise RequestError("standard input is not UTF-8") from None
        return None if line in ("/exit", "/quit") else line

    def _turn(self, line: str) -> None:
        asked = [*self._messages, {"role": "user", "content": line}]
        answer = ""
        try:
            for deltas in self._voice.say(self._voice.rendered(asked), self._params):
                for delta in deltas:
                    answer += delta.text
                    terminal.write(delta.text, self._out)
        except KeyboardInterrupt:
            terminal.write(" [ended]", self._out)
        except RequestError as error:
            self._say(f"{error}\n/reset begins a new conversation.")
            return
        terminal.write("\n", self._out)
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        if self._stats:
            said = self._voice.spoken
            terminal.note(f"[{said.tokens} tokens, {said.tokens_per_second:.1f} tokens/s]")

    def _reset(self) -> None:
        self._messages = list(self._start)
        self._say("a new conversation")

    def _say(self, text: str) -> None:
        terminal.write(text + "\n", self._out)
