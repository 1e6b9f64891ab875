"""`vitcli explore` as a table of what is on the page; `vitcli grid` as a table and a figure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vitcli.ui.console import percent, table
from vitcli.ui.figures import (
    PAGE,
    across,
    bare,
    ended,
    lay,
    new_figure,
    outline,
    scaled,
    shrunk,
    styled,
)

if TYPE_CHECKING:
    from vitcli.commands.explore.analysis import ExploreResult
    from vitcli.commands.explore.grid import GridResult


def tables(result: ExploreResult) -> Iterator[str | Table]:
    """The file, then one row per encoder."""
    yield f"{result.path}  {result.bytes / 2**20:.1f} MiB, {len(result.images)} images"
    grid = table()
    grid.add_column("encoder", overflow="fold")
    for heading in ("layers", "directions", "cosine error"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("left out")
    for encoder in result.encoders:
        grid.add_row(
            encoder.model.name,
            ",".join(map(str, encoder.layers)),
            f"{encoder.directions} of {encoder.model.hidden}",
            f"{encoder.cosine_error:.3f}",
            "; ".join(encoder.left_out) or "nothing",
        )
    yield grid


def grid_tables(result: GridResult) -> Iterator[Table]:
    """One row per encoder: the variance that its colors explain."""
    grid = table()
    grid.add_column("encoder", overflow="fold")
    grid.add_column("layers", justify="right", no_wrap=True)
    grid.add_column("variance in colors", justify="right", no_wrap=True)
    grid.add_column("foreground", justify="right", no_wrap=True)
    grid.add_column("variance along it", justify="right", no_wrap=True)
    for row in result.encoders:
        shares = " + ".join(percent(share) or "0%" for share in row.explained)
        foreground, along = row.foreground, row.foreground_explained
        grid.add_row(
            row.model.name,
            ",".join(map(str, row.layers)),
            shares,
            "all patches" if foreground is None else percent(foreground),
            "" if along is None else percent(along),
        )
    yield grid


@styled
def grid_figure(result: GridResult) -> Any:
    """Encoders and images down, layers across; the photo, light gray, under the background."""
    import numpy as np

    columns = max(len(row.layers) for row in result.encoders) + 1
    lines = len(result.encoders) * len(result.images)
    side = across() / columns
    letters = int(15 * side)  # of the small titles
    drawing = new_figure((side + 0.2) * lines * PAGE / max(across(), PAGE))
    axes = drawing.subplots(lines, columns, squeeze=False)
    for number, row in enumerate(result.encoders):
        for image, path in enumerate(result.images):
            line = axes[number * len(result.images) + image]
            photo, box = _photo(path, row.boxes[image])
            line[0].imshow(photo)
            bare(
                line[0], f"{ended(row.model.name, letters)}\n{ended(PurePath(path).name, letters)}"
            )
            outline(line[0], box, color="black")
            panels = [panel for panel in row.panels if panel.image == image]
            for place, panel in zip(line[1:], panels, strict=False):
                gray = photo.mean(-1, keepdims=True).repeat(3, -1) / 255 * 0.3 + 0.7
                colors = np.array(
                    [[cell or (np.nan,) * 3 for cell in cells] for cells in panel.colors], float
                )
                laid = lay(colors, box, *photo.shape[:2])
                place.imshow(np.where(np.isnan(laid), gray, laid))
                bare(place, f"layer {panel.layer}")
            for place in line[1 + len(panels) :]:
                bare(place)
    return drawing


def _photo(path: str, box: tuple[float, float, float, float]) -> tuple[Any, Any]:
    """The picture's pixels, small, and the box in them; white where it is not a file."""
    import numpy as np

    from vitcli.images.decode import decode, is_quick
    from vitcli.images.pool import decode_within

    if not Path(path).is_file():
        left, top, right, bottom = box
        height, width = round(bottom - top), round(right - left)
        return np.full((height, width, 3), 255, np.uint8), (0.0, 0.0, float(width), float(height))
    picture = (decode(path) if is_quick(path) else decode_within(path)).image
    photo = shrunk(picture)
    return photo, scaled(box, picture, photo)
