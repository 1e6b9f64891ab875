"""vitcli verify"""

from __future__ import annotations

from typing import Annotated

import typer

from vitcli.ui.figures import Plot, check_figure_file, draw
from vitcli.ui.options import (
    EveryOption,
    Output,
    SharedModelOptions,
    grouped,
    model_option,
)
from vitcli.ui.tables import show


@grouped
def verify(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Checkpoint directory or hub owner/name.")
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE", help="Image files; without any, a built-in picture."),
    ] = None,
    *,
    preset: Annotated[
        str | None,
        model_option("--preset", metavar="NAME", help="Fills in what the source lacks."),
    ] = None,
    model: SharedModelOptions,
    every: EveryOption = 1,
    plot: Plot,
    output: Output,
) -> None:
    """Prove that a checkpoint gives its own library's numbers here.

    Loads SOURCE twice, here and by the library that wrote it (transformers, timm or open_clip),
    prepares the images by both, and compares pixels, every layer and the outputs.
    Exit code 0: equal within rounding; 1: not equal; 2: could not be compared.
    Needs the extra `reference`.

    \b
    Examples:
      vitcli verify facebook/dinov2-small photo.jpg
      vitcli verify ./my-finetuned-siglip --dtype float64
      vitcli verify ./clip --set encoder.norm_eps=1e-6 --plot layers.png
    """
    from vitcli.ui.console import note, progress, status, warn

    check_figure_file(plot)
    request = model.request(weights=source, preset=preset)
    with status("loading torch and the model"):
        from vitcli.commands.verify.analysis import verify_model
        from vitcli.model import load_model

        loaded = load_model(request)
    if loaded.report:
        note(loaded.report.line())
    with progress("comparing") as advance:
        result = verify_model(loaded, images or [], advance=advance)
    for failure in result.failed:
        warn(failure.error)
    if plot:
        draw(result.figure(), plot)
    from vitcli.commands.verify.view import tables

    show(result, output.form, lambda result: tables(result, every))
    if not result.equal or result.failed:
        raise typer.Exit(1)
