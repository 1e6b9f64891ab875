from __future__ import annotations

import io
import itertools
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from rich.console import Console
from rich.table import Table

from vitcli.commands.sweep import view as sweep
from vitcli.commands.sweep.figure import figure, kind_of
from vitcli.commands.sweep.result import (
    Counts,
    Curve,
    Event,
    Spread,
    SweepGroup,
    SweepReport,
    SweepTrial,
)
from vitcli.commands.sweep.view import spread_text, sweep_progress
from vitcli.errors import VitcliError
from vitcli.ui.console import duration


def made(objective: str = "", curve: bool = False, **axes: list[Any]) -> SweepReport:
    """A report over the product of the axes, two seeds a point; the score is the seed."""
    trials, groups = [], []
    for index, point in enumerate(itertools.product(*axes.values())):
        params = dict(zip(axes, point, strict=True))
        ids = [f"{index}-{seed}" for seed in (0, 1)]
        for seed, id in enumerate(ids):
            path = Curve((0.0, 1.0), (1.0, None)) if curve else None
            trials.append(
                SweepTrial(
                    id, "done", params, {"score": index + seed}, 1.0, 1, "", "", "", "", "", path
                )
            )
        values = [float(index), index + 1.0]
        spread = Spread(2, statistics.fmean(values), statistics.stdev(values), *values)
        groups.append(SweepGroup(params, tuple(ids), {"score": spread}, {}, 1.0))
    keys = tuple(axes)
    return SweepReport("toy", "What?", "encode", "out", keys, "seed", keys, ("score",), {},
                       objective, ("x", "y"), tuple(trials), tuple(groups))  # fmt: skip


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        (made(norm=["pre", "post"]), "bars"),
        (made(norm=["pre", "post"], warmup=[0, 0.1], init=["x", "t"]), "bars"),
        (made(position=["learned", "rope2d", "none"]), "bars"),
        (made(lr=[1e-4, 1e-3, 1e-2]), "lines"),
        (made(lr=[1e-4, 1e-3, 1e-2], norm=["pre", "post"]), "lines"),
        (made(norm=["pre", "post"], warmup=[0, 0.1], lr=[1, 2, 3]), "lines"),
        (made(a=[1, 2, 3], b=[1, 2, 3, 4]), "heatmap"),
        (made(a=["x", "y", "z"], b=["u", "v", "w"]), "heatmap"),
        (made("maximize score", lr=[1, 2, 3]), "search"),
        (made(curve=True), "curves"),
    ],
)
def test_the_figure_follows_the_shape_of_the_space(report: SweepReport, kind: str) -> None:
    assert kind_of(report) == kind
    drawing = figure(report)
    assert drawing.get_suptitle() == "What?"


def test_lines_of_one_or_two_points_are_bars() -> None:
    """An axis that goes in step with others has few points for each of their values."""
    crossed = made(lr=[1e-3, 2e-3, 3e-3], depth=[6, 12])
    in_step = [
        group
        for group in crossed.groups
        if (group.params["lr"] < 2e-3) == (group.params["depth"] == 12)
    ]
    assert kind_of(crossed) == "lines"
    assert kind_of(replace(crossed, groups=tuple(in_step))) == "bars"


def test_bars_stand_at_the_means_with_the_spread() -> None:
    axes = figure(made(norm=["pre", "post"])).axes[0]
    heights = [patch.get_height() for patch in axes.patches]
    assert heights == [0.5, 1.5]
    # A dot for each trial, on its own bar.
    dots = [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "."]
    assert dots == [[0, 1], [1, 2]]


