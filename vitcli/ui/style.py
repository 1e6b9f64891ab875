"""One style for every figure: fit for a printed column and for readers who confuse colors.

A figure function is decorated with `styled`, makes its figure by `new_figure` and draws each series
with `**series(i)`. Text is never read as mathematics, so that a `$` in a name is a `$`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

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


def new_figure(height: float, width: float = PAGE) -> Any:
    """A `matplotlib.figure.Figure` of these inches, its layout constrained so nothing is cut."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def series(index: int, marker: bool = True) -> dict[str, Any]:
    """Color, marker and dash of series `index` (from 0), for `Axes.plot` and `Axes.errorbar`.

    Each of the three tells series apart alone: in print without color, or for color-blind readers.
    """
    how = {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)]}
    return how | ({"marker": MARKERS[index % len(MARKERS)]} if marker else {})


def fill(index: int) -> dict[str, Any]:
    """Color and hatch of area `index` (from 0), for bars: different for 28 areas."""
    hatch = HATCHES[index // len(COLORS) % len(HATCHES)]
    return {"color": COLORS[index % len(COLORS)], "hatch": hatch, "edgecolor": "white"}


def chance_line(axes: Any, chance: float) -> None:
    """A line at the accuracy that guessing has, named in the legend."""
    axes.axhline(chance, label=f"chance ({chance:.3g})", **CHANCE)


def caption(drawing: Any, text: str) -> None:
    """What bars and bands are, below the figure: `mean ± sd, 3 seeds; dots: seeds`."""
    drawing.supxlabel(text, fontsize=POINTS - 1, color="0.3")


def spread_caption(count: int, noun: str = "seed", interval: str = "sd", dots: bool = True) -> str:
    """`mean ± sd, 3 seeds; dots: seeds`."""
    plural = noun if count == 1 else f"{noun}s"
    return f"mean ± {interval}, {count} {plural}" + (f"; dots: {noun}s" if dots else "")


def fit_titles(drawing: Any) -> None:
    """No title of a figure or of a part of it is wider than the figure."""
    most = int(drawing.get_figure(root=True).get_figwidth() * 72 / (0.6 * POINTS))
    for part in (drawing, *drawing.subfigs):
        if title := part.get_suptitle():
            part.suptitle("\n".join(ended(line, most) for line in title.split("\n")))


def plain_text(drawing: Any) -> None:
    """No text of the figure is mathematics, the numbers of a logarithmic axis included."""
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

    for axes in drawing.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), LogFormatter):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            if isinstance(axis.get_minor_formatter(), LogFormatter):
                axis.set_minor_formatter(NullFormatter())
    for text in drawing.findobj(Text):
        text.set_parse_math(False)


def ended(name: str, most: int = 44) -> str:
    """A name as long as a figure has room for: the middle gives way, the ends tell names apart."""
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
