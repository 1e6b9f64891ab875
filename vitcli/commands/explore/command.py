"""vitcli explore, vitcli grid"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.errors import VitcliError
from vitcli.ui.console import progress, status
from vitcli.ui.figures import Plot, check_figure_file, finish
from vitcli.ui.options import (
    BackgroundOption,
    EncodersOptions,
    Output,
    grouped,
    load_all,
    parse_color,
)

LayersOption = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="N,M,...",
        help="Layers, with commas: 0 is the input of the first block, i the output of block i, "
        "-1 the last (default: four, evenly spaced).",
    ),
]


@grouped
def explore(
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE", help="Image files (default: a built-in image)."),
    ] = None,
    *,
    encoders: EncodersOptions,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.html", help="The page to write.")
    ] = Path("explore.html"),
    layers: LayersOption = None,
    max_size: Annotated[
        float,
        typer.Option("--max-size", metavar="MIB", min=0.1, help="Largest size of the page."),
    ] = 10.0,
    background: BackgroundOption = "white",
    output: Output,
) -> None:
    """Write an HTML page that shows, for the patch under the pointer, similarity and attention.

    The page shows the patch's cosine similarity to every patch of every image, its attention (per
    head, mean and rollout), features as colors, and norms, per layer, for one or two encoders. It
    is one file and needs no network.

    \b
    Examples:
      vitcli explore cats/*.jpg --weights facebook/dinov2-small --out cats.html
      vitcli explore cat.jpg --weights A --weights B --layers 3,6,9,12
    """

    requests = encoders.to_requests()
    if len(requests) > 2:
        raise VitcliError(
            f"explore: too many encoders (got {len(requests)}, expected 1 or 2)",
            "name at most two encoders",
        )
    chosen = _numbers(layers) if layers else None
    color = parse_color(background)
    with status("loading torch"):
        from vitcli.commands.explore import analysis
    analysis.check_page_file(out)
    loaded = load_all(requests)
    with progress("encoding") as bar:
        result = analysis.explore(
            loaded,
            images or [],
            out,
            layers=chosen,
            max_bytes=int(max_size * 2**20),
            background=color,
            progress=bar,
        )
    finish(result, output.form, failed=result.failed)


@grouped
def grid(
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE", help="Image files (default: a built-in image)."),
    ] = None,
    *,
    encoders: EncodersOptions,
    layers: LayersOption = None,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground/--all-patches",
            help="Color only the foreground: the side of the first principal component that "
            "touches "
            "the image border less.",
        ),
    ] = True,
    background: BackgroundOption = "white",
    output: Output,
    plot: Plot,
) -> None:
    """Draw the features of several encoders and layers in one figure.

    A row per encoder and image, a column per layer. Colors are the first three
    principal components of the patches of all chosen layers and images, each layer centered and
    scaled: one basis per encoder.

    \b
    Examples:
      vitcli grid cat.jpg --weights facebook/dinov2-small --preset vit-s16 --plot grid.png
      vitcli grid cat.jpg dog.jpg --weights A --weights B --layers 3,6,9,12 --plot grid.pdf
    """

    check_figure_file(plot)
    chosen = _numbers(layers) if layers else None
    color = parse_color(background)
    loaded = load_all(encoders.to_requests())
    with progress("encoding") as bar:
        from vitcli.commands.explore.grid import grid as analysis

        result = analysis(
            loaded,
            images or [],
            layers=chosen,
            foreground=foreground,
            background=color,
            progress=bar,
        )
    finish(result, output.form, plot, failed=result.failed)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise VitcliError(
            f"--layers {text}: are not layers (expected whole numbers with commas)",
            "--layers 3,6,9,12",
        ) from error