def test_a_panel_per_metric_with_the_labels_and_units_of_the_file() -> None:
    report = made(norm=["pre", "post"])
    two = {"wall_s": Spread(2, 3.0, 1.0, 2.0, 4.0)}
    groups = tuple(replace(g, metrics={**g.metrics, **two}) for g in report.groups)
    labels = {"wall_s": "wall time (s)", "norm": "norm placement"}
    report = replace(report, metrics=("score", "wall_s"), groups=groups, labels=labels)
    panels = figure(report).axes
    assert [axes.get_ylabel() for axes in panels] == ["score", "wall time (s)"]
    assert {axes.get_xlabel() for axes in panels} == {"norm placement"}
    assert [axes.get_ylabel() for axes in figure(report, "wall_s").axes] == ["wall time (s)"]
    third = tuple(replace(g, metrics={**g.metrics, **two, "more": two["wall_s"]}) for g in groups)
    three = replace(report, metrics=("score", "wall_s", "more"), groups=third)
    assert len(figure(three).axes) == 3, "no empty panel"


@pytest.mark.parametrize("kind", ["bars", "lines"])
def test_bars_of_an_accuracy_stay_between_0_and_1(kind: str) -> None:
    report = made(lr=[1, 2, 3])
    spreads = [Spread(2, 0.98, 0.05, 0.95, 1.0), Spread(2, 0.02, 0.05, 0.0, 0.04),
               Spread(2, 0.5, 0.05, 0.4, 0.6)]  # fmt: skip
    for name, ends in (("val_accuracy", [(0.93, 1), (0, 0.07), (0.45, 0.55)]),
                       ("loss", [(0.93, 1.03), (-0.03, 0.07), (0.45, 0.55)])):  # fmt: skip
        groups = tuple(
            replace(group, metrics={name: spread})
            for group, spread in zip(report.groups, spreads, strict=True)
        )
        axes = figure(replace(report, metrics=(name,), groups=groups), kind=kind).axes[0]
        drawn = [(p[0][1], p[1][1]) for c in axes.collections for p in c.get_segments()]
        assert [tuple(pytest.approx(v) for v in pair) for pair in ends] == drawn


def test_a_figure_says_how_many_trials_its_means_are_of() -> None:
    report = made(norm=["pre", "post"])
    first, second = report.groups
    spread = replace(first.metrics["score"], n=1, std=None)
    holes = replace(first, metrics={"score": spread}, states={"done": 1, "failed": 1})
    drawing = figure(replace(report, groups=(holes, second)))
    assert [t.get_text() for t in drawing.axes[0].texts] == ["1 of 2"]
    said = [t.get_text() for t in drawing.findobj(Text)]
    assert "mean ± sd, 1 to 2 seeds; dots: seeds" in said
    assert "mean ± sd, 2 seeds; dots: seeds" in [t.get_text() for t in figure(report).findobj(Text)]
    pooled = replace(report, axes=(*report.axes, "encoder.depth"))
    assert "mean ± sd, 2 trials; dots: trials" in [
        t.get_text() for t in figure(pooled).findobj(Text)
    ]


@pytest.mark.parametrize("kind", ["bars", "lines"])
def test_the_chance_of_a_metric_is_a_line_with_its_name(kind: str) -> None:
    report = replace(made(lr=[1e-4, 1e-3, 1e-2]), chance={"score": 0.25})
    drawing = figure(report, kind=kind)
    lines = {str(line.get_label()): line.get_ydata() for line in drawing.axes[0].get_lines()}
    assert list(lines["chance (0.25)"]) == [0.25, 0.25]
    assert "chance (0.25)" in [text.get_text() for text in drawing.legends[0].get_texts()]


def test_pruned_trials_are_crosses_at_their_last_value() -> None:
    report = made("maximize score", lr=[1, 2, 3])
    trials = [
        replace(trial, state="pruned", metrics={}, last_value=0.25) if place == 3 else trial
        for place, trial in enumerate(report.trials, start=1)
    ]
    axes = figure(replace(report, trials=tuple(trials))).axes[0]
    (crosses,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert (list(crosses.get_xdata()), list(crosses.get_ydata())) == ([3], [0.25])
    assert 3 not in axes.lines[0].get_xdata()


def test_a_row_says_what_its_mean_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    report = made(norm=["pre", "post"])
    first, second = report.groups
    states = {"done": 3, "failed": 2}
    holes = replace(first, states=states, diverged=1, trials=("a", "b", "c"))
    (grid,) = [p for p in sweep.tables(replace(report, groups=(holes, second)))
               if isinstance(p, Table)]  # fmt: skip
    cells = {column.header: list(column.cells) for column in grid.columns}
    assert cells["score"] == ["0.50 ± 0.71 (2 of 5)", "1.50 ± 0.71"]
    assert cells["not done"] == ["1 diverged, 2 failed", ""]
    assert cells["n"] == ["3", "2"]


def test_an_axis_of_few_numbers_has_its_ticks_there() -> None:
    axes = figure(made(registers=[0, 1, 4])).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "4"]


