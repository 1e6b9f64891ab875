"""What a sweep has found so far, read from its directory: trials, groups, and levels compared.

Seeds (or whatever else two levels share) make pairs: what a seed does to both is taken out. Without
two shared seeds the levels are compared by Welch's test (extra `stats`).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import operator
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vitcli.commands.sweep.result import (
    Comparison,
    Curve,
    Spread,
    SweepGroup,
    SweepReport,
    SweepTrial,
)
from vitcli.commands.sweep.search import check_search, remote_trials
from vitcli.commands.sweep.space import canonical, draw
from vitcli.commands.sweep.spec import Sweep, expand, trial_of
from vitcli.commands.sweep.storage import check_storage
from vitcli.commands.sweep.trials import Results, TrialDir
from vitcli.config.settings import nearest
from vitcli.config.yaml import lookup, parse_value
from vitcli.errors import VitcliError, install_extra
from vitcli.measures import CONFIDENCE, holm, paired_interval, seeds_needed, welch_interval

OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
Item = TypeVar("Item")
FACTS = ("id", "state", "wall_s", "attempts", "host")
"""What can be sorted and filtered by, beside parameters and metrics."""


@dataclass(frozen=True)
class View:
    """Which trials to show, in which order, and which belong together.

    `where` holds conditions such as `lr<=0.01`, all of which must be met; `sort` a name, or `-name`
    for the largest first; `group` the keys of a grouping (None: all that varies but the seeds).
    """

    where: tuple[str, ...] = ()
    sort: str | None = None
    group: tuple[str, ...] | None = None
    stale: bool = False
    """Also trials of the directory that the sweep's file no longer asks for."""
    mix_incomplete: bool = False
    """Sort groups with failed, diverged or missing trials among the others, not after them."""
    power: float | None = None
    """Say how many seeds would detect a difference of this size."""


def report(
    sweep: Sweep, results: Results, view: View | None = None, *, named: bool = False
) -> SweepReport:
    """Gather the trials of a sweep.

    Args:
        named: the user has named the storage, or runs the sweep; a storage on a network that only
            a received directory names is not opened.

    Raises:
        VitcliError: a name in the view that no trial has, or a damaged file of a trial.
    """
    view = view or View()
    if view.power is not None:
        check_available("--power")
    all_trials = trials = _trials(sweep, results, view.stale, named)
    states = dict(Counter(trial.state for trial in trials))
    names = _names(sweep, trials)
    for condition in view.where:
        trials = [t for t in trials if _meets(t, condition, names)]
    if view.sort:
        by = _known(view.sort.removeprefix("-"), names)
        trials = _in_order(trials, lambda trial: value_of(trial, by), view.sort.startswith("-"))
    keys = sweep.axes if view.group is None else [_known(key, names) for key in view.group]
    groups = _groups(trials, keys, sweep)
    if view.sort and (name := _known(view.sort.lstrip("-"), names)) in sweep.metrics:
        groups = _in_order(groups, lambda g: _mean(g, name), view.sort.startswith("-"))
        if not view.mix_incomplete:
            groups.sort(key=lambda group: group.incomplete)
    search = sweep.search
    drawn, distinct = _draws(sweep, results, all_trials)
    return SweepReport(
        name=sweep.name,
        question=sweep.question,
        command=sweep.command,
        directory=str(results.root),
        axes=tuple(sweep.axes),
        seeds=next(iter(sweep.repeat), ""),
        grouped_by=tuple(keys),
        metrics=tuple(sweep.metrics),
        states=states,
        objective=f"{search.direction} {sweep.objective}" if search else "",
        curve_names=(sweep.curve.x, sweep.curve.y) if sweep.curve else (),
        trials=tuple(trials),
        groups=tuple(groups),
        comparisons=_comparisons(sweep, trials, groups, keys, view.power),
        better={name: m.better for name, m in sweep.metrics.items() if m.better},
        labels=_labels(sweep),
        chance={name: m.chance for name, m in sweep.metrics.items() if m.chance is not None},
        drawn=drawn,
        distinct=distinct,
        power_for=view.power,
    )


def _comparisons(
    sweep: Sweep,
    trials: Sequence[SweepTrial],
    groups: Sequence[SweepGroup],
    keys: Sequence[str],
    power: float | None,
) -> tuple[Comparison, ...]:
    """Every pair of levels of a grid's axes; what was drawn is no design with levels."""
    axes: list[tuple[str, ...]] = [(key,) for key in sweep.grid if key in keys]
    if together := tuple(key for key in sweep.zip if key in keys):
        axes.append(together)
    if not axes or not is_available():
        return ()
    by_id = {trial.id: trial for trial in trials}
    return tuple(
        made for name in sweep.metrics for made in compare_levels(groups, by_id, axes, name, power)
    )


