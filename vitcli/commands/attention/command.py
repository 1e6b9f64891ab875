"""vitcli attn-entropy"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vitcli.commands.attention.result import OutlierCut
from vitcli.errors import VitcliError, check_choice
from vitcli.ui.console import note, plural, progress, status
from vitcli.ui.figures import Plot, check_figure_file, draw, finish
from vitcli.ui.options import (
    BackgroundOption,
    EncodersOptions,
    EveryOption,
    ImagesArgument,
    LibraryOption,
    Output,
    Without,
    grouped,
    option,
    parse_color,
)

if TYPE_CHECKING:
    from vitcli.model import Model


@grouped
def attn_entropy(
    images: ImagesArgument = None,
    *,
    models: Annotated[EncodersOptions, Without(("adapter",))],
    seeds: Annotated[
        int,
        option(
            "--seeds",
            "N",
            "Repeat with the random weights of N seeds, from --seed on, and compare the "
            "encoders seed by seed. --overlay draws the first.",
            min=1,
        ),
    ] = 1,
    query: Annotated[
        str,
        option(
            "--query",
            "all|cls|patch|ROW,COL",
            "Queries whose attention to report and --overlay to draw. For --overlay, all means "
            "CLS, or without CLS the mean over patches. Rows and columns count from 0.",
        ),
    ] = "all",
    layers: Annotated[
        str | None,
        option(
            "--layers",
            "LIST",
            "Blocks to report, e.g. 3,7,11, counted from 1; -1 is the last (default: all).",
        ),
    ] = None,
    every: EveryOption = 1,
    outlier_cut: Annotated[
        str,
        option(
            "--outlier-cut",
            "Kx|NORM",
            "Norm above which a patch token is an outlier; 3x is 3 times the layer's median norm.",
        ),
    ] = "3x",
    overlay: Annotated[
        Path | None, option("--overlay", "FILE", "Draw the attention of --query on the images.")
    ] = None,
    fuse: Annotated[
        str | None, option("--fuse", "mean|max|min", "How --overlay fuses heads (default: mean).")
    ] = None,
    scale: Annotated[
        str | None,
        option(
            "--scale",
            "shared|panel",
            "Color scale of --overlay: one for all panels, or one per panel (default: shared).",
        ),
    ] = None,
    rollout: Annotated[
        bool,
        option(
            "--rollout",
            help="Add attention rollout up to each block to --overlay (Abnar and Zuidema 2020). "
            "With --fuse max or min, fused rows are normalized before the identity is added.",
        ),
    ] = False,
    background: BackgroundOption = "white",
    engine: LibraryOption = None,
    output: Output,
    plot: Plot,
) -> None:
    """Measure the entropy and distance of attention, per layer and head.

    Entropy is divided by the log of the number of tokens that a query can attend to, so 1 is
    uniform attention, also under a mask. Attention distance is a mean over attention to patches;
    attention to CLS and registers is left out. Several encoders are compared on the same images:
    one is called smoother only if the 95% interval of the paired differences excludes 0. The
    pairs are images, or with random weights the seeds of --seeds.

    \b
    Examples:
      vitcli attn-entropy photo.jpg --weights runs/a --overlay maps.png
      vitcli attn-entropy *.jpg --registers 0,4 --plot entropy.png
      vitcli attn-entropy *.jpg --registers 0,4 --seeds 10
      vitcli attn-entropy *.jpg --weights A --weights B --layers -1 --json
      vitcli attn-entropy photo.jpg --weights A --engine reference
    """
    check_figure_file(plot)
    check_figure_file(overlay)
    if overlay is None and (rollout or fuse or scale):
        named = "--rollout" if rollout else "--fuse" if fuse else "--scale"
        raise VitcliError(f"{named}: --overlay is missing", "add --overlay maps.png")
    check_choice("--fuse", fuse, ("mean", "max", "min"))
    check_choice("--scale", scale, ("shared", "panel"))
    requests = models.to_requests(engine)
    for request in requests:
        request.repeated(seeds - 1)
        if request.weights is None and not request.by_library:
            request.fresh_config()  # a bad config is an error before torch is loaded
    color, cut = parse_color(background), OutlierCut.parse(outlier_cut)

    with status("loading torch"):
        from vitcli.checkpoints.weights import report_line
        from vitcli.commands.attention import analysis
        from vitcli.loading import load_model

    maps = analysis.OverlayCollector(query, layers, fuse or "mean", rollout)

    def load() -> Iterator[Model]:
        for request in requests:
            loaded = load_model(request, by_library=True)
            if loaded.report:
                note(report_line(loaded.report))
            yield loaded

    with progress("measuring attention") as bar:
        result = analysis.attn_entropy(
            load(),
            images or [],
            query=query,
            layers=layers,
            outlier_cut=cut,
            background=color,
            seeds=seeds,
            watch=maps if overlay else None,
            progress=bar,
        )
    if overlay and result.models:
        from vitcli.commands.attention.view import overlay_figure

        what = f"{plural(len(maps.sheets), 'sheet')} of maps"
        drawing = partial(overlay_figure, maps.sheets, maps.pictures, scale or "shared")
        draw(drawing, plot.at(overlay), what)
        if maps.left_out:
            note(f"{maps.left_out} more sheets of maps are left out (too many for one figure)")
    empty = not result.models
    finish(result, output.form, plot, failed=result.failed, empty=empty, every=every)
