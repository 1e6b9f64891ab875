"""`vitcli sweep` as tables and as live progress."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from vitcli.commands.sweep.result import (
    Comparison,
    Event,
    Spread,
    SweepGroup,
    SweepPlan,
    SweepReport,
    SweepTrial,
    last_word,
)
from vitcli.errors import VitcliError, install_extra
from vitcli.files import atomic_write, check_output
from vitcli.results import csv_text
from vitcli.ui.console import duration, fitted, note, plural, progress, table

SHORT_ID = 6
MOST_LINES = 12
"""Of compared pairs; the JSON has all."""


def tables(
    report: SweepReport, each: bool = False, metric: str | None = None
) -> Iterator[str | Table]:
    """What was asked, the table of groups or of trials, their status, and what differs.

    Args:
        each: a row per trial, not per group.
        metric: whose levels are compared; the first that has numbers by default.
    """
    yield f"[bold]{escape(report.name)}[/]  vitcli {escape(report.command)}"
    if report.question:
        yield escape(report.question)
    grouped = not each and (bool(report.seeds) or report.grouped_by != report.axes)
    yield _group_table(report) if grouped else _trial_table(report)
    yield _summary(report)
    errors = [t for t in report.trials if t.error and t.state in ("failed", "killed")]
    for trial in errors[:5]:
        yield f"[red]{trial.state}[/] {trial.id[:SHORT_ID]}: {escape(trial.error)}"
    if len(errors) > 5:
        yield f"and {len(errors) - 5} more"
    yield from _comparison_lines(report, metric)
    if report.objective and (best := _best(report)):
        ids = " ".join(trial.id[:SHORT_ID] for trial in best)
        yield f"best ({escape(report.objective)}): {ids}"
        yield f"run: {escape(reproducing(best[0]))}"


def _comparison_lines(report: SweepReport, metric: str | None) -> Iterator[str]:
    """The pairs of levels of one metric in words, those that differ first."""
    wanted = metric or next((c.metric for c in report.comparisons), "")
    found = [c for c in report.comparisons if c.metric == wanted]
    if not found:
        return
    ranked = sorted(found, key=lambda c: (c.p_holm is not None, c.p_holm or 0.0))
    title = f"[bold]{escape(last_word(wanted))}[/], pairs of levels"
    yield f"{title} (difference, 95% interval, Holm's p):"
    for comparison in ranked[:MOST_LINES]:
        yield "  " + escape(comparison_text(comparison, report.better, report.power_for))
    if len(ranked) > MOST_LINES:
        yield f"  and {len(ranked) - MOST_LINES} more pairs; --json lists all"


def comparison_text(
    c: Comparison, better: Mapping[str, str] | None = None, power_for: float | None = None
) -> str:
    """`norm pre is better than norm post by 0.03 [0.01, 0.05], 8 seeds, p 0.002`."""
    first, second = _level(c.a), _level(c.b)
    low, high, difference = c.low, c.high, c.difference
    if difference < 0:
        first, second, low, high, difference = second, first, -high, -low, -difference
    at = f" ({', '.join(f'{last_word(k)} {text(v)}' for k, v in c.at.items())})" if c.at else ""
    count = plural(c.n, "pair" if c.paired else "trial") + ("" if c.paired else " each")
    if c.left_out:
        count += f" ({plural(c.left_out, 'trial')} without a number left out)"
    digits = _digits(high - low, difference)
    if c.p_holm is None:
        if difference == 0:
            return f"{first} and {second} are equal in every trial{at}, {count}"
        return f"{first} is above {second} by {difference:.4g} in every trial{at}, {count}"
    interval = f"[{low:.{digits}f}, {high:.{digits}f}]"
    p = f"p {c.p_holm:.2g}" if c.p_holm >= 1e-4 else "p < 0.0001"
    if c.p_holm < 0.05:
        side = (better or {}).get(c.metric)
        word = {"higher": "better than", "lower": "worse than"}.get(side or "", "above")
        said = f"{first} is {word} {second} by {difference:.{digits}f} {interval}{at}, {count}, {p}"
    else:
        excluded = max(abs(low), abs(high))
        said = (
            f"{first} and {second} cannot be distinguished{at}; a difference above "
            f"{excluded:.{digits}f} is excluded ({difference:.{digits}f} {interval}, {count}, {p})"
        )
    if power_for is not None:
        needed = f"{c.seeds_needed:,}" if c.seeds_needed else "more than a million"
        said += f"; {needed} seeds would detect {power_for:g}"
    return said


def _level(level: Mapping[str, Any]) -> str:
    return ", ".join(f"{last_word(key)} {text(value)}" for key, value in level.items())


def _digits(width: float, difference: float) -> int:
    """Digits after the point that show two of the interval's width."""
    size = width if width > 0 else abs(difference)
    return max(0, min(8, 1 - math.floor(math.log10(size)))) if size > 0 else 2