def _labels(sweep: Sweep) -> dict[str, str]:
    """Names for figures: what the file says, with a metric's unit."""
    labels = dict(sweep.labels)
    for name, metric in sweep.metrics.items():
        if metric.label or metric.unit:
            unit = f" ({metric.unit})" if metric.unit else ""
            labels[name] = (metric.label or name) + unit
    return labels


def _draws(sweep: Sweep, results: Results, trials: Sequence[SweepTrial]) -> tuple[int, int]:
    """How many points were drawn, and how many of them are different."""
    if sweep.random:
        drawn = draw(sweep.space, sweep.random.trials, sweep.random.seed)
        return len(drawn), len({json.dumps(point, sort_keys=True) for point in drawn})
    if not sweep.search:
        return 0, 0
    counts = [results.trial(t.id).status().drawn for t in trials if t.directory]
    return sum(counts), sum(count > 0 for count in counts)


def never_found(found: SweepReport) -> list[str]:
    """Metrics that are in no finished trial's result: most likely a path with a mistake."""
    done = [trial for trial in found.trials if trial.state == "done"]
    return [
        name for name in found.metrics if done and all(t.metrics.get(name) is None for t in done)
    ]


def _trials(sweep: Sweep, results: Results, stale: bool, named: bool) -> list[SweepTrial]:
    planned = {trial.id: trial.params for trial in expand(sweep)}
    found: dict[str, SweepTrial] = {}
    there = {place.path.name: place for place in results.trials()} if results.root.is_dir() else {}
    remote = remote_trials(sweep, results) if _may_open(sweep, named) else {}
    for id, params in planned.items():
        if id in there:
            found[id] = _local(id, there[id], sweep)
        else:
            pending = SweepTrial(id, "pending", dict(params), {}, None, 0, "", "", "", "", "")
            found[id] = remote.get(id, pending)
    for id, place in there.items():
        if id not in found:
            trial = _local(id, place, sweep)
            drawn = sweep.search and belongs(sweep, trial.params)
            if stale or (drawn and id == trial_of(sweep, trial.params).id):
                found[id] = trial
    if sweep.search:
        started = {id: there[id].status().started or 0.0 for id in found if id in there}
        found = dict(sorted(found.items(), key=lambda item: started.get(item[0], 0.0)))
        found.update({id: trial for id, trial in remote.items() if id not in found})
    return list(found.values())


def _may_open(sweep: Sweep, named: bool) -> bool:
    """Whether a report reads the storage: one the user named, or a file that is there."""
    if not sweep.storage or not sweep.search:
        return False
    if named:
        check_search(sweep)
        return True
    if not is_file_storage(sweep.storage):
        return False
    check_search(sweep)
    return True


def is_file_storage(url: str) -> bool:
    """Whether a storage is an SQLite file that exists: reading it opens no connection."""
    path = urlsplit(url).path.removeprefix("/")
    return check_storage(url) == "sqlite" and bool(path) and Path(path).is_file()


def _local(id: str, place: TrialDir, sweep: Sweep) -> SweepTrial:
    status, config = place.status(), place.config()
    result = place.result() if status.state == "done" else None
    state = status.state
    if state == "running" and not place.is_held():
        state = "interrupted"
    curve = None
    if sweep.curve and result is not None:
        xs, ys = lookup(result, sweep.curve.x), lookup(result, sweep.curve.y)
        if isinstance(xs, list) and isinstance(ys, list) and len(xs) == len(ys):
            pairs = [(x, y if is_number(y) else None) for x, y in zip(xs, ys, strict=True)]
            pairs = [(x, y) for x, y in pairs if is_number(x)]
            curve = Curve(tuple(x for x, _ in pairs), tuple(y for _, y in pairs))
    return SweepTrial(
        id=id,
        state=state,
        params=config.params if config else {},
        metrics={name: lookup(result, metric.path) for name, metric in sweep.metrics.items()}
        if result is not None
        else {},
        wall_s=status.wall_s,
        attempts=status.attempts,
        error=status.error,
        command=config.run if config else "",
        cwd=config.cwd if config else "",
        directory=str(place.path),
        host=status.host,
        curve=curve,
        threads=status.threads,
        last_value=status.last_value,
    )


