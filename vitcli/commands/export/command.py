"""vitcli export, vitcli convert: their options and tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from vitcli.config.request import ModelRequest
from vitcli.config.settings import parse_setting
from vitcli.engines import OPSET, OPSETS
from vitcli.files import check_output, data_size
from vitcli.ui.console import note, show, status, table
from vitcli.ui.options import (
    ModelOptions,
    Output,
    PrefixOption,
    WhichOption,
    grouped,
    load_all,
    option,
)

if TYPE_CHECKING:
    from vitcli.commands.export.analysis import ConvertResult, ExportResult


@grouped
def export(
    out: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The file to write.")],
    *,
    model: ModelOptions,
    opset: Annotated[
        int,
        option(
            "--opset",
            "N",
            f"ONNX operator set, {OPSETS[0]} to {OPSETS[-1]}.",
            min=OPSETS[0],
            max=OPSETS[-1],
        ),
    ] = OPSET,
    output: Output,
) -> None:
    """Write an encoder as an ONNX graph of any batch size, checked against plain torch.

    Weights above 2 GiB go to OUT.onnx.data beside it. The names of a classifier's outputs are in
    the graph's metadata, as a JSON list under `classes`. Needs the extra `onnx`.

    \b
    Examples:
      vitcli export vit-b16.onnx
      vitcli export dino.onnx --weights facebook/dinov2-small --image-size 518
    """

    check_output(out, ".onnx")
    (loaded,) = load_all([model.to_request()])
    from vitcli.commands.export import analysis

    with status("exporting and checking"):
        result = analysis.export(loaded, out, opset=opset)
    show(result, output.form)


@grouped
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Checkpoint file, directory or hub owner/name.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    preset: Annotated[
        str | None, option("--preset", "NAME", "Preset for settings that the source lacks.")
    ] = None,
    settings: Annotated[
        list[str] | None, option("--set", "KEY=VALUE", "Set a config key. Repeatable.")
    ] = None,
    dtype: Annotated[
        str, option("--dtype", "TYPE", "float32, bfloat16, float16 or float64.")
    ] = "float32",
    which: WhichOption = None,
    prefix: PrefixOption = None,
    *,
    output: Output,
) -> None:
    """Write a checkpoint as safetensors with vitcli's YAML config and preprocessing.

    The directory appears only when it is complete, and loads back bit for bit.

    \b
    Examples:
      vitcli convert facebook/dinov2-small dinov2
      vitcli convert ViT-B-16.pt clip --preset clip-b16
    """

    request = ModelRequest(
        preset=preset,
        settings=tuple(parse_setting(text) for text in settings or ()),
        weights=source,
        device="cpu",
        dtype=dtype,
        which=which,
        prefix=prefix,
    )
    with status("converting"):
        from vitcli.checkpoints.weights import report_line
        from vitcli.commands.export.analysis import convert as analysis
        from vitcli.loading import load_model

        result = analysis(load_model(request), out)
    note(report_line(result.checkpoint))
    show(result, output.form)


def tables(result: ExportResult) -> Iterator[str | Table]:
    """The files, the graph's inputs and outputs, and the difference to eager."""
    for file in result.files:
        yield f"[bold]{escape(file.path)}[/]  {data_size(file.bytes)}"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield f"{escape(result.model.name)}, opset {result.opset}; {versions}"
    grid = table(None, "tensor", "kind", "shape")
    for kind, tensors in (("input", result.inputs), ("output", result.outputs)):
        for tensor in tensors:
            grid.add_row(tensor.name, kind, "(" + ", ".join(map(str, tensor.shape)) + ")")
    yield grid
    if result.classes:
        shown = ", ".join(result.classes[:5]) + ", ..." * (len(result.classes) > 5)
        yield f"classes in the metadata: {escape(shown)}"
    batches = " and ".join(map(str, result.checked_batches))
    yield (
        f"checked against eager at batch {batches}: largest difference {result.max_error:.1e} "
        f"(tolerance {result.tolerance:.0e})"
    )


def convert_tables(result: ConvertResult) -> Iterator[Table]:
    """What was written, from what, and its digest."""
    grid = table(padding=(0, 2, 0, 0), show_edge=False, pad_edge=False)  # a digest fits 80 columns
    grid.show_header = False
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("wrote", escape(result.folder))
    grid.add_row("from", escape(f"{result.checkpoint.source} ({result.checkpoint.family})"))
    grid.add_row("parameters", f"{result.parameters:,}")
    grid.add_row("bytes", f"{result.bytes:,}")
    grid.add_row("sha256", result.sha256)
    yield grid
