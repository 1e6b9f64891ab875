"""The command line. Importing it imports no torch: `--help` and usage errors stay fast."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from vitcli import __version__
from vitcli.commands import ALIASES, COMMANDS, command_function
from vitcli.errors import VitcliError
from vitcli.ui.console import stream

INTERRUPTED = 130


def complain(message: str, hint: str = "") -> None:
    """`error:` and what to do next, one line each, on stderr."""
    console = stream(stderr=True)
    console.print(f"[bold red]error:[/] {escape(_one_line(message))}")
    if hint:
        console.print(f"  [cyan]try:[/] {escape(_one_line(hint))}")


def _one_line(text: str) -> str:
    printable = text.encode("utf-8", "backslashreplace").decode()
    return "\\n".join(printable.splitlines())


def _out_of_memory(error: Exception) -> bool:
    """Python's own; torch's on a GPU; torch's on the CPU, which has no class, only a text."""
    kinds = ("MemoryError", "OutOfMemoryError")
    return type(error).__name__ in kinds or "DefaultCPUAllocator" in str(error)


def _interrupted() -> typer.Exit:
    complain("interrupted")
    return typer.Exit(INTERRUPTED)


def _without_types(parameters: list[Any]) -> list[Any]:
    """Flags take no value, so the help names no type for them."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command whose help says what takes a value and what does not."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Boundary(TyperGroup):
    """Turns what a user can cause into one line and an exit code; never a traceback."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        try:
            return super().make_context(*arguments, **more)
        except KeyboardInterrupt as error:  # typer's own answer to it says nothing
            raise _interrupted() from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except VitcliError as error:
            if ctx.params.get("debug"):
                raise
            complain(error.message, error.hint)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            raise _interrupted() from error
        except BrokenPipeError as error:
            # The reader went away; keep Python's own flush at exit from complaining.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from error
        except OSError as error:
            if ctx.params.get("debug"):
                raise
            where = f"{error.filename}: " if error.filename else ""
            full = error.errno == errno.ENOSPC
            hint = "free some space and run it again" if full else ""
            complain(f"{where}{error.strerror or error}", hint)
            raise typer.Exit(1) from error
        except Exception as error:
            # typer's own (usage errors, exits) pass; all else is ours to mend.
            if ctx.params.get("debug") or type(error).__module__.startswith(("typer", "click")):
                raise
            if _out_of_memory(error):
                complain("out of memory", "a smaller batch, image or encoder")
                raise typer.Exit(1) from error
            complain(
                f"{type(error).__name__}: {error}",
                "this is a fault in vitcli: `vitcli --debug ...` shows where",
            )
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Boundary,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"vitcli {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Questions about Vision Transformer encoders, one command each.

    Every command takes a preset, a YAML config or a published checkpoint, and
    answers as a table, as JSON (--json) or as a picture (--plot).
    """


for _name in COMMANDS:
    app.command(_name, cls=Command)(command_function(_name))
for _alias, _name in ALIASES.items():
    app.command(_alias, cls=Command, hidden=True)(command_function(_name))
