"""``headrace generate``: one prompt, one streamed answer.

A model with a chat template answers the prompt as a user's message, unless ``--raw``; one without continues it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from headrace.base.errors import RequestError
from headrace.base.log import to_stderr
from headrace.base.settings import DEFAULT_MODEL, EngineSettings
from headrace.cli import terminal
from headrace.cli.flags import ModelOption, whole_or_auto, with_engine
from headrace.cli.voice import Voice
from headrace.core.sampling import SamplingParams


@with_engine
def run(
    *,
    settings: Callable[[str], EngineSettings],
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [PROMPT]", help="One word is the prompt; none: it is read from standard input."
        ),
    ] = None,
    model: ModelOption = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Use the chat template. Default: if the model has one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message, with --chat.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say how fast it was, on standard error.")] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(parser=whole_or_auto, metavar="N|auto", help="auto: up to the context."),
    ] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0: the likeliest token. [default: the model's, or 0.7]")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="[default: the model's, or 0.95]")] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be given again.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="How many answers.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to the limit.")] = False,
) -> None:
    """Complete or answer a prompt."""
    to_stderr()
    named, prompt = _model_and_prompt(texts or [])
    voice = Voice(settings(model or named or DEFAULT_MODEL))
    params = voice.params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
        n=n,
        ignore_eos=ignore_eos,
    )
    ids = _prompt_ids(voice, prompt, chat, system)
    try:
        _speak(voice, ids, params)
    finally:
        if stats:
            _tell(voice)
        voice.close()


def _model_and_prompt(texts: list[str]) -> tuple[str | None, str]:
    if len(texts) > 2:
        raise typer.BadParameter("give one prompt, in quotes, or a model and a prompt")
    return (texts[0] if len(texts) == 2 else None), texts[-1] if texts else _read_prompt()


def _read_prompt() -> str:
    if sys.stdin.isatty():
        terminal.note("Type the prompt, then Ctrl-D:")
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on standard input is not UTF-8: {error}") from None


def _prompt_ids(voice: Voice, prompt: str, chat: bool | None, system: str | None) -> list[int]:
    if chat is False or (chat is None and voice.template is None):
        if system is not None:
            raise RequestError("--system needs a model with a chat template, and not --raw")
        return voice.tokenizer.encode(prompt)
    before = [{"role": "system", "content": system}] if system is not None else []
    return voice.rendered([*before, {"role": "user", "content": prompt}])


def _speak(voice: Voice, ids: list[int], params: SamplingParams) -> None:
    """One answer streams; several come one after the other, when they are done."""
    out = terminal.prepare(sys.stdout)
    texts = [""] * params.n
    for deltas in voice.say(ids, params):
        for delta in deltas:
            texts[delta.index] += delta.text
            if params.n == 1:
                terminal.write(delta.text, out)
    if params.n == 1:
        terminal.write("" if texts[0].endswith("\n") else "\n", out)
        return
    for i, text in enumerate(texts):
        terminal.write(f"--- {i + 1} of {params.n}\n{text}\n", out)


def _tell(voice: Voice) -> None:
    said = voice.spoken
    terminal.note(
        f"load {voice.load_seconds:.2f} s; {said.prompt_tokens} prompt tokens, first token after "
        f"{1000 * said.first_seconds:.0f} ms; {said.tokens} tokens, {said.tokens_per_second:.1f} tokens/s; "
        f"seed {said.seed}"
    )
