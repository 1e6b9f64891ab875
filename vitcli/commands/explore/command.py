"""vitcli explore, vitcli grid: their options, tables and the figure of features as colors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.table import Table

from vitcli.config.settings import parse_layers
from vitcli.errors import VitcliError
from vitcli.files import check_output, data_size
from vitcli.ui.console import fitted, percent, plural, progress, table
from vitcli.ui.figures import (
    PAGE,
    Plot,
    across,
    bare,
    check_figure_file,
    faded,
    finish,
    lay,
    new_figure,
    outline,
    scaled,
    shrunk,
    styled,
)
from vitcli.ui.options import (
    BackgroundOption,
    EncodersOptions,
    ImagesArgument,
    Output,
    Without,
    grouped,
    load_all,
    option,
    parse_color,
)

if TYPE_CHECKING:
    from vitcli.commands.explore.analysis import ExploreResult
    from vitcli.commands.explore.grid import GridResult

LayersOption = Annotated[
    str | None,
    option(
        "--layers",
        "N,M,...",
        "Layers, with commas: 0 is the input of the first block, i the output of block i, -1 the "
        "last (default: four, evenly spaced).",
    ),
]


@grouped
def explore(
    images: ImagesArgument = None,
    *,
    encoders: Annotated[EncodersOptions, Without(("adapter",))],
    out: Annotated[Path, option("--out", "FILE.html", "The page to write.")] = Path("explore.html"),
    layers: LayersOption = None,
    max_size: Annotated[
        float, option("--max-size", "MIB", "Largest size of the page.", min=0.1)
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
    chosen = parse_layers(layers) if layers else None
    color = parse_color(background)
    check_output(out, ".html", ".htm", option="--out")
    loaded = load_all(requests)
    with progress("encoding") as bar:
        from vitcli.commands.explore import analysis

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
    images: ImagesArgument = None,
    *,
    encoders: Annotated[EncodersOptions, Without(("adapter",))],
    layers: LayersOption = None,
    foreground: Annotated[
        bool,
        option(
            "--foreground/--all-patches",
            help="Color only the foreground: the side of the first principal component that "
            "touches the image border less.",
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
    chosen = parse_layers(layers) if layers else None
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


def tables(result: ExploreResult) -> Iterator[str | Table]:
    """The file, then one row per encoder."""
    yield f"{escape(result.path)}  {data_size(result.bytes)}, {plural(len(result.images), 'image')}"
    grid = _unbroken("encoder", ">layers", ">directions", ">cosine error", "left out")
    for encoder in result.encoders:
        grid.add_row(
            escape(encoder.model.name),
            ",".join(map(str, encoder.layers)),
            f"{encoder.directions} of {encoder.model.hidden}",
            f"{encoder.cosine_error:.3f}",
            "; ".join(encoder.left_out) or "nothing",
        )
    yield grid


def _unbroken(*columns: str) -> Table:
    """A table whose numbers stay on one line, and whose names go on in the next."""
    grid = table(None, *columns)
    for column in grid.columns:
        column.no_wrap = column.justify == "right"
        column.overflow = "fold"
    return grid


def grid_tables(result: GridResult) -> Iterator[Table]:
    """One row per encoder: the variance that its colors explain."""
    headers = (">layers", ">variance in colors", ">foreground", ">variance along it")
    grid = _unbroken("encoder", *headers)
    for row in result.encoders:
        shares = " + ".join(percent(share) or "0%" for share in row.explained)
        foreground, along = row.foreground, row.foreground_explained
        grid.add_row(
            escape(row.model.name),
            ",".join(map(str, row.layers)),
            shares,
            "all patches" if foreground is None else percent(foreground),
            "" if along is None else percent(along),
        )
    yield fitted(grid, "variance along it", "foreground", "layers")


@styled
def grid_figure(result: GridResult) -> Any:
    """Encoders and images down, layers across; the photo, light gray, under the background."""
    import numpy as np

    columns = max(len(row.layers) for row in result.encoders) + 1
    side = across() / columns
    rows = [
        (row, image, *_photo(path, row.boxes[image]))
        for row in result.encoders
        for image, path in enumerate(result.images)
    ]
    heights = [side * min(p.shape[0] / p.shape[1], 2.0) + 0.4 for _, _, p, _ in rows]
    drawing = new_figure(sum(heights) * PAGE / max(across(), PAGE))
    parts = drawing.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (row, image, photo, box) in zip(parts, rows, strict=True):
        part.suptitle(f"{row.model.name}, {PurePath(result.images[image]).name}")
        line = part.subplots(1, columns)
        line[0].imshow(photo)
        bare(line[0], "image")
        outline(line[0], box)
        panels = [panel for panel in row.panels if panel.image == image]
        for place, panel in zip(line[1:], panels, strict=False):
            colors = np.array(
                [[cell or (np.nan,) * 3 for cell in cells] for cells in panel.colors], float
            )
            laid = lay(colors, box, *photo.shape[:2])
            place.imshow(np.where(np.isnan(laid), faded(photo), laid))
            bare(place, f"layer {panel.layer}")
        for place in line[1 + len(panels) :]:
            bare(place)
    return drawing


def _photo(path: str, box: tuple[float, float, float, float]) -> tuple[Any, Any]:
    """The picture's pixels, small, and the box in them; white where it is not a file."""
    import numpy as np

    from vitcli.model import read_picture

    if not Path(path).is_file():
        left, top, right, bottom = box
        height, width = round(bottom - top), round(right - left)
        return np.full((height, width, 3), 255, np.uint8), (0.0, 0.0, float(width), float(height))
    picture = read_picture(path).image
    photo = shrunk(picture)
    return photo, scaled(box, picture, photo)