# -- names, conditions, order ------------------------------------------------------------------
def _names(sweep: Sweep, trials: Sequence[SweepTrial]) -> list[str]:
    params = dict.fromkeys(key for trial in trials for key in trial.params)
    return [*params, *sweep.metrics, *FACTS]


def _known(name: str, names: Sequence[str]) -> str:
    name = canonical(name.strip())
    ends = [key for key in names if key.rsplit(".", 1)[-1] == name]
    if name not in names and len(ends) == 1:  # as the tables' headings say it
        return ends[0]
    if name not in names:
        raise VitcliError(f"{name}: no trial has it", nearest(name, list(names)))
    return name


def value_of(trial: SweepTrial, name: str) -> Any:
    """A parameter, a metric or a fact of a trial; None where it has none."""
    for values in (trial.metrics, trial.params):
        if name in values:
            return values[name]
    return getattr(trial, name) if name in FACTS else None


def _meets(trial: SweepTrial, condition: str, names: Sequence[str]) -> bool:
    match = re.fullmatch(r"([^<>=!]+)(<=|>=|!=|=|<|>)(.*)", condition)
    if not match:
        raise VitcliError(
            f"--where {condition}: is not a condition (expected NAME=VALUE)", "--where 'lr<=0.01'"
        )
    name, sign, text = match.groups()
    value = value_of(trial, _known(name, names))
    wanted = parse_value(text, f"--where {condition}")
    if sign in ("=", "!="):
        return OPERATORS[sign](value, wanted)
    try:
        return OPERATORS[sign](value, wanted)
    except TypeError:  # a trial that has not finished has no number to compare
        return False


def _in_order(items: list[Item], key: Callable[[Item], Any], down: bool) -> list[Item]:
    """Sorted by numbers, then words; items without a value last, whatever the direction."""

    def rank(value: Any) -> tuple[int, Any]:
        return (0, value) if isinstance(value, int | float) else (1, str(value))

    have = [item for item in items if key(item) is not None]
    have.sort(key=lambda item: rank(key(item)), reverse=down)
    return have + [item for item in items if key(item) is None]


# -- groups --------------------------------------------------------------------------------------
def _groups(trials: Sequence[SweepTrial], keys: Sequence[str], sweep: Sweep) -> list[SweepGroup]:
    members: dict[str, list[SweepTrial]] = {}
    for trial in trials:
        mark = json.dumps([value_of(trial, key) for key in keys], sort_keys=True, default=str)
        members.setdefault(mark, []).append(trial)
    numeric = [n for n in sweep.metrics if any(is_number(t.metrics.get(n)) for t in trials)]
    groups = []
    for group in members.values():
        done = [trial for trial in group if trial.state == "done"]
        seconds = [trial.wall_s for trial in done if trial.wall_s is not None]
        values = {n: [t.metrics.get(n) for t in done] for n in sweep.metrics}
        holes = [t for t in done if any(t.metrics.get(n) is None for n in numeric)]
        groups.append(
            SweepGroup(
                params={key: value_of(group[0], key) for key in keys},
                trials=tuple(trial.id for trial in done),
                metrics={n: s for n, v in values.items() if (s := spread(v))},
                words={n: dict(c) for n, v in values.items() if (c := _words(v))},
                wall_s=statistics.fmean(seconds) if seconds else None,
                states=dict(Counter(trial.state for trial in group)),
                diverged=len(holes),
            )
        )
    return groups


def spread(values: Sequence[Any]) -> Spread | None:
    """Mean and spread of those values that are numbers."""
    numbers = [float(v) for v in values if is_number(v)]
    if not numbers:
        return None
    std = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Spread(len(numbers), statistics.fmean(numbers), std, min(numbers), max(numbers))


def _words(values: Sequence[Any]) -> Counter[str]:
    words = (v for v in values if isinstance(v, str | bool))
    return Counter(str(v).lower() if isinstance(v, bool) else v for v in words)


def _mean(group: SweepGroup, name: str) -> float | None:
    return group.metrics[name].mean if name in group.metrics else None


def belongs(sweep: Sweep, params: Mapping[str, Any]) -> bool:
    """Whether a trial found on disk is one that this search could have drawn."""
    free = {*sweep.space, *sweep.repeat}
    fixed = {key: value for key, value in params.items() if key not in free}
    return (
        fixed == dict(sweep.base)
        and all(key in params and axis.holds(params[key]) for key, axis in sweep.space.items())
        and all(params.get(key) in seeds for key, seeds in sweep.repeat.items())
    )