def figure(report: SweepReport, metric: str | None = None, kind: str = "auto") -> Any:
    """The figure that suits the space; see `vitcli.commands.sweep.figure`."""
    from vitcli.commands.sweep import figure as drawing

    return drawing.figure(report, metric, kind)


def trial_tables(trial: SweepTrial) -> Iterator[str]:
    """Everything about one trial, the command that reproduces it last."""
    yield f"[bold]{trial.id}[/]  {trial.state}"
    if trial.wall_s is not None:
        tries = f", attempt {trial.attempts}" if trial.attempts > 1 else ""
        yield f"took {duration(trial.wall_s)} on {escape(trial.host)}{tries}"
    for name, value in (*trial.params.items(), *trial.metrics.items()):
        yield f"  {escape(name)}: {escape(text(value))}"
    if trial.error:
        yield f"[red]{escape(trial.error)}[/]"
    if trial.directory:
        yield f"files: {escape(trial.directory)}"
    yield f"run:   {escape(reproducing(trial) or 'not started yet')}"


def reproducing(trial: SweepTrial) -> str:
    """A shell's line that runs the trial again, from wherever it is typed."""
    if not trial.command:
        return ""
    threads = f"OMP_NUM_THREADS={trial.threads} " if trial.threads else ""
    return f"(cd {shlex.quote(trial.cwd)} && {threads}{trial.command})"


def plan_tables(plan: SweepPlan) -> Iterator[str | Table]:
    """The trials that a run would go through."""
    yield f"[bold]{escape(plan.name)}[/]"
    for said in plan.notes:
        yield escape(said)
    if plan.trials:
        grid = table(None, "trial", "state")
        grid.add_column("command", overflow="fold")
        for trial in plan.trials:
            grid.add_row(trial.id[:SHORT_ID], trial.state, escape(trial.command))
        yield grid
        yield f"{plural(len(plan.trials), 'trial')}, {plan.to_run} to run"
    if plan.draws:
        seeds = f", {plan.seeds_each} seeds each" if plan.seeds_each > 1 else ""
        yield f"up to {plan.draws} more points to draw from {', '.join(plan.axes)}{seeds}"


def _group_table(report: SweepReport) -> Table:
    grid = _keys_and_metrics(report, report.grouped_by)
    grid.add_column("n", justify="right", no_wrap=True)
    holes = any(group.incomplete for group in report.groups)
    if holes:
        grid.add_column("not done", justify="right", no_wrap=True)
    grid.add_column("time", justify="right", no_wrap=True)
    grid.add_column("trials")
    for group in report.groups:
        grid.add_row(
            *(escape(text(value)) for value in group.params.values()),
            *(escape(_cell(group, name)) for name in report.metrics),
            str(len(group.trials)),
            *([without_number(group)] if holes else []),
            "" if group.wall_s is None else duration(group.wall_s),
            " ".join(id[:SHORT_ID] for id in group.trials),
        )
    return fitted(grid, "trials", "time")


