"""Writing a matplotlib figure, whole or not at all."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from vitcli.errors import VitcliError
from vitcli.files import atomic_write
from vitcli.ui.console import note
from vitcli.ui.style import COLUMN, DPI, PAGE, RC, plain_text

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
    if not path.parent.is_dir():
        raise VitcliError(f"{path}: there is no folder {path.parent}", "make it first")


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
