"""vitcli families, vitcli convert"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.config.load import parse_setting
from vitcli.config.request import ModelRequest
from vitcli.ui.options import JsonOption
from vitcli.ui.output import show


def families(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Only families whose name contains it.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """The checkpoint families that --weights reads, and how each was verified.

    \b
    Examples:
      vitcli families
      vitcli families timm --json
    """
    from vitcli.commands.catalog.analysis_weights import families as analysis

    result = analysis(word)
    from vitcli.commands.catalog.view_weights import families_table

    show(result, json, lambda result: [families_table(result)])


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Checkpoint file, directory or hub owner/name.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME", help="Fills in what the source does not tell."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a config key. Repeatable."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", metavar="TYPE", help="float32, bfloat16, float16 or float64."),
    ] = "float32",
    json: JsonOption = False,
) -> None:
    """Write a checkpoint as safetensors with vitcli's YAML, preprocessing included.

    The directory is whole when it appears, loads back bit for bit, and loads without a copy.

    \b
    Examples:
      vitcli convert facebook/dinov2-small dinov2
      vitcli convert ViT-B-16.pt clip --preset clip-b16
    """
    from vitcli.ui.console import note, status

    request = ModelRequest(
        preset=preset,
        settings=tuple(parse_setting(text) for text in settings or ()),
        weights=source,
        device="cpu",
        dtype=dtype,
    )
    with status("converting"):
        from vitcli.commands.catalog.analysis_weights import convert as analysis
        from vitcli.model import load_model

        result = analysis(load_model(request), out)
    note(result.checkpoint.line())
    from vitcli.commands.catalog.view_weights import convert_table

    show(result, json, lambda result: [convert_table(result)])
