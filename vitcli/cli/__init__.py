"""The command line. Importing it imports no torch: `--help` and usage errors stay fast."""

from __future__ import annotations

from typing import Annotated

import typer

from vitcli._version import __version__
from vitcli.cli import (
    attn_entropy,
    compare,
    encode,
    export,
    neighbours,
    params,
    presets,
    probe,
    profile,
    sweep,
    train,
    train_shapes,
    weights,
)
from vitcli.cli.boundary import Boundary, Command

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


app.command("encode", cls=Command)(encode.encode)
app.command("neighbours", cls=Command)(neighbours.neighbours)
app.command("probe", cls=Command)(probe.probe)
app.command("params", cls=Command)(params.params)
app.command("profile", cls=Command)(profile.profile)
app.command("export", cls=Command)(export.export)
app.command("attn-entropy", cls=Command)(attn_entropy.attn_entropy)
app.command("compare", cls=Command)(compare.compare)
app.command("train", cls=Command)(train.train)
app.command("train-shapes", cls=Command)(train_shapes.train_shapes)
app.command("sweep", cls=Command)(sweep.sweep)
app.command("presets", cls=Command)(presets.presets)
app.command("families", cls=Command)(weights.families)
app.command("convert", cls=Command)(weights.convert)
