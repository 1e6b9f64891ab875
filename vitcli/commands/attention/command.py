"""vitcli attn-entropy"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitcli.errors import VitcliError
from vitcli.ui.figures import Plot, draw
from vitcli.ui.options import (
    BackgroundOption,
    EncodersOptions,
    EveryOption,
    Output,
    grouped,
)
from vitcli.ui.tables import show

if TYPE_CHECKING:
    from vitcli.model import Model


@grouped
def attn_entropy(
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE", help="Image files; without any, a built-in picture."),
    ] = None,
    *,
    models: EncodersOptions,
    query: Annotated[
        str,
        typer.Option(
            "--query",
            metavar="all|cls|patch|ROW,COL",
            help="Whose attention to report, and whose map --overlay draws (there, all means CLS, "
            "or the mean over patches without CLS). Rows and columns count from 0.",
        ),
    ] = "all",
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="LIST",
            help="Blocks to report, e.g. 3,7,11 or -1 for the last; they count from 1.",
        ),
    ] = None,
    every: EveryOption = 1,
    outlier_cut: Annotated[
        str,
        typer.Option(
            "--outlier-cut",
            metavar="Kx|NORM",
            help="Patch tokens above this norm are outliers: 3x is three times the layer's median.",
        ),
    ] = "3x",
    overlay: Annotated[
        Path | None,
        typer.Option("--overlay", metavar="FILE", help="Draw the query's map on the images."),
    ] = None,
    fuse: Annotated[
        str | None,
        typer.Option(
            "--fuse", metavar="mean|max|min", help="How --overlay fuses heads (default: mean)."
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            metavar="shared|panel",
            help="One color scale for all panels of --overlay, or one per panel (default: shared).",
        ),
    ] = None,
    rollout: Annotated[
        bool,
        typer.Option(
            "--rollout",
            help="Add attention rollout up to the block to --overlay. With --fuse max or min the "
            "fused rows are normalized before the identity is added; Abnar and Zuidema add it "
            "first.",
        ),
    ] = False,
    background: BackgroundOption = "white",
    output: Output,
    plot: Plot,
) -> None:
    """How sharp or smooth is attention, by layer and head, and where does it look?

    Entropy is divided by the log of the tokens that a query can see, so 1 is uniform attention,
    also under a window or causal mask. The attention distance is averaged over the part of the
    attention that falls on patches, divided by its sum: attention to CLS and registers does not
    count as near. Encoders are compared image by image; one is called smoother only where the 95%
    interval of the paired differences excludes 0.

    \b
    Examples:
      vitcli attn-entropy photo.jpg --weights runs/a --overlay maps.png
      vitcli attn-entropy *.jpg --registers 0,4 --plot entropy.png
      vitcli attn-entropy *.jpg --weights A --weights B --layers -1 --json
    """
    from vitcli.ui.console import note, progress, status, warn
    from vitcli.ui.figures import check_figure_file
    from vitcli.ui.options import parse_color

    check_figure_file(plot)
    check_figure_file(overlay)
    if overlay is None and (rollout or fuse or scale):
        named = "--rollout" if rollout else "--fuse" if fuse else "--scale"
        raise VitcliError(
            f"{named} says what --overlay draws",
            "add --overlay maps.png",
        )
    if fuse not in (None, "mean", "max", "min"):
        raise VitcliError(f"--fuse {fuse}: unknown", "mean, max or min")
    if scale not in (None, "shared", "panel"):
        raise VitcliError(f"--scale {scale}: unknown", "--scale shared or --scale panel")
    requests = models.to_requests()
    for request in requests:
        if request.weights is None:
            request.fresh_config()  # a bad config is told before torch is loaded
    color = parse_color(background)

    with status("loading torch"):
        from vitcli.commands.attention import analysis
        from vitcli.commands.attention.weights import OverlayCollector
        from vitcli.model import load_model

    maps = OverlayCollector(query, layers, fuse or "mean", rollout)
    cut = analysis.OutlierCut.parse(outlier_cut)

    def load() -> Iterator[Model]:
        for request in requests:
            loaded = load_model(request)
            if loaded.report:
                note(loaded.report.line())
            yield loaded

    with progress("attending") as advance:
        result = analysis.attn_entropy(
            load(),
            images or [],
            query=query,
            layers=layers,
            outlier_cut=cut,
            background=color,
            watch=maps if overlay else analysis.unwatched,
            advance=advance,
        )
    if any(model.fresh for model in result.models):
        note("fresh weights: the comparison is of architectures, not of learned attention")
    for failure in result.failed:
        warn(failure.error)
    if plot and result.models:
        from vitcli.commands.attention.view import figure

        draw(figure(result), plot)
    if overlay and result.models:
        from vitcli.commands.attention.view import overlay_figure
        from vitcli.ui.console import plural

        what = f"{plural(len(maps.sheets), 'sheet')} of maps"
        drawing = overlay_figure(maps.sheets, maps.pictures, scale or "shared")
        draw(drawing, plot.at(overlay), what)
        if maps.left_out:
            note(f"{maps.left_out} more sheets did not fit")
    if output.form != "table" or result.models:
        from vitcli.commands.attention.view import tables

        show(result, output.form, lambda result: tables(result, every))
    if result.failed:
        raise typer.Exit(1)
