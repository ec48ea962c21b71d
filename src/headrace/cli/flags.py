"""The engine's flags, as a table that every command which runs a model shares. Names are vLLM's where it has them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headrace.base.formats import ENCODED
from headrace.base.settings import DEFAULT_MODEL, ISAS, EngineSettings

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgKMGT]?)(?:i?B)?")


def whole(given: str | int) -> int:
    """An integer such as 4096, 4k (4000), 4K (4096), 1.5G. Defaults come as they are."""
    text = str(given).strip()
    match = _NUMBER.fullmatch(text)
    count = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if match is None or count != int(count):
        raise typer.BadParameter(f"{text!r} is no whole number; write 4096, 4k (4000), 4K (4096) or 2G")
    return int(match[1]) * _UNITS[match[2]] if "." not in match[1] else int(count)


def whole_or_auto(given: str | int) -> int | None:
    """As `whole`; ``auto`` and -1 leave the choice to the engine."""
    return None if given in ("auto", "-1") else whole(given)


def milliseconds_or_auto(given: str) -> float | None:
    """A number; ``auto`` leaves it to the engine."""
    try:
        return None if given == "auto" else float(given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is no number of milliseconds; write 20, 0 (no limit) or auto") from None


Command = Callable[..., None]
Flag = tuple[Any, dict[str, Any], str]  # its type, how it is read, what it does
FlagTable = dict[str, Flag]  # by the name of the setting

_OBJECT = """is no JSON object, which a shell needs in quotes, such as '{"name": "value"}'"""

COUNT: dict[str, Any] = {"parser": whole, "metavar": "N"}


def json_object(given: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object. Defaults come as they are."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{_OBJECT}: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(_OBJECT)
    return value


_JSON: dict[str, Any] = {"parser": json_object, "metavar": "JSON"}
_AUTO: dict[str, Any] = {"parser": whole_or_auto, "metavar": "N|auto"}
_PACE: dict[str, Any] = {"parser": milliseconds_or_auto, "metavar": "MS|auto"}
ENGINE_FLAGS: FlagTable = {
    "revision": (str | None, {}, "Branch, tag or commit of a hub repository."),
    "tokenizer": (str | None, {}, "Another tokenizer than the model's own."),
    "chat_template": (str | None, {}, "A Jinja template, or the path of one."),
    "max_model_len": (int | None, _AUTO, "Longest prompt and answer together, in tokens."),
    "max_num_seqs": (int, COUNT, "Sequences that may run at once."),
    "max_num_batched_tokens": (int, COUNT, "Tokens computed in one step."),
    "max_num_queued_reqs": (int | None, _AUTO, "Sequences that may wait beyond those that run; more get 429."),
    "max_num_queued_tokens": (int | None, _AUTO, "Prompt tokens that may wait to be begun; more get 429."),
    "max_inter_token_ms": (
        float | None,
        _PACE,
        "Longest step while prompts are computed beside streams; auto: twice one without prompts; 0: no limit.",
    ),
    "max_logprobs": (int, COUNT, "Most alternatives a request may ask for."),
    "generation_config": (str, {"metavar": "auto|vllm|PATH"}, "Sampling defaults: the model's own, none, or a file's."),
    "override_generation_config": (dict | None, _JSON, 'Sampling defaults, such as {"temperature": 0.7}.'),
    "enable_prefix_caching": (bool, {}, "Reuse what prompts have in common."),
    "kv_cache_memory_bytes": (int | None, _AUTO, "Size of the KV cache, such as 2G."),
    "threads": (int, COUNT, "Threads of the back end; 0: what the machine allows."),
    "batching": (str, {"metavar": "continuous|static"}, "static: fill a batch, finish it, then the next."),
    "kv_cache_dtype": (str, {"metavar": "TYPE"}, "auto (float16), bfloat16 or int8: half the memory, less exact."),
    "quantization": (
        str | None,
        {"metavar": "|".join(ENCODED), "names": ("--quantization", "-q")},
        "Round float weights to it as they are loaded; see `headrace quantize` for better ways.",
    ),
    "kv_cache_dir": (str | None, {"metavar": "DIR"}, "Keep prefixes in this folder, so that they survive a restart."),
    "kv_cache_dir_bytes": (int, COUNT, "The most that they take there."),
    "kv_cache": (bool, {}, "Off: compute the whole sequence at each step, to compare."),
    "backend": (str, {"metavar": "cpu|reference"}, "reference: numpy, slow, the specification."),
    "dtype": (str, {"metavar": "auto|float32|bfloat16"}, "Inputs of bf16 weights: bfloat16 is faster, less exact."),
    "speculative_config": (
        dict | None,
        _JSON | {"names": ("--speculative-config", "-sc")},
        'Guess tokens ahead: {"method": "suffix"}, ngram or self, or {"model": "REFERENCE"}.',
    ),
    "measure_roof": (bool, {}, "Measure the machine first (0.3 s): metrics then tell the share of its roof."),
    "isa": (str, {"metavar": "|".join(ISAS)}, "Force an instruction set; empty: the best there is."),
}

ModelArgument = Annotated[
    str,
    typer.Argument(help="A .gguf file, a folder, org/name of the hub, pypi:package, or a name of the catalogue."),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="The model, as an option.", show_default=DEFAULT_MODEL)
]


class ManyValues(TyperCommand):
    """A command whose repeated options take all the words up to the next option: ``--sequences 1 8 32``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Gives each such word its option."""
        many = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        given, option = [], ""
        for word in args:
            if word.startswith("-"):
                option = word if word.replace("_", "-") in many else ""
                given.append(word)
            else:
                given += [option, word] if option and given[-1] != option else [word]
        rest: list[str] = super().parse_args(ctx, given)
        return rest


def with_engine(command: Command) -> Command:
    """Adds the engine's flags to a command, which gets them as `settings`, a function from the model to settings."""
    return _with(
        command, "settings", _parameters(EngineSettings, ENGINE_FLAGS, "Engine"), lambda given: partial(_engine, given)
    )