MOST_PAIRS = 2000
"""Pairs of levels per metric; a larger grid is not a design that pairs can answer."""


def is_available() -> bool:
    """Whether scipy is installed."""
    return importlib.util.find_spec("scipy") is not None


def check_available(option: str) -> None:
    """Raises VitcliError where scipy is missing."""
    if not is_available():
        raise VitcliError(f"{option}: needs scipy, which is not installed", install_extra("stats"))


def is_number(value: Any) -> bool:
    """Whether a metric is a finite number; `true` is a word."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def compare_levels(
    groups: Sequence[SweepGroup],
    trials: Mapping[str, SweepTrial],
    axes: Sequence[tuple[str, ...]],
    metric: str,
    power_for: float | None = None,
) -> list[Comparison]:
    """Every pair of levels of every axis, at equal values of the other keys of the grouping.

    Args:
        axes: keys of the grouping; those of one tuple vary together (`zip`).
        power_for: also how many seeds a difference of this size needs.
    """
    found: list[Comparison] = []
    for axis in axes:
        family: list[tuple[Comparison, float]] = []
        for cell, levels in _cells(groups, axis):
            for a, b in itertools.combinations(levels, 2):
                if len(found) + len(family) >= MOST_PAIRS:
                    return []
                made = _pair(axis, cell, a, b, trials, metric)
                if made:
                    family.append(made)
        found += _adjusted(family, power_for)
    return found


def _cells(
    groups: Sequence[SweepGroup], axis: tuple[str, ...]
) -> list[tuple[dict[str, Any], list[SweepGroup]]]:
    """Groups that agree in all but the axis."""
    cells: dict[str, tuple[dict[str, Any], list[SweepGroup]]] = {}
    for group in groups:
        rest = {key: value for key, value in group.params.items() if key not in axis}
        mark = json.dumps(rest, sort_keys=True, default=str)
        cells.setdefault(mark, (rest, []))[1].append(group)
    return list(cells.values())


def _pair(
    axis: tuple[str, ...],
    cell: Mapping[str, Any],
    a: SweepGroup,
    b: SweepGroup,
    trials: Mapping[str, SweepTrial],
    metric: str,
) -> tuple[Comparison, float] | None:
    """The comparison, and the standard deviation that power follows from; None without numbers."""
    first, second = (_values(group, trials, metric) for group in (a, b))
    shared = sorted(first.keys() & second.keys())
    paired = len(shared) > 1
    one = [first[key] for key in shared] if paired else list(first.values())
    two = [second[key] for key in shared] if paired else list(second.values())
    if min(len(one), len(two)) < 2:
        return None
    low, high, p = paired_interval(one, two) if paired else welch_interval(one, two)
    if paired:
        spread = statistics.stdev([x - y for x, y in zip(one, two, strict=True)])
    else:
        spread = math.sqrt((statistics.variance(one) + statistics.variance(two)) / 2)
    made = Comparison(
        metric=metric,
        axis=", ".join(axis),
        a={key: a.params[key] for key in axis},
        b={key: b.params[key] for key in axis},
        at=dict(cell),
        n=min(len(one), len(two)),
        paired=paired,
        difference=statistics.fmean(one) - statistics.fmean(two),
        low=low,
        high=high,
        p=p,
        left_out=sum(sum(group.states.values()) for group in (a, b)) - len(first) - len(second),
    )
    return made, spread


def _values(group: SweepGroup, trials: Mapping[str, SweepTrial], metric: str) -> dict[str, float]:
    """The group's numbers by what distinguishes its trials: the seed, and keys that are pooled."""
    found = {}
    for id in group.trials:
        trial = trials[id]
        value: Any = trial.metrics.get(metric)
        if is_number(value):
            rest = {k: v for k, v in trial.params.items() if k not in group.params}
            found[json.dumps(rest, sort_keys=True, default=str)] = float(value)
    return found


def _adjusted(
    family: Sequence[tuple[Comparison, float]], power_for: float | None
) -> list[Comparison]:
    """The family with Holm's p, and the seeds that `power_for` needs at the family's level."""
    tested = [made.p for made, _ in family if made.p is not None]
    corrected = iter(holm(tested))
    alpha = (1 - CONFIDENCE) / max(1, len(tested))
    done = []
    for made, spread in family:
        p_holm = next(corrected) if made.p is not None else None
        seeds = None
        if power_for is not None:
            seeds = seeds_needed(power_for, spread, alpha, made.paired)
        done.append(replace(made, p_holm=p_holm, pairs=len(tested), seeds_needed=seeds))
    return done
