"""Figures: one style, written whole or not at all, and maps of patches laid on their pictures.

A figure function is decorated with `styled`, makes its figure by `new_figure` and draws each series
with `**series(i)`. Text is never read as mathematics, so that a `$` in a name is a `$`.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from vitcli.errors import VitcliError
from vitcli.files import atomic_write, check_output
from vitcli.results import FailedImage, Result
from vitcli.ui.console import note, show, warn
from vitcli.ui.options import option

if TYPE_CHECKING:  # a help or a usage error imports neither
    import numpy as np
    from numpy.typing import NDArray

    from vitcli.images.preprocess import Box

NARROW = 5.0
"""Inches below which panels are below each other."""
COLUMN, PAGE = 3.3, 6.75
"""Inches across: one column, and both columns of a two-column page."""
POINTS = 8
DPI = 200

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito (2008), Color Universal Design, without yellow, which is faint on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
HATCHES = ("", "////", "....", "xxxx")
CHANCE = {"color": "0.4", "linestyle": (0, (2, 2)), "linewidth": 0.8, "zorder": 1}

ABOVE: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "frameon": False}
"""A legend of axes above them; one "outside" a figure would lie on its title or its caption."""

RC: Any = {
    "font.size": POINTS,
    "axes.titlesize": POINTS,
    "axes.labelsize": POINTS,
    "figure.titlesize": POINTS,
    "xtick.labelsize": POINTS - 1,
    "ytick.labelsize": POINTS - 1,
    "legend.fontsize": POINTS - 1,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "savefig.dpi": DPI,
    "pdf.fonttype": 42,  # TrueType, embedded: journals refuse Type 3
    "ps.fonttype": 42,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,
}

Arguments = ParamSpec("Arguments")


def styled(draw: Callable[Arguments, Any]) -> Callable[Arguments, Any]:
    """The figure function, drawn in this style."""

    @functools.wraps(draw)
    def figure(*arguments: Arguments.args, **options: Arguments.kwargs) -> Any:
        import matplotlib

        with matplotlib.rc_context(RC):
            drawing = draw(*arguments, **options)
            plain_text(drawing)
            fit_titles(drawing)
        return drawing

    return figure


_widths: list[float] = []
"""Inches that `--width` asks for, while a figure is drawn."""


def across(width: float = PAGE) -> float:
    """Inches across of the figure being drawn: what `--width` asks for, by default `width`."""
    return _widths[-1] if _widths else width


def abreast(count: int) -> int:
    """How many of `count` panels stand side by side: one where a figure is narrow."""
    return count if across() >= NARROW else 1


def new_figure(height: float, width: float = PAGE, panels: int = 1) -> Any:
    """A `matplotlib.figure.Figure` of these inches, its layout constrained so nothing is cut.

    A wider one than `width` is higher in proportion, and so is a narrow one whose `panels`, side
    by side in a wide one, are below each other.
    """
    from matplotlib.figure import Figure

    height *= max(1.0, across(width) / width) * (panels / abreast(panels)) ** 0.9
    return Figure(figsize=(across(width), height), layout="constrained")


def side_by_side(part: Any, count: int, **how: Any) -> list[Any]:
    """`count` axes of a figure or a part of it, below each other where it is narrow."""
    if abreast(count) == 1:
        how.pop("gridspec_kw", None)
    columns = abreast(count)
    return list(part.subplots(count // columns, columns, squeeze=False, **how).flat)


def series(index: int, marker: bool = True) -> dict[str, Any]:
    """Color, marker and dash of series `index` (from 0), for `Axes.plot` and `Axes.errorbar`.

    Each of the three is enough for seven series: in print without color, or for color-blind
    readers. More differ from others of their color in marker and dash.
    """
    count = len(COLORS)
    other = (index + index // count) % count
    how = {"color": COLORS[index % count], "linestyle": DASHES[other]}
    return how | ({"marker": MARKERS[other]} if marker else {})


def fill(index: int) -> dict[str, Any]:
    """Color and hatch of area `index` (from 0), for bars: different for 28 areas."""
    hatch = HATCHES[index // len(COLORS) % len(HATCHES)]
    return {"color": COLORS[index % len(COLORS)], "hatch": hatch, "edgecolor": "white"}


def label_bar(axes: Any, x: float, y: float, share: float) -> None:
    """A part's share, readable on any color, at the middle of its bar."""
    box = {"fc": "white", "ec": "none", "pad": 0.8, "alpha": 0.85}
    axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=POINTS - 2, bbox=box)


