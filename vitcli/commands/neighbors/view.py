"""`vitcli neighbors` as a table and a sheet of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape

from vitcli.commands.neighbors.result import NeighborsResult
from vitcli.files import printable
from vitcli.ui.console import table
from vitcli.ui.patches import bare, shrunk

_COLUMNS = 6


def tables(result: NeighborsResult) -> Iterator[Any]:
    yield (
        f"nearest to [bold]{escape(printable(result.image))}[/] of {result.searched:,} vectors of "
        f"{escape(result.model)}, weights: {escape(result.weights)}"
    )
    rows = table()
    rows.add_column("cosine", justify="right")
    rows.add_column("std above mean", justify="right")
    rows.add_column("size", justify="right")
    rows.add_column("path", overflow="fold")
    for found in result.neighbours:
        rows.add_row(
            f"{found.cosine:.4f}",
            _above(result, found.cosine),
            f"{found.width}x{found.height}",
            escape(printable(found.path)),
        )
    yield rows
    yield f"cosine to all: mean {result.cosine_mean:.4f}, std {result.cosine_std:.4f}"


def _above(result: NeighborsResult, cosine: float) -> str:
    if result.cosine_std == 0:
        return ""
    return f"{(cosine - result.cosine_mean) / result.cosine_std:+.1f}"


def figure(result: NeighborsResult, pictures: Sequence[Any]) -> Any:
    """The image, framed, then its neighbors with their cosines."""
    from matplotlib.figure import Figure

    titles = [printable(result.image)]
    titles += [f"{found.cosine:.3f}  {printable(found.path)}" for found in result.neighbours]
    columns = min(_COLUMNS, len(titles))
    lines = -(-len(titles) // columns)
    drawing = Figure(figsize=(2 * columns, 2.2 * lines), layout="constrained")
    grid = drawing.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid:
        bare(axes)
    for axes, title, picture in zip(grid, titles, pictures, strict=False):
        short = title if len(title) <= 34 else f"{title[:14]}...{title[-17:]}"
        axes.set_title(short.replace("$", r"\$"), fontsize=6)
        if picture is None:
            axes.text(0.5, 0.5, "gone", ha="center", transform=axes.transAxes)
        else:
            axes.imshow(shrunk(picture))
    grid[0].title.set_weight("bold")
    weights = f"{result.model}, weights: {result.weights}".replace("$", r"\$")
    drawing.suptitle(f"{weights}; mean cosine {result.cosine_mean:.3f}", fontsize=8)
    return drawing
