"""Floor 8: the one command. Owes: nothing is imported that the command called does not need; errors as one plain line.

`COMMANDS` is the registry: each command is the function `run` of a module of its own, loaded when it is called; a group
of commands is a folder of modules.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from headrace.base.errors import HeadraceError

Table = Mapping[str, "str | tuple[str, Table]"]  # name: what it does; of a group also its commands
COMMANDS: Table = {
    "serve": "Serve a model over an OpenAI-compatible API.",
    "generate": "Answer or complete a prompt.",
    "chat": "Talk to a model in the terminal.",
    "pull": "Fetch a model, so that it starts at once later.",
    "inspect": "Say what a model is made of.",
    "quantize": "Write a smaller copy of a model.",
    "eval": "Measure how good models are at a text, and how far from a reference.",
    "plan": "Say what a model would take, and how many requests fit.",
    "bench": (
        "Measure how fast it is.",
        {
            "step": "One step, against what this machine could do.",
            "throughput": "Many requests at once, without a server.",
            "latency": "One batch of requests after another, without a server.",
            "startup": "From a new process to its first token.",
            "serve": "Requests to any OpenAI-compatible server, or to one of our own.",
        },
    ),
    "version": "Say which Headrace this is.",
}

_CONTEXT = {
    "token_normalize_func": lambda name: name.replace("_", "-"),  # --max_model_len is --max-model-len
    "help_option_names": ["-h", "--help"],
}


class _Later(TyperCommand):
    """A command whose module is loaded when it is called. path: of its module, below headrace.cli."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(path.rpartition(".")[2], callback=None, help=text)
        self._path = path

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the real command."""
        return load(self._path, str(self.help)).make_context(info_name, args, parent=parent, **extra)


def load(path: str, text: str) -> Any:
    """The real command of that module, with that help."""
    module = import_module(f"headrace.cli.{path}")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    kind = getattr(module, "KIND", TyperCommand)
    app.command(path.rpartition(".")[2], cls=kind, context_settings=_CONTEXT, help=text)(module.run)
    return get_command(app)


def _group(name: str, text: str, table: Table, path: str = "") -> TyperGroup:
    commands: dict[str, Any] = {
        key: _Later(path + key, told) if isinstance(told, str) else _group(key, *told, path=f"{path}{key}.")
        for key, told in table.items()
    }
    return TyperGroup(
        name=name,
        help=text,
        rich_markup_mode=None,
        commands=commands,
        context_settings=_CONTEXT,
        no_args_is_help=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 well, 1 with a line of explanation, 2 wrong usage, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    group = _group("headrace", "Headrace serves large language models.", COMMANDS)
    try:
        group.main(["version"] if args == ["--version"] else args, prog_name="headrace")
    except HeadraceError as error:
        print("headrace:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
