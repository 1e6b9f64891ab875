"""A sweep as a figure whose kind follows the shape of the space."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from vitcli.commands.sweep.result import Spread, SweepGroup, SweepReport, last_word
from vitcli.commands.sweep.view import text
from vitcli.errors import VitcliError, check_choice
from vitcli.stats import is_number
from vitcli.ui.figures import (
    PAGE,
    POINTS,
    abreast,
    across,
    caption,
    chance_line,
    count_along_x,
    fill,
    new_figure,
    series,
    spread_caption,
    styled,
)

KINDS = ("auto", "bars", "lines", "heatmap", "curves", "search")
LOG_RATIO = 20
"""An axis of positive numbers that span more than this is drawn on a log scale."""
_TICKS = 8

SHARES = frozenset({"accuracy", "acc", "share", "fraction"})
"""Words in the name of a metric that lies between 0 and 1."""
MOST_PANELS = 8
MOST_LINES = 8
LABEL_CHARACTERS = 90
"""How many fit beside each other across a page."""
MOST_LABELS = 48
NOTHING_YET = "no trial has finished yet"


def _characters(panels: int = 1) -> int:
    """How many fit beside each other below one of `panels` in a row."""
    return int(LABEL_CHARACTERS * across() / PAGE / panels)


def kind_of(report: SweepReport) -> str:
    """The figure that suits the space.

    A search is its objective over its trials; an axis of numbers is lines, if they are few and each
    has three points or more; two axes of three or more values are a heat-map; the rest are bars.
    """
    if report.objective:
        return "search"
    sizes = {key: len(_levels(report, key)) for key in report.grouped_by}
    if not any(size > 1 for size in sizes.values()) and any(t.curve for t in report.trials):
        return "curves"
    if len(sizes) == 2 and all(size >= 3 for size in sizes.values()):
        return "heatmap"
    if (along := _along(report)) and sizes[along] >= 3:
        points = Counter(_label(report, group, along) for group in report.groups)
        if len(points) <= MOST_LINES and min(points.values()) >= 3:
            return "lines"
    return "bars"


def _along(report: SweepReport) -> str | None:
    """The longest axis of numbers."""
    levels = {key: _levels(report, key) for key in report.grouped_by}
    numeric = [key for key, values in levels.items() if all(map(is_number, values))]
    return max(numeric, key=lambda key: len(levels[key]), default=None)


@styled
def figure(report: SweepReport, metric: str | None = None, kind: str = "auto") -> Any:
    """Draw a report, a panel per metric; what the bars are is written below.

    Args:
        metric: draw this one alone.
        kind: one of KINDS; auto follows the shape of the space.

    Raises:
        VitcliError: an unknown kind or metric, or nothing to draw yet.
    """
    check_choice("--plot-kind", kind, KINDS)
    kind = kind_of(report) if kind == "auto" else kind
    names = [metric] if metric else [m for m in report.metrics if _any(report, m)]
    if kind == "curves":
        names = names[:1] or [""]
    elif not metric and kind == "search":
        objective = report.objective.partition(" ")[2]
        names.sort(key=lambda name: name != objective)
    if kind != "curves" and (not names or not _any(report, names[0])):
        said = f"no finished trial has a number for {metric}" if metric else NOTHING_YET
        known = ", ".join(report.metrics)
        raise VitcliError(f"--plot: {said}", f"name one of {known} with --metric", exit_code=1)
    names = names[:MOST_PANELS]
    columns = abreast(min(2, len(names)))
    rows = -(-len(names) // columns)
    drawing = new_figure(4.0 if rows == 1 and columns == 1 else 2.8 * rows + 0.8)
    panels = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        DRAW[kind](axes, report, name)
        if name in report.chance and kind in ("bars", "lines", "search"):
            chance_line(axes, report.chance[name])
    for axes in panels[len(names) :]:
        axes.remove()
    drawing.suptitle(textwrap.fill(report.question or report.name, _characters()))
    _legend(drawing, _caption(report, kind, names))
    return drawing


def _caption(report: SweepReport, kind: str, names: Sequence[str]) -> str:
    """What bars, lines and marks are, over how many trials."""
    if kind == "curves":
        return "one line per trial"
    if kind == "search":
        pruned = any(trial.last_value is not None for trial in report.trials)
        mark = "; crosses: pruned trials, at their last value" if pruned else ""
        return f"one point per trial{mark}"
    counts = {g.metrics[name].n for g in report.groups for name in names if name in g.metrics}
    pooled = set(report.axes) - set(report.grouped_by)  # a mean is of more than seeds
    noun = "seed" if report.seeds == "seed" and not pooled else "trial"
    if counts == {1}:
        return f"one {noun} per point"
    said = spread_caption(max(counts), noun, dots=kind == "bars")
    if len(counts) > 1:
        said = said.replace(f", {max(counts)} ", f", {min(counts)} to {max(counts)} ")
    empty = sum(names[0] not in group.metrics for group in report.groups)
    said += f"; {empty} of {len(report.groups)} points have no number" if empty else ""
    return said + ("; cut at 0 and 1" if any(_is_share(report, name) for name in names) else "")


def _is_share(report: SweepReport, name: str) -> bool:
    """Whether a metric cannot leave [0, 1]: by its name, and as all that was measured says."""
    if not SHARES & set(re.split(r"[\W_]+", name.lower())):
        return False
    spreads = [group.metrics[name] for group in report.groups if name in group.metrics]
    return all(spread.min >= 0 and spread.max <= 1 for spread in spreads)


def _bar_lengths(report: SweepReport, spreads: Sequence[Spread], name: str) -> Any:
    """Down and up from each mean, one sample standard deviation."""
    std = [spread.std or 0.0 for spread in spreads]
    if not _is_share(report, name):
        return [std, std]
    pairs = list(zip(std, spreads, strict=True))
    return [[min(s, spread.mean) for s, spread in pairs],
            [min(s, 1 - spread.mean) for s, spread in pairs]]  # fmt: skip


def _named(report: SweepReport, key: str) -> str:
    """What the file calls a key or a metric, with its unit; else its last word."""
    return report.labels.get(key, last_word(key))


def _bars(axes: Any, report: SweepReport, name: str) -> None:
    """One bar per group: the last key is the color, the other values are below; dots: trials."""
    keys = _varying(report)
    color = keys[-1] if len(keys) > 1 else None
    below = [key for key in keys if key != color]
    ticks: dict[tuple[str, ...], int] = {}
    hues = _levels(report, color) if color else [None]
    width = 0.8 / len(hues)
    for group in report.groups:
        words = tuple(text(group.params[key]) for key in below)
        place = ticks.setdefault(words, len(ticks))
        hue = hues.index(group.params[color]) if color else 0
        if name not in group.metrics:
            continue
        spread = group.metrics[name]
        x = place + (hue - (len(hues) - 1) / 2) * width
        lengths = _bar_lengths(report, [spread], name)
        axes.bar(x, spread.mean, width * 0.95, yerr=lengths, capsize=2, **fill(hue))
        if group.incomplete:
            _say_count(axes, x, spread.mean + lengths[1][0], group, name)
        values = [t.metrics.get(name) for t in report.trials if t.id in group.trials]
        dots = list(filter(is_number, values))
        axes.plot([x] * len(dots), dots, ".", color="black", markersize=4, alpha=0.6)
    _name_bars(axes, list(ticks))
    axes.set_xlim(-0.5, len(ticks) - 0.5)
    axes.set_xlabel(", ".join(_named(report, key) for key in below))
    axes.set_ylabel(_named(report, name))
    if color:
        for index, level in enumerate(hues):
            axes.bar(0, 0, label=f"{_named(report, color)} {text(level)}", **fill(index))


def _say_count(axes: Any, x: float, y: float, group: SweepGroup, name: str) -> None:
    """How many of its trials a mean is of, where some have no number."""
    said = f"{group.metrics[name].n} of {sum(group.states.values())}"
    axes.annotate(said, (x, y), (0, 2), textcoords="offset points", ha="center")


def _name_bars(axes: Any, names: Sequence[tuple[str, ...]]) -> None:
    """A word a line where they fit beside each other, else turned; of very many, every n-th."""
    needed = sum(max(map(len, words), default=0) + 2 for words in names)
    room = needed <= _characters(axes.get_subplotspec().get_gridspec().ncols)
    step = -(-len(names) // MOST_LABELS)
    labels = [("\n" if room else ", ").join(words) for words in names[::step]]
    turned = {} if room else {"rotation": 90 if len(labels) > 20 else 30, "ha": "right",
                              "rotation_mode": "anchor"}  # fmt: skip
    if len(labels) > 20:
        turned["va"] = "center"
    axes.set_xticks(range(0, len(names), step), labels, **turned)


def _legend(drawing: Any, said: str) -> None:
    """One for all panels, below them, where it covers nothing; and what the bars are."""
    found = {}
    for axes in drawing.axes:
        handles, labels = axes.get_legend_handles_labels()
        found.update(dict(zip(labels, handles, strict=True)))
    if not found:
        caption(drawing, said)
    else:
        each = max(1, _characters() // (max(map(len, found)) + 6))
        drawing.legend(
            found.values(),
            found.keys(),
            loc="outside lower center",
            ncols=each,
            frameon=False,
            title=textwrap.fill(said, _characters()),
            title_fontsize=POINTS - 1,
        )


def _lines(axes: Any, report: SweepReport, name: str) -> None:
    """Against the longest axis of numbers; a line for each combination of the others."""
    along = _along(report)
    if along is None:
        raise VitcliError("--plot-kind lines: there is no axis of numbers", "--plot-kind bars")
    lines: dict[str, list[SweepGroup]] = {}
    for group in report.groups:
        if name in group.metrics:
            lines.setdefault(_label(report, group, along), []).append(group)
    for index, (label, groups) in enumerate(lines.items()):
        groups.sort(key=lambda group: float(group.params[along]))
        spreads = [group.metrics[name] for group in groups]
        xs, means = [group.params[along] for group in groups], [spread.mean for spread in spreads]
        lengths = _bar_lengths(report, spreads, name)
        axes.errorbar(xs, means, yerr=lengths, capsize=2, label=label or None, **series(index))
        for group, x, mean, up in zip(groups, xs, means, lengths[1], strict=True):
            if group.incomplete:
                _say_count(axes, x, mean + up, group, name)
    levels = [float(level) for level in _levels(report, along)]
    if min(levels) > 0 and max(levels) / min(levels) >= LOG_RATIO:
        axes.set_xscale("log")
    elif len(levels) <= _TICKS:  # ticks where something was measured
        axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.margins(x=0.08, y=0.1)
    axes.set_xlabel(_named(report, along))
    axes.set_ylabel(_named(report, name))
    axes.grid()


def _heatmap(axes: Any, report: SweepReport, name: str) -> None:
    """Two axes; each cell says its mean and spread where there is room for it."""
    from matplotlib.patheffects import withStroke

    if len(report.grouped_by) != 2:
        raise VitcliError(
            f"--plot-kind heatmap: needs two axes (got {len(report.grouped_by)})", "--group ONE,TWO"
        )
    down, right = report.grouped_by
    rows, columns = _levels(report, down), _levels(report, right)
    cells = [[math.nan] * len(columns) for _ in rows]
    room = len(columns) <= 8 and len(rows) <= 8
    for group in report.groups:
        if name in group.metrics:
            row, column = rows.index(group.params[down]), columns.index(group.params[right])
            spread = group.metrics[name]
            cells[row][column] = spread.mean
            if not room:
                continue
            words = text(spread.mean) + (f"\n± {spread.std:.2g}" if spread.std is not None else "")
            axes.text(column, row, words, ha="center", va="center", color="white",
                      path_effects=[withStroke(linewidth=2, foreground="black")])  # fmt: skip
    image = axes.imshow(cells, aspect="auto")
    axes.figure.colorbar(image, ax=axes, label=_named(report, name))
    _name_bars(axes, [(text(level),) for level in columns])
    each = -(-len(rows) // 16)
    axes.set_yticks(range(0, len(rows), each), [text(level) for level in rows[::each]])
    axes.set_xlabel(_named(report, right))
    axes.set_ylabel(_named(report, down))


def _curve_lines(axes: Any, report: SweepReport, name: str | None) -> None:
    """One thin line per trial, one color per group."""
    curves = {trial.id: trial.curve for trial in report.trials if trial.curve}
    if not curves:
        raise VitcliError(
            "--plot-kind curves: no finished trial has a curve",
            "write `curve: {x: history.*.step, y: history.*.loss}` in the sweep's file",
        )
    for index, group in enumerate(report.groups):
        label = _label(report, group) if len(report.groups) <= 12 else "_"
        for id in group.trials:
            if curve := curves.get(id):
                ys = [math.nan if y is None else y for y in curve.y]
                how = series(index, marker=False)
                axes.plot(curve.x, ys, label=label or "_", **{**how, "linewidth": 0.8})
                label = "_"  # one entry per group
    axes.set_xlabel(_named(report, report.curve_names[0]))
    axes.set_ylabel(_named(report, report.curve_names[1]))
    axes.grid()


def _search(axes: Any, report: SweepReport, name: str) -> None:
    """Every trial in the order of its start; of the objective, the best so far and pruned ones."""
    direction, _, objective = report.objective.partition(" ")
    found = [
        (place, float(trial.metrics[name]))
        for place, trial in enumerate(report.trials, start=1)
        if is_number(trial.metrics.get(name))
    ]
    places, values = [place for place, _ in found], [value for _, value in found]
    axes.plot(places, values, label="trial", **{**series(0), "linestyle": "none"})
    if name == objective:
        better: Callable[..., float] = min if direction == "minimize" else max
        best = list(itertools.accumulate(values, better))
        axes.step(places, best, where="post", label="best so far", **series(1, marker=False))
        pruned = [
            (place, trial.last_value)
            for place, trial in enumerate(report.trials, start=1)
            if trial.last_value is not None
        ]
        if pruned:
            how = {**series(2), "linestyle": "none", "marker": "x"}
            axes.plot(*zip(*pruned, strict=True), label="pruned", **how)
    axes.set_xlabel("trial, in the order of start")
    count_along_x(axes)
    axes.set_ylabel(_named(report, name))
    axes.grid()


DRAW: dict[str, Callable[..., None]] = {
    "bars": _bars,
    "lines": _lines,
    "heatmap": _heatmap,
    "curves": _curve_lines,
    "search": _search,
}


def _varying(report: SweepReport) -> list[str]:
    """The keys of the grouping that have more than one value; all of them where none has."""
    keys = [key for key in report.grouped_by if len(_levels(report, key)) > 1]
    return keys or list(report.grouped_by)


def _label(report: SweepReport, group: SweepGroup, along: str = "") -> str:
    """What distinguishes a group, without the axis it is drawn along."""
    keys = [key for key in _varying(report) if key != along]
    return ", ".join(f"{_named(report, key)} {text(group.params[key])}" for key in keys)


def _levels(report: SweepReport, key: str) -> list[Any]:
    """The different values of a key; numbers in their order, words as they come."""
    found: list[Any] = []
    for group in report.groups:
        if group.params[key] not in found:
            found.append(group.params[key])
    return sorted(found) if found and all(is_number(v) for v in found) else found


def _any(report: SweepReport, name: str) -> bool:
    return any(name in group.metrics for group in report.groups)