def test_lines_go_through_the_means_in_the_order_of_the_axis() -> None:
    axes = figure(made(lr=[1e-1, 1e-3, 1e-2])).axes[0]
    line = axes.lines[0]
    assert list(line.get_xdata()) == [1e-3, 1e-2, 1e-1]
    assert list(line.get_ydata()) == [1.5, 2.5, 0.5]
    assert axes.get_xscale() == "log"


def test_a_heatmap_puts_each_mean_into_its_cell() -> None:
    axes = figure(made(a=[2, 1, 3], b=["u", "v", "w"])).axes[0]
    cells = axes.images[0].get_array().tolist()
    assert cells == [[3.5, 4.5, 5.5], [0.5, 1.5, 2.5], [6.5, 7.5, 8.5]]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["1", "2", "3"]


def test_a_search_shows_the_best_so_far() -> None:
    axes = figure(made("minimize score", lr=[1, 2, 3])).axes[0]
    assert list(axes.lines[1].get_ydata()) == [0, 0, 0, 0, 0, 0]


WORDS = {
    "init": ["xavier_uniform", "trunc_normal"],
    "position": ["learned", "sincos2d", "rope2d", "alibi2d", "none"],
    "pool": ["cls", "mean", "cls+mean"],
    "norm": ["pre", "post"],
}


@pytest.mark.parametrize(
    "report",
    [
        made(init=["xavier_uniform", "trunc_normal"], norm=["pre", "post"], warmup=[0, 0.1]),
        made(**WORDS),
        made(lr=[1e-4, 1e-3, 1e-2], norm=["pre", "post"], pool=["cls", "mean", "map", "none"]),
        made(norm=list("abcdefghijklmnopqrstuvwxyz"), pool=["cls", "mean"]),
        made("maximize score", lr=[1, 2, 3]),
    ],
)
def test_no_legend_covers_the_data_and_no_label_another(report: SweepReport) -> None:
    drawing = figure(report)
    drawing.draw_without_rendering()
    axes = drawing.axes[0]
    boxes = [legend.get_window_extent() for legend in drawing.legends]
    assert boxes and axes.get_legend() is None
    assert not any(box.overlaps(axes.get_window_extent()) for box in boxes)
    for box in boxes:
        assert drawing.bbox.x0 <= box.x0 and box.x1 <= drawing.bbox.x1
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    if kind_of(report) == "bars" and labels[0].get_rotation() in (0, 90):
        spans = [label.get_window_extent() for label in labels]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(spans))


def test_a_crowded_heatmap_shows_colors_alone() -> None:
    small, large = (figure(made(a=list(range(n)), b=list(range(n)))).axes[0] for n in (4, 12))
    assert len(small.texts) == 16
    assert len(large.texts) == 0


