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
from vitcli.cli.boundary import Boundary

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


app.command("encode")(encode.encode)
app.command("neighbours")(neighbours.neighbours)
app.command("probe")(probe.probe)
app.command("params")(params.params)
app.command("profile")(profile.profile)
app.command("export")(export.export)
app.command("attn-entropy")(attn_entropy.attn_entropy)
app.command("compare")(compare.compare)
app.command("train")(train.train)
app.command("train-shapes")(train_shapes.train_shapes)
app.command("sweep")(sweep.sweep)
app.command("presets")(presets.presets)
app.command("families")(weights.families)
app.command("convert")(weights.convert)