def chance_line(axes: Any, chance: float) -> None:
    """A line at the accuracy that guessing has, named in the legend."""
    axes.axhline(chance, label=f"chance ({chance:.3g})", **CHANCE)


def caption(drawing: Any, text: str) -> None:
    """What bars and bands are, below the figure: `mean ± sd, 3 seeds; dots: seeds`."""
    letters = int(drawing.get_figure(root=True).get_figwidth() * 72 / (0.56 * (POINTS - 1)))
    drawing.supxlabel(textwrap.fill(text, letters), fontsize=POINTS - 1, color="0.3")


def spread_caption(count: int, noun: str = "seed", interval: str = "sd", dots: bool = True) -> str:
    """`mean ± sd, 3 seeds; dots: seeds`."""
    plural = noun if count == 1 else f"{noun}s"
    return f"mean ± {interval}, {count} {plural}" + (f"; dots: {noun}s" if dots else "")


def fit_titles(drawing: Any) -> None:
    """No title of a figure or of a part of it is wider than the figure: a long line becomes two."""
    most = int(drawing.get_figure(root=True).get_figwidth() * 72 / (0.6 * POINTS))
    for part in (drawing, *drawing.subfigs):
        lines = part.get_suptitle().split("\n")
        if any(len(line) > most for line in lines):
            part.suptitle(
                "\n".join(textwrap.fill(ended(line, 2 * most - 8), most) for line in lines)
            )


def plain_text(drawing: Any) -> None:
    """No text of the figure is mathematics, the numbers of a logarithmic axis included."""
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

    for axes in drawing.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), LogFormatter):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            if isinstance(axis.get_minor_formatter(), LogFormatter):
                low, high = axis.get_view_interval()
                few = high < 30 * low  # one power of ten at most would be named
                axis.set_minor_formatter(FuncFormatter(_two_or_five) if few else NullFormatter())
    for text in drawing.findobj(Text):
        text.set_parse_math(False)


def _two_or_five(value: float, _: Any = None) -> str:
    """2, 5, 20, 50 and so on; nothing for other numbers."""
    return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""


