"""Figures: written whole or not at all, and maps of patches laid on the pictures they belong to."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitcli.errors import VitcliError
from vitcli.files import atomic_write, check_parent
from vitcli.ui.console import note
from vitcli.ui.style import COLUMN, DPI, PAGE, RC, plain_text

if TYPE_CHECKING:  # a help or a usage error imports neither
    import numpy as np
    from numpy.typing import NDArray

    from vitcli.images.preprocess import Box

SUFFIXES = (".png", ".svg", ".pdf")
WIDTHS = {"column": COLUMN, "page": PAGE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Where a figure goes and how large it is; false where none is asked for.

    Raises:
        VitcliError: a width that is none.
    """

    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw a figure (.png, .svg, .pdf)."),
    ] = None
    dpi: Annotated[
        int, typer.Option("--dpi", min=20, max=2400, metavar="N", help="Pixels per inch of a .png.")
    ] = DPI
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            metavar="column|page|INCHES",
            help=f"Width of a figure: {COLUMN}, {PAGE} or so many inches.",
        ),
    ] = None

    def __post_init__(self) -> None:
        _ = self.inches

    def __bool__(self) -> bool:
        return self.plot is not None

    @property
    def inches(self) -> float | None:
        """The width asked for."""
        if self.width is None:
            return None
        try:
            inches = WIDTHS.get(self.width) or float(self.width)
        except ValueError:
            inches = 0.0
        if not 1 <= inches <= 50:
            raise VitcliError(f"--width {self.width}: not a width", "column, page, or 1 to 50")
        return inches

    def at(self, file: Path | None) -> Plot:
        """The same for another file."""
        return dataclasses.replace(self, plot=file)


def check_figure_file(plot: Plot | Path | None) -> None:
    """Refuse a file that cannot be drawn, before anything is computed.

    Raises:
        VitcliError: another suffix than SUFFIXES, or no such folder.
    """
    path = plot.plot if isinstance(plot, Plot) else plot
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise VitcliError(f"{path}: cannot draw this format", "one of " + ", ".join(SUFFIXES))
    check_parent(path)


def count_along_x(axes: Any) -> None:
    """Ticks at whole numbers; a single point is in the middle of three."""
    low, high = axes.get_xlim()
    if high - low < 2:
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.get_major_locator().set_params(integer=True)


def save_figure(drawing: Any, path: Path, dpi: int = DPI, width: float | None = None) -> None:
    """Write a `matplotlib.figure.Figure` to `path`, `width` inches wide in its own proportions."""
    import matplotlib

    if width is not None:
        across, down = drawing.get_size_inches()
        drawing.set_size_inches(width, down * width / across)
    with atomic_write(path) as file, warnings.catch_warnings(), matplotlib.rc_context(RC):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box takes its place
        plain_text(drawing)
        drawing.savefig(file, format=path.suffix.lower()[1:], dpi=dpi)


def draw(drawing: Any, plot: Plot | Path, what: str = "") -> None:
    """Write a figure, and report it."""
    asked = plot if isinstance(plot, Plot) else Plot(plot=plot)
    assert asked.plot is not None
    save_figure(drawing, asked.plot, asked.dpi, asked.inches)
    note(f"drew {what} in {asked.plot}" if what else f"drew {asked.plot}")


LONGEST_SIDE = 448
"""Pixels of a picture's longer side in a figure; more only makes the file larger."""


def shrunk(picture: Any) -> NDArray[np.uint8]:
    """A Pillow picture as (height, width, 3), its longer side at most LONGEST_SIDE."""
    import numpy as np

    factor = min(1.0, LONGEST_SIDE / max(picture.size))
    size = tuple(max(1, round(side * factor)) for side in picture.size)
    small: NDArray[np.uint8] = np.asarray(picture.convert("RGB").resize(size, reducing_gap=2.0))
    return small


def scaled(box: Box, picture: Any, shown: NDArray[np.uint8]) -> Box:
    """A box in a Pillow picture's pixels as one in those of its `shrunk` form."""
    across, down = shown.shape[1] / picture.width, shown.shape[0] / picture.height
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def lay(values: Any, box: Box, height: int, width: int) -> NDArray[np.float64]:
    """Patch values (rows, columns, ...) as an image (height, width, ...); NaN outside the box.

    A pixel has the value of the patch under its center: values are not interpolated between
    patches.
    """
    import numpy as np

    grid = np.asarray(values, dtype=np.float64)
    left, top, right, bottom = box
    row = np.floor((np.arange(height) + 0.5 - top) / (bottom - top) * grid.shape[0]).astype(int)
    column = np.floor((np.arange(width) + 0.5 - left) / (right - left) * grid.shape[1]).astype(int)
    inside_y, inside_x = (
        (row >= 0) & (row < grid.shape[0]),
        (column >= 0) & (column < grid.shape[1]),
    )
    laid: NDArray[np.float64] = grid[row.clip(0, grid.shape[0] - 1)][
        :, column.clip(0, grid.shape[1] - 1)
    ]
    laid[~inside_y] = np.nan
    laid[:, ~inside_x] = np.nan
    return laid


def covered(box: Box, height: int, width: int) -> str:
    """The pixels under the map, in words."""
    left, top, right, bottom = (round(side) for side in box)
    whole = left <= 0 and top <= 0 and right >= width and bottom >= height
    if whole:
        return f"whole image, {width}x{height} px"
    across = f"x {max(left, 0)}-{min(right, width)}"
    down = f"y {max(top, 0)}-{min(bottom, height)}"
    return f"{across}, {down} of {width}x{height} px"


def bare(axes: Any, title: str = "") -> None:
    """No ticks; the frame stays off."""
    axes.set_axis_off()
    if title:
        axes.set_title(title, fontsize=7, pad=2)


def outline(axes: Any, box: Box, color: str = "yellow") -> None:
    """A frame, such as around what the patch grid covers."""
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    axes.add_patch(
        Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, ec=color, lw=0.8)
    )
