"""The command ``mpift``: one file a sub-command, loaded when it is asked for.

A file ``cli/NAME.py`` has either a function ``command`` or a ``typer.Typer`` called ``app``, and
loads whatever is heavy inside its functions. An error of usage, or a ``MpiftError``, is one line
and exit code 2, or 5 for a damaged checkpoint; what a command returns is the exit code otherwise.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from mpift._version import __version__
from mpift.errors import CheckpointDamagedError, ExitCode, MpiftError

COMMANDS = ("run", "doctor", "ckpt", "simulate", "bench")

# Options end at the first word that is none: what follows belongs to the command that is run.
_CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
# The command-line parser that typer stands on comes with it or by itself, as versions go.
_ParserError: Any = next(k for k in typer.BadParameter.__mro__ if k.__name__ == "ClickException")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script; leaves with the command's exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = _application(words)(words, prog_name="mpift", standalone_mode=False)
    except _ParserError as error:
        code = error.exit_code
        text = error.format_message()
        # A group without a command "fails" with its help text.
        print(text if "\n" in text else f"{_path_of(error)}: {text}", file=sys.stderr)
    except MpiftError as error:
        damaged = isinstance(error, CheckpointDamagedError)
        code = ExitCode.CHECKPOINT_DAMAGED if damaged else ExitCode.USAGE
        print(f"mpift {words[0]}: {error}", file=sys.stderr)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code if isinstance(code, int) else ExitCode.OK)


def _application(words: list[str]) -> Any:
    """The commands that ``words`` may mean: one if it is named, else all, for ``--help``."""
    application = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings=_CONTEXT, help=_HELP
    )
    application.callback()(_options)
    for name in (words[0],) if words[0] in COMMANDS else COMMANDS:
        module = importlib.import_module(f"mpift.cli.{name}")
        if hasattr(module, "app"):
            application.add_typer(module.app, name=name)
        else:
            application.command(name, context_settings=_CONTEXT)(module.command)
    command = typer.main.get_command(application)
    return command.main


_HELP = "Fault-tolerant data-parallel training over MPI."


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"mpift {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that come before any command."""


def _path_of(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context else "mpift"