def ended(name: str, most: int = 44) -> str:
    """A name as long as a figure has room for: the middle is left out, as ends differ more."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def merge_small(
    parts: Sequence[tuple[str, float]], least: float = 0.01, rest: str = "other"
) -> list[tuple[str, float]]:
    """Parts below `least` of the total, together at the end as `rest`; the total stays."""
    total = sum(value for _, value in parts)
    large = [(name, value) for name, value in parts if value >= least * total and value]
    small = total - sum(value for _, value in large)
    return [*large, (rest, small)] if small > 1e-9 * total else large


SUFFIXES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")
WIDTHS = {"column": COLUMN, "page": PAGE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Where a figure goes and how large it is; false where none is asked for.

    Raises:
        VitcliError: a width that is none.
    """

    plot: Annotated[
        Path | None,
        option("--plot", "FILE", "Draw a figure (.png, .svg, .pdf)."),
    ] = None
    dpi: Annotated[int, option("--dpi", "N", "Pixels per inch of a .png.", min=20, max=2400)] = DPI
    width: Annotated[
        str | None,
        option(
            "--width",
            "column|page|INCHES",
            f"Width of a figure: {COLUMN}, {PAGE} or so many inches.",
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
            raise VitcliError(
                f"--width {self.width}: is not a width (expected column, page, or 1 to 50 inches)",
                "--width column",
            )
        return inches

    def at(self, file: Path | None) -> Plot:
        """The same for another file."""
        return dataclasses.replace(self, plot=file)


def check_figure_file(plot: Plot | Path | None, *pages: str) -> None:
    """Refuse a file that cannot be drawn, before anything is computed.

    Args:
        pages: PAGES where a page is possible too.

    Raises:
        VitcliError: another suffix than these and SUFFIXES, or no such folder.
    """
    path = plot.plot if isinstance(plot, Plot) else plot
    if path is None:
        return
    if path.suffix.lower() not in (*SUFFIXES, *pages):
        raise VitcliError(
            f"{path}: cannot draw this format (expected {', '.join((*SUFFIXES, *pages[:1]))})",
            "name a file that ends in .png",
        )
    check_output(path)


def count_along_x(axes: Any) -> None:
    """Ticks at whole numbers; a single point is in the middle of three."""
    low, high = axes.get_xlim()
    if high - low < 2:
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.get_major_locator().set_params(integer=True)


def wrap_titles(drawing: Any) -> None:
    """No title of a panel is wider than the panel's share of the figure."""
    drawing.draw_without_rendering()
    for axes in drawing.axes:
        place = axes.get_subplotspec()
        title, text = axes.title, axes.get_title()
        if place is None or not text:
            continue
        cell = place.get_position(axes.figure).width * axes.figure.bbox.width
        rows = text.split("\n")
        letters = max(map(len, rows)) * 0.98 * cell / title.get_window_extent().width
        if letters < max(map(len, rows)):
            title.set_text("\n".join(textwrap.fill(row, max(8, int(letters))) for row in rows))


def save_figure(drawing: Any, path: Path, dpi: int = DPI) -> None:
    """Write a `matplotlib.figure.Figure` to `path`."""
    import matplotlib

    with atomic_write(path) as file, warnings.catch_warnings(), matplotlib.rc_context(RC):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box takes its place
        plain_text(drawing)
        wrap_titles(drawing)
        drawing.savefig(file, format=path.suffix.lower()[1:], dpi=dpi)


def draw(make: Callable[[], Any], plot: Plot | Path, what: str = "") -> None:
    """Make a figure of the width asked for, write it, and report it."""
    asked = plot if isinstance(plot, Plot) else Plot(plot=plot)
    assert asked.plot is not None
    _widths.extend(() if asked.inches is None else (asked.inches,))
    try:
        save_figure(make(), asked.plot, asked.dpi)
    finally:
        _widths.clear()
    note(f"drew {what} in {asked.plot}" if what else f"drew {asked.plot}")


def finish(
    result: Result,
    form: str,
    plot: Plot | None = None,
    *,
    failed: Sequence[FailedImage] = (),
    wrong: bool = False,
    empty: bool = False,
    **how: Any,
) -> None:
    """The end of a command: what failed, the figure, the tables, and the exit code.

    Args:
        form: one of `ui.console.FORMATS`.
        failed: images that could not be read; with any, or where something else is `wrong`, the
            exit code is 1.
        empty: there is nothing to draw, and no table.
        how: what the tables can choose.
    """
    for failure in failed:
        warn(failure.error)
    if plot and not empty:
        draw(result.figure, plot)
    if form != "table" or not empty:
        show(result, form, **how)
    if failed or wrong:
        raise typer.Exit(1)


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


def faded(photo: NDArray[np.uint8]) -> NDArray[np.float64]:
    """A photo (height, width, 3) in light gray, in [0, 1]: what a map does not cover."""
    gray: NDArray[np.float64] = photo.mean(-1, keepdims=True).repeat(3, -1) / 255 * 0.3 + 0.7
    return gray


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
    """A frame, such as around what the patch grid covers; its dark edge shows on any map."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    left, top, right, bottom = box
    frame = Rectangle(
        (left - 0.5, top - 0.5), right - left, bottom - top, fill=False, ec=color, lw=0.8
    )
    frame.set_path_effects([withStroke(linewidth=1.8, foreground="black")])
    axes.add_patch(frame)
