"""A sweep as a figure whose kind follows the shape of the space."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from vitcli.commands.sweep.result import SweepGroup, SweepReport
from vitcli.commands.sweep.view import text
from vitcli.errors import VitcliError

KINDS = ("auto", "bars", "lines", "heatmap", "curves", "search")
LOG_RATIO = 20
"""An axis of positive numbers that span more than this is drawn on a log scale."""
_TICKS = 8

LABEL_CHARACTERS = 90
"""How many stand beside each other below the axes."""
MOST_LABELS = 48


def check_kind(kind: str) -> None:
    """Raises VitcliError for a kind that is not in KINDS."""
    if kind not in KINDS:
        raise VitcliError(f"--plot-kind {kind}: unknown", "one of " + ", ".join(KINDS))


def kind_of(report: SweepReport) -> str:
    """The figure that suits the space.

    A search is its objective over its trials; an axis of numbers, with at most a few words beside
    it, is lines; two axes of three or more values are a heat-map; the rest are bars.
    """
    if report.objective:
        return "search"
    sizes = {key: len(_levels(report, key)) for key in report.grouped_by}
    if not any(size > 1 for size in sizes.values()) and _curves(report):
        return "curves"
    numeric = [key for key in sizes if _numeric(report, key) and sizes[key] >= 3]
    if len(sizes) == 2 and all(size >= 3 for size in sizes.values()):
        return "heatmap"
    if numeric and len(report.groups) // sizes[numeric[-1]] <= 8:
        return "lines"
    return "bars"


def figure(report: SweepReport, metric: str | None = None, kind: str = "auto") -> Any:
    """Draw one metric of a report; spread is one sample standard deviation.

    Raises:
        VitcliError: an unknown kind or metric, or nothing to draw yet.
    """
    from matplotlib.figure import Figure

    check_kind(kind)
    kind = kind_of(report) if kind == "auto" else kind
    if kind == "search" and metric is None:
        metric = report.objective.partition(" ")[2]
    name = metric or next((m for m in report.metrics if _any(report, m)), None)
    if kind != "curves" and (name is None or not _any(report, name)):
        said = f"no finished trial has a number for {name}" if name else "there is nothing to draw"
        raise VitcliError(said, "known metrics: " + ", ".join(report.metrics), exit_code=1)
    drawing = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawing.subplots()
    DRAW[kind](axes, report, name)
    title = report.question or report.name
    axes.set_title(textwrap.fill(title, 80), fontsize=9)
    return drawing


def _bars(axes: Any, report: SweepReport, name: str) -> None:
    """A bar a group: the last key is the color, the others' values stand below; a dot a trial."""
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
        axes.bar(x, spread.mean, width * 0.95, yerr=spread.std or 0, capsize=3, color=f"C{hue}")
        dots = _values(report, group, name)
        axes.plot([x] * len(dots), dots, ".", color="black", markersize=4, alpha=0.6)
    _name_bars(axes, list(ticks))
    axes.set_xlabel(", ".join(_short(key) for key in below))
    axes.set_ylabel(name)
    if color:
        for index, level in enumerate(hues):
            axes.bar(0, 0, color=f"C{index}", label=f"{_short(color)} {text(level)}")
        _legend(axes)