def test_an_axis_of_one_value_is_not_told() -> None:
    bars = figure(made(norm=["pre", "post"], **{"encoder.heads": [3]}))
    assert not bars.legends and bars.axes[0].get_xlabel() == "norm"
    lines = figure(made(lr=[1, 2, 3], norm=["pre", "post"], pool=["cls"]))
    assert [t.get_text() for t in lines.legends[0].get_texts()] == ["norm pre", "norm post"]
    curves = figure(made(curve=True, norm=["pre", "post"], pool=["cls"]), kind="curves")
    assert [t.get_text() for t in curves.legends[0].get_texts()] == ["norm pre", "norm post"]


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(VitcliError, match="no finished trial"):
        figure(made(norm=["pre"]), "accuracy")
    with pytest.raises(VitcliError, match="needs two axes"):
        figure(made(norm=["pre"]), kind="heatmap")
    with pytest.raises(VitcliError, match="unknown"):
        figure(made(norm=["pre"]), kind="pie")
    with pytest.raises(VitcliError, match="no axis of numbers"):
        figure(made(norm=["pre"]), kind="lines")


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        (Spread(3, 0.97123, 0.00312, 0, 1), "0.9712 ± 0.0031"),
        (Spread(3, 0.5, 0.25, 0, 1), "0.50 ± 0.25"),
        (Spread(3, 1234.5, 56.0, 0, 1), "1234 ± 56"),
        (Spread(3, 2.0, 0.0, 2, 2), "2 ± 0"),
        (Spread(3, 691876.0, 0.0, 691876, 691876), "691,876 ± 0"),
        (Spread(1, 0.25, None, 0, 1), "0.25"),
        (Spread(3, 2.1234e8, 3.1e6, 0, 1), "212.3M ± 3.1M"),
        (Spread(1, 123456.0, None, 0, 1), "123.5k"),
    ],
)
def test_a_mean_has_the_digits_that_its_spread_allows(spread: Spread, text: str) -> None:
    assert spread_text(spread) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.314, "0.31 s"),
        (9.97, "10 s"),
        (59.7, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("columns", "last"), [(200, "trials"), (56, "time"), (46, "n")])
def test_a_narrow_terminal_leaves_out_facts_before_it_breaks_words(
    monkeypatch: pytest.MonkeyPatch, columns: int, last: str
) -> None:
    console = Console(width=columns)
    monkeypatch.setattr("vitcli.ui.console.stream", lambda: console)
    report = made(init=["xavier_uniform", "trunc_normal"], norm=["pre", "post"])
    grid = next(part for part in sweep.tables(report) if isinstance(part, Table))
    assert grid.columns[-1].header == last
    with console.capture() as capture:
        console.print(grid)
    assert "xavier_uniform" in capture.get() and "0.50 ± 0.71" in capture.get()


def test_no_digit_of_a_trial_is_lost_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = made(init=["xavier_uniform", "trunc_normal"])
    trials = tuple(replace(t, metrics={"score": 123456789}) for t in report.trials)
    console = Console(width=40)
    monkeypatch.setattr("vitcli.ui.console.stream", lambda: console)
    parts = sweep.tables(replace(report, trials=trials), each=True)
    with console.capture() as capture:
        console.print(next(part for part in parts if isinstance(part, Table)))
    digits = "".join(character for character in capture.get() if character in "123456789")
    assert digits.count("123456789") == 4 and "…" not in capture.get()
    assert "no room here for: time" in capture.get()


def test_a_metric_called_as_a_fact_stays_where_the_fact_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = made(norm=["pre", "post"])
    groups = tuple(replace(g, metrics={"time": g.metrics["score"]}) for g in report.groups)
    console = Console(width=28)
    monkeypatch.setattr("vitcli.ui.console.stream", lambda: console)
    grid = next(
        part
        for part in sweep.tables(replace(report, metrics=("time",), groups=groups))
        if isinstance(part, Table)
    )
    assert [column.header for column in grid.columns] == ["norm", "time", "n"]
    assert list(grid.columns[1].cells) == ["0.50 ± 0.71", "1.50 ± 0.71"]


def test_a_note_stands_above_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: the line is taken away, the note written, the line drawn again."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with sweep_progress(2) as on_event:
        on_event(Event(Counts(done=1, running=1, failed=0, pruned=0, total=2), 3.0))
        on_event(Event(Counts(done=1, running=0, failed=1, pruned=0, total=2), None, "it broke"))
    before, _, _ = screen.getvalue().partition("it broke")
    last = before.rpartition("note:")[0].rpartition("running")[2]
    assert "\x1b[2K" in last  # erases the line


def test_a_figure_is_a_file(tmp_path: Path) -> None:
    from vitcli.ui.figures import save_figure

    save_figure(figure(made(norm=["pre", "post"], warmup=[0, 0.1])), tmp_path / "a.svg")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
