"""Floor 8: the one command. Owes: nothing is imported that the command called does not need; errors as one plain line.

`COMMANDS` is the registry: each command is the function `run` of a module of its own, loaded when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from headrace.base.errors import HeadraceError

COMMANDS = {
    "serve": "Serve a model over an OpenAI-compatible API.",
    "generate": "Answer or complete a prompt.",
    "chat": "Talk to a model in the terminal.",
    "pull": "Fetch a model, so that it starts at once later.",
    "inspect": "Say what a model is made of.",
    "version": "Say which Headrace this is.",
}

_CONTEXT = {
    "token_normalize_func": lambda name: name.replace("_", "-"),  # --max_model_len is --max-model-len
    "help_option_names": ["-h", "--help"],
}


class _Later(TyperCommand):
    """A command whose module is loaded when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the real command."""
        return load(self.name or "").make_context(info_name, args, parent=parent, **extra)


def load(name: str) -> Any:
    """The real command of that name."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(name, context_settings=_CONTEXT, help=COMMANDS[name])(import_module(f"headrace.cli.{name}").run)
    return get_command(app)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits: 0 well, 1 with a line of explanation, 2 wrong usage, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    group = TyperGroup(
        name="headrace",
        help="Headrace serves large language models.",
        rich_markup_mode=None,
        commands={name: _Later(name, callback=None, help=text) for name, text in COMMANDS.items()},
        context_settings=_CONTEXT,
        no_args_is_help=True,
    )
    try:
        group.main(["version"] if args == ["--version"] else args, prog_name="headrace")
    except HeadraceError as error:
        print("headrace:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