def _keys_and_metrics(report: SweepReport, keys: Sequence[str], *first: str) -> Table:
    """A table with the columns `first`, one for each of the keys and one for each metric."""
    grid = table()
    for header in first:
        grid.add_column(header, no_wrap=True)
    for key in keys:
        grid.add_column(escape(last_word(key)), overflow="fold")
    for name in report.metrics:
        grid.add_column(escape(last_word(name)), justify="right", overflow="fold")
    return grid


def without_number(group: SweepGroup) -> str:
    """`1 diverged, 2 failed`: the trials that a mean of the group leaves out."""
    words = [f"{group.diverged} diverged"] if group.diverged else []
    return ", ".join([*words, *_not_done(group.states)])


def _not_done(states: Mapping[str, int]) -> list[str]:
    return [f"{n} {state}" for state, n in sorted(states.items()) if state != "done"]


def _trial_table(report: SweepReport) -> Table:
    keys = [*report.axes, *filter(None, [report.seeds])]
    grid = _keys_and_metrics(report, keys, "trial", "state")
    grid.add_column("time", justify="right", no_wrap=True)
    for trial in report.trials:
        grid.add_row(
            trial.id[:SHORT_ID],
            trial.state,
            *(escape(text(trial.params.get(key))) for key in keys),
            *(escape(text(trial.metrics.get(name), "")) for name in report.metrics),
            "" if trial.wall_s is None else duration(trial.wall_s),
        )
    return fitted(grid, "time")


def _cell(group: SweepGroup, name: str) -> str:
    if name in group.metrics:
        spread, total = group.metrics[name], sum(group.states.values())
        part = f" ({spread.n} of {total})" if spread.n < total else ""
        return spread_text(spread) + part
    return ", ".join(f"{word} {count}" for word, count in group.words.get(name, {}).items())


def spread_text(spread: Spread) -> str:
    """`0.9712 ± 0.0031`: the spread to two digits, the mean to the same place."""
    if spread.std is None:
        return text(spread.mean)
    if spread.std == 0:
        whole = float(spread.mean).is_integer()
        return (f"{spread.mean:,.0f}" if whole else text(spread.mean)) + " ± 0"
    size, unit = _unit(spread.mean)
    mean, std = spread.mean / size, spread.std / size
    if abs(mean) < 1e-4:
        return f"{mean:.4g}{unit} ± {std:.2g}{unit}"
    digits = max(0, min(6, -int(f"{std:e}".split("e")[1]) + 1))
    return f"{mean:.{digits}f}{unit} ± {std:.{digits}f}{unit}"


def text(value: Any, missing: str = "-") -> str:
    """A value for a cell: four digits of a number, YAML's words for the rest."""
    if value is None:
        return missing
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        size, unit = _unit(value)
        return f"{value / size:.4g}{unit}"
    return str(value)


def _unit(value: float) -> tuple[float, str]:
    """What to divide a large number by, and the letter that says so."""
    if not math.isfinite(value):
        return 1.0, ""
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    return next((u for u in units if abs(value) >= max(u[0], 1e5)), (1.0, ""))


def _summary(report: SweepReport) -> str:
    total = sum(report.states.values())
    spent = sum(t.wall_s for t in report.trials if t.wall_s is not None)
    words = [f"{report.states.get('done', 0)} of {total} trials done", *_not_done(report.states)]
    shown = "" if len(report.trials) == total else f"; {len(report.trials)} shown"
    few = report.distinct < report.drawn
    drawn = f"; {report.distinct} distinct points of {report.drawn} drawn" if few else ""
    return f"{', '.join(words)}; {duration(spent)} of trials{shown}{drawn}"