def with_flags(name: str, record: type[Any], table: FlagTable, panel: str) -> Callable[[Command], Command]:
    """Adds a table's flags to a command, which gets them as `name`, a `record`, whose defaults they have."""
    parameters = _parameters(record, table, panel)

    def make(given: dict[str, Any]) -> Any:
        return record(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})

    return lambda command: _with(command, name, parameters, make)


def _with(command: Command, name: str, added: Sequence[Parameter], make: Callable[[dict[str, Any]], Any]) -> Command:
    """`command` with the parameters `added` in the place of `name`, which is what `make` makes of their values."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [*(p for p in signature.parameters.values() if p.name != name), *added]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        own = {parameter.name: given.pop(parameter.name) for parameter in added}
        command(**{name: make(own)}, **given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _engine(given: dict[str, Any], model: str) -> EngineSettings:
    return EngineSettings.of(model, **given)


def as_arguments(settings: EngineSettings) -> list[str]:
    """The command line that gives these settings, the model first."""
    given = [settings.model]
    for field in dataclasses.fields(EngineSettings):
        value = getattr(settings, field.name)
        if field.name in ENGINE_FLAGS and value != field.default:
            flag = field.name.replace("_", "-")
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            given += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", text]
    return given


def _parameters(record: type[Any], table: FlagTable, panel: str) -> list[Parameter]:
    return [_parameter(field, table[field.name], panel) for field in dataclasses.fields(record) if field.name in table]


def _parameter(field: dataclasses.Field[Any], flag: Flag, panel: str) -> Parameter:
    kind, options, text = flag
    names = options.get("names", ())
    options = {name: value for name, value in options.items() if name != "names"}
    option = typer.Option(*names, help=text, rich_help_panel=panel, **options)
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option])