def _name_bars(axes: Any, names: Sequence[tuple[str, ...]]) -> None:
    """A word a line where they fit beside each other, else turned; of very many, every n-th."""
    room = sum(max(map(len, words), default=0) + 2 for words in names) <= LABEL_CHARACTERS
    step = -(-len(names) // MOST_LABELS)
    labels = [("\n" if room else ", ").join(words) for words in names[::step]]
    turned = {} if room else {"rotation": 90 if len(labels) > 20 else 30, "ha": "right",
                              "rotation_mode": "anchor"}  # fmt: skip
    if len(labels) > 20:
        turned["va"] = "center"
    axes.set_xticks(range(0, len(names), step), labels, fontsize=8, **turned)


def _legend(axes: Any) -> None:
    """Below the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = max(1, LABEL_CHARACTERS // (max(map(len, labels)) + 6))
        axes.figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
        )


def _lines(axes: Any, report: SweepReport, name: str) -> None:
    """Against the longest axis of numbers; a line for each combination of the others."""
    numeric = [key for key in report.grouped_by if _numeric(report, key)]
    if not numeric:
        raise VitcliError("lines need an axis of numbers", "--plot-kind bars")
    along = max(numeric, key=lambda key: len(_levels(report, key)))
    lines: dict[str, list[SweepGroup]] = {}
    for group in report.groups:
        if name in group.metrics:
            lines.setdefault(_label(report, group, along), []).append(group)
    for label, groups in lines.items():
        groups.sort(key=lambda group: float(group.params[along]))
        spreads = [group.metrics[name] for group in groups]
        axes.errorbar(
            [group.params[along] for group in groups],
            [spread.mean for spread in spreads],
            yerr=[spread.std or 0 for spread in spreads],
            marker="o",
            markersize=4,
            capsize=3,
            label=label or None,
        )
    levels = [float(level) for level in _levels(report, along)]
    if min(levels) > 0 and max(levels) / min(levels) >= LOG_RATIO:
        axes.set_xscale("log")
    elif len(levels) <= _TICKS:  # ticks where something was measured
        axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.set_xlabel(along)
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    _legend(axes)


def _heatmap(axes: Any, report: SweepReport, name: str) -> None:
    """Two axes; each cell says its mean and spread where there is room for it."""
    if len(report.grouped_by) != 2:
        raise VitcliError(
            f"a heat-map needs two axes, not {len(report.grouped_by)}", "--group ONE,TWO"
        )
    down, across = report.grouped_by
    rows, columns = _levels(report, down), _levels(report, across)
    cells = [[float("nan")] * len(columns) for _ in rows]
    room = len(columns) <= 8 and len(rows) <= 8
    for group in report.groups:
        if name in group.metrics:
            row, column = rows.index(group.params[down]), columns.index(group.params[across])
            spread = group.metrics[name]
            cells[row][column] = spread.mean
            if not room:
                continue
            words = text(spread.mean) + (f"\n± {spread.std:.2g}" if spread.std is not None else "")
            axes.text(column, row, words, ha="center", va="center", fontsize=8, color="white",
                      path_effects=_outline())  # fmt: skip
    image = axes.imshow(cells, aspect="auto")
    axes.figure.colorbar(image, label=name)
    _name_bars(axes, [(text(level),) for level in columns])
    each = -(-len(rows) // 16)
    axes.set_yticks(range(0, len(rows), each), [text(level) for level in rows[::each]], fontsize=8)
    axes.set_xlabel(across)
    axes.set_ylabel(down)


def _curve_lines(axes: Any, report: SweepReport, name: str | None) -> None:
    """One thin line a trial, one color a group."""
    curves = _curves(report)
    if not curves:
        raise VitcliError(
            "no finished trial has a curve", "`curve: {x: history.*.step, y: history.*.loss}`"
        )
    for index, group in enumerate(report.groups):
        label = _label(report, group)
        for id in group.trials:
            if curve := curves.get(id):
                ys = [float("nan") if y is None else y for y in curve.y]
                axes.plot(curve.x, ys, color=f"C{index % 10}", linewidth=1, label=label or "_")
                label = "_"  # one entry a group
    axes.set_xlabel(_short(report.curve_names[0]))
    axes.set_ylabel(_short(report.curve_names[1]))
    axes.grid(alpha=0.3)
    if report.grouped_by and len(report.groups) <= 12:
        _legend(axes)


def _search(axes: Any, report: SweepReport, name: str) -> None:
    """Every trial in the order of its start, and the best so far."""
    better: Callable[..., float] = min if report.objective.startswith("minimize") else max
    values = [float(v) for t in report.trials if isinstance(v := t.metrics.get(name), int | float)]
    best = [better(values[: end + 1]) for end in range(len(values))]
    order = range(1, len(values) + 1)
    axes.plot(order, values, "o", markersize=4, alpha=0.6, label="trial")
    axes.step(order, best, where="post", label="best so far")
    axes.set_xlabel("finished trial")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    _legend(axes)


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
    """What tells a group from the others, but for the axis it is drawn along."""
    keys = [key for key in _varying(report) if key != along]
    return ", ".join(f"{_short(key)} {text(group.params[key])}" for key in keys)


def _levels(report: SweepReport, key: str) -> list[Any]:
    """The different values of a key; numbers in their order, words as they come."""
    found: list[Any] = []
    for group in report.groups:
        if group.params[key] not in found:
            found.append(group.params[key])
    return sorted(found) if found and all(_is_number(v) for v in found) else found


def _numeric(report: SweepReport, key: str) -> bool:
    return all(_is_number(level) for level in _levels(report, key))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(report: SweepReport, group: SweepGroup, name: str) -> Sequence[float]:
    return [
        trial.metrics[name]
        for trial in report.trials
        if trial.id in group.trials and _is_number(trial.metrics.get(name))
    ]


def _any(report: SweepReport, name: str) -> bool:
    return any(name in group.metrics for group in report.groups)


def _curves(report: SweepReport) -> dict[str, Any]:
    return {trial.id: trial.curve for trial in report.trials if trial.curve}


def _short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _outline() -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2, foreground="black")]