def _best(report: SweepReport) -> list[SweepTrial]:
    """The trials of the best point, by its mean over the seeds; of points with all their seeds."""
    direction, _, metric = report.objective.partition(" ")
    points: dict[str, list[SweepTrial]] = {}
    for trial in report.trials:
        if isinstance(trial.metrics.get(metric), int | float):
            point = {k: v for k, v in trial.params.items() if k != report.seeds}
            points.setdefault(str(sorted(point.items())), []).append(trial)
    most = max(map(len, points.values()), default=0)
    whole = [point for point in points.values() if len(point) == most]
    if not whole:
        return []
    pick: Callable[..., list[SweepTrial]] = max if direction == "maximize" else min
    return pick(whole, key=lambda point: statistics.fmean(t.metrics[metric] for t in point))


@contextmanager
def sweep_progress(total: int) -> Iterator[Callable[[Event], None]]:
    """Done, running, failed and time left on stderr: a live line on a terminal, else a log.

    It draws only when an event arrives: a second thread beside the one that starts the trials
    would make starting them unsafe.
    """
    ended = 0
    with progress("trials", timed=False) as bar:
        bar(0, total, "starting")

        def on_event(event: Event) -> None:
            nonlocal ended
            if event.text:
                note(event.text)
            words, now = _state(event), event.counts.total - event.counts.left
            bar(now, event.counts.total, ", ".join(words[1:]))  # the bar has the first
            if not bar.live and now != ended:
                bar.line(", ".join(words))
            ended = now

        yield on_event


def _state(event: Event) -> list[str]:
    counts = event.counts
    words = [f"{counts.done}/{counts.total} done", f"{counts.running} running"]
    words += [f"{counts.failed} failed"] if counts.failed else []
    words += [f"{counts.pruned} pruned"] if counts.pruned else []
    if event.seconds_left is not None and counts.left:
        words.append(f"about {duration(event.seconds_left)} left")
    return words


ROW_FACTS = ("wall_s", "attempts", "error", "command", "cwd", "threads", "directory", "host")


def rows(report: SweepReport) -> list[dict[str, Any]]:
    """One row per trial: id, state, every parameter, every metric, and the facts of its run.

    A metric that is called like a parameter is written as `metric.<name>`.
    """
    params = list(dict.fromkeys(key for trial in report.trials for key in trial.params))
    taken = {"id", "state", *params, *ROW_FACTS}
    columns = {name: f"metric.{name}" if name in taken else name for name in report.metrics}
    return [
        {
            "id": trial.id,
            "state": trial.state,
            **{key: _plain(trial.params.get(key)) for key in params},
            **{columns[name]: _plain(trial.metrics.get(name)) for name in report.metrics},
            **{fact: getattr(trial, fact) for fact in ROW_FACTS},
        }
        for trial in report.trials
    ]


def check_files(csv_file: Path | None, parquet_file: Path | None) -> None:
    """Refuse, before anything is run, files that could not be written after it.

    Raises:
        VitcliError: there is no such folder, or no pyarrow.
    """
    for path in (csv_file, parquet_file):
        if path:
            check_output(path)
    if parquet_file and importlib.util.find_spec("pyarrow") is None:
        raise VitcliError(
            "--parquet needs pyarrow, which is not installed", install_extra("parquet")
        )


def write_csv(report: SweepReport, path: Path) -> None:
    """Write the rows; what has no value is an empty cell."""
    with atomic_write(path) as file:
        file.write((csv_text(rows(report)) if report.trials else "id\n").encode())


def write_parquet(report: SweepReport, path: Path) -> None:
    """Write the rows with one type per column; a column of mixed types is text."""
    import pyarrow
    from pyarrow import parquet

    table = rows(report)
    columns = {key: _one_type([row[key] for row in table]) for key in (table[0] if table else ())}
    with atomic_write(path) as file:
        parquet.write_table(pyarrow.table(columns), file)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _one_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return [None if v is None else float(v) for v in values] if float in kinds else values
    return values if len(kinds) <= 1 else [None if v is None else str(v) for v in values]
