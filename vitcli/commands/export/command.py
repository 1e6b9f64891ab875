"""vitcli export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.engines import OPSET
from vitcli.ui.options import JsonOption, ModelOptions, grouped
from vitcli.ui.output import show


@grouped
def export(
    out: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The file to write.")],
    *,
    model: ModelOptions,
    opset: Annotated[
        int, typer.Option("--opset", min=18, metavar="N", help="ONNX operator set.")
    ] = OPSET,
    json: JsonOption = False,
) -> None:
    """Write an encoder as an ONNX graph with a free batch, checked against eager.

    Weights above 2 GiB go to OUT.onnx.data beside it. Needs the extra `onnx`.

    \b
    Examples:
      vitcli export vit-b16.onnx
      vitcli export dino.onnx --weights facebook/dinov2-small --image-size 518
    """
    from vitcli.ui.console import note, status

    request = model.to_request()
    if request.weights is None:
        request.fresh_config()  # a bad config is told before torch is loaded
    with status("loading torch and the encoder"):
        from vitcli.commands.export import analysis
        from vitcli.model import load_model

        analysis.check_export_file(out)
        loaded = load_model(request)
    with status("exporting and checking"):
        result = analysis.export(loaded, out, opset)
    if loaded.fresh:
        note("fresh weights: the graph describes the architecture, not a trained encoder")
    from vitcli.commands.export.view import tables

    show(result, json, tables)
