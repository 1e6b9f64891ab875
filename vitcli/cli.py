"""The command line. Importing it imports no torch: `--help` and usage errors stay fast."""

from __future__ import annotations

from typing import Annotated

import typer

from vitcli._version import __version__
from vitcli.commands import COMMANDS, command_function
from vitcli.ui.error_handling import Boundary, Command

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
