"""vitcli neighbors: its options, its table and a sheet of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vitcli.files import printable
from vitcli.ui.console import fitted, status, table
from vitcli.ui.figures import (
    COLORS,
    DASHES,
    NARROW,
    PAGE,
    Plot,
    across,
    bare,
    caption,
    check_figure_file,
    ended,
    finish,
    new_figure,
    styled,
)
from vitcli.ui.options import Output, grouped, option

if TYPE_CHECKING:
    from vitcli.commands.neighbors.analysis import NeighborsResult


@grouped
def neighbors(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Vectors that `vitcli embed` wrote.")
    ],
    image: Annotated[
        str,
        typer.Argument(metavar="IMAGE", help="An image of DIR, by path, or another image file."),
    ],
    count: Annotated[
        int, typer.Option("--count", "-k", min=1, metavar="N", help="Number of neighbors.")
    ] = 10,
    device: Annotated[
        str,
        option("--device", "NAME", "Device on which to encode another image file."),
    ] = "auto",
    *,
    output: Output,
    plot: Plot,
) -> None:
    """Find the images nearest to one image by cosine similarity of their vectors.

    \b
    Examples:
      vitcli neighbors vectors/ cats/001.jpg
      vitcli neighbors vectors/ another.jpg --plot nearest.png
    """
    check_figure_file(plot)
    with status("comparing"):
        from vitcli.commands.neighbors import analysis

        result = analysis.neighbors(folder, image, count, device)
    finish(result, output.form, plot)


_COLUMNS = 6


def tables(result: NeighborsResult) -> Iterator[Any]:
    yield (
        f"nearest to [bold]{escape(printable(result.image))}[/] of {result.searched:,} vectors of "
        f"{escape(result.model)}, weights: {escape(result.weights)}"
    )
    rows = table(None, ">cosine", ">sd above mean", ">size")
    rows.add_column("path", overflow="fold")
    for found in result.neighbours:
        rows.add_row(
            f"{found.cosine:.4f}",
            _above(result, found.cosine),
            f"{found.width}x{found.height}",
            escape(printable(found.path)),
        )
    yield fitted(rows, "size", "sd above mean")
    yield (
        f"cosine to all vectors: mean {result.cosine_mean:.4f}, standard deviation "
        f"{result.cosine_std:.4f}"
    )
    if result.label is not None and result.class_share is not None:
        yield (
            f"{result.same_class} of {len(result.neighbours)} neighbors are of its class "
            f"({escape(result.label)}), which is {result.class_share:.1%} of all images"
        )


def _above(result: NeighborsResult, cosine: float) -> str:
    if result.cosine_std == 0:
        return ""
    return f"{(cosine - result.cosine_mean) / result.cosine_std:+.1f}"


@styled
def figure(result: NeighborsResult, pictures: Sequence[Any] | None = None) -> Any:
    """The image, then its neighbors with their cosines: equal thumbnails, framed by class.

    `pictures` are the Pillow images, the query first; they are read from the disk by default.
    """
    if pictures is None:
        from vitcli.commands.neighbors.analysis import pictures as read

        pictures = read(result)
    paths = [result.image, *(found.path for found in result.neighbours)]
    captions = ["query", *(f"{found.cosine:.3f}" for found in result.neighbours)]
    labels = [result.label, *(found.label for found in result.neighbours)]
    frames = {label: place for place, label in enumerate(dict.fromkeys(filter(None, labels)))}
    most = _COLUMNS if across() >= NARROW else _COLUMNS // 2
    columns = min(most, len(paths))
    lines = -(-len(paths) // columns)
    drawing = new_figure(1.55 * lines + 0.5, PAGE * columns / _COLUMNS)
    grid = drawing.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[len(paths) :]:
        bare(axes)
    for axes, path, above, label, picture in zip(
        grid, paths, captions, labels, pictures, strict=False
    ):
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"{above}\n{printable(ended(PurePath(path).name, 18))}", fontsize=6.5, pad=3)
        if picture is None:
            axes.text(0.5, 0.5, "file is\nmissing", ha="center", va="center")
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
        else:
            axes.imshow(thumbnail(picture))
        color = "0.7" if label is None else COLORS[frames[label] % len(COLORS)]
        dash = "-" if label is None else DASHES[frames[label] // len(COLORS) % len(DASHES)]
        for side in axes.spines.values():
            side.set(visible=True, color=color, linewidth=2.2, linestyle=dash)
    grid[0].title.set_weight("bold")
    if frames:
        names = ", ".join(frames) if len(frames) <= 4 else f"{len(frames)} classes"
        caption(drawing, f"frames: classes ({names})")
    drawing.suptitle(
        f"{result.model}, weights: {result.weights}; mean cosine {result.cosine_mean:.3f}"
    )
    return drawing


SIDE = 160
"""Pixels of a thumbnail."""


def thumbnail(picture: Any) -> Any:
    """A Pillow picture whole in a white square of SIDE pixels."""
    from PIL import Image, ImageOps

    whole = ImageOps.contain(picture.convert("RGB"), (SIDE, SIDE))
    square = Image.new("RGB", (SIDE, SIDE), "white")
    square.paste(whole, ((SIDE - whole.width) // 2, (SIDE - whole.height) // 2))
    return square
