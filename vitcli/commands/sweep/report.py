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
from dataclasses import replace
from typing import Any, TypeVar

from vitcli.commands.sweep.result import (
    NOT_STARTED,
    Comparison,
    Spread,
    SweepGroup,
    SweepReport,
    SweepTrial,
    last_word,
)
from vitcli.commands.sweep.space import canonical, draw
from vitcli.commands.sweep.spec import Sweep
from vitcli.commands.sweep.storage import check_search, is_file_storage, remote_trials
from vitcli.commands.sweep.trials import Results, expand, read_trial, trial_of
from vitcli.config.settings import nearest
from vitcli.config.yaml import parse_value
from vitcli.errors import VitcliError, install_extra
from vitcli.stats import CONFIDENCE, holm, is_number, paired_interval, seeds_needed, welch_interval

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
MOST_PAIRS = 2000
"""Pairs of levels per metric; a larger grid is not a design that pairs can answer."""


def report(
    sweep: Sweep,
    results: Results,
    where: Sequence[str] = (),
    sort: str | None = None,
    group: Sequence[str] | None = None,
    *,
    stale: bool = False,
    mix_incomplete: bool = False,
    power: float | None = None,
    named: bool = False,
) -> SweepReport:
    """Gather the trials of a sweep.

    Args:
        where: conditions such as `lr<=0.01`, all of which a shown trial meets.
        sort: a name, or `-name` for the largest first.
        group: keys whose values the trials of a group share; None: all that varies but the seeds.
        stale: also trials of the directory that the sweep's file no longer asks for.
        mix_incomplete: sort groups with failed, diverged or missing trials among the others, not
            after them.
        power: say how many seeds would detect a difference of this size.
        named: the user has named the storage, or runs the sweep; a storage on a network that only
            a received directory names is not opened.

    Raises:
        VitcliError: a name that no trial has, a damaged file of a trial, or `power` without scipy.
    """
    can_compare = importlib.util.find_spec("scipy") is not None
    if power is not None and not can_compare:
        raise VitcliError("--power: needs scipy, which is not installed", install_extra("stats"))
    all_trials = trials = _trials(sweep, results, stale, named)
    params = dict.fromkeys(key for trial in trials for key in trial.params)
    names = [*params, *sweep.metrics, *FACTS]
    for condition in where:
        trials = [trial for trial in trials if _meets(trial, condition, names)]
    keys = sweep.axes if group is None else [_known(key, names) for key in group]
    by, down = "", False
    if sort:
        by, down = _known(sort.removeprefix("-"), names), sort.startswith("-")
        trials = _in_order(trials, lambda trial: value_of(trial, by), down)
    groups = _groups(trials, keys, sweep)
    if by in sweep.metrics:
        groups = _in_order(groups, lambda g: g.metrics[by].mean if by in g.metrics else None, down)
        if not mix_incomplete:
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
        states=dict(Counter(trial.state for trial in all_trials)),
        objective=f"{search.direction} {sweep.objective}" if search else "",
        curve_names=(sweep.curve.x, sweep.curve.y) if sweep.curve else (),
        trials=tuple(trials),
        groups=tuple(groups),
        comparisons=_comparisons(sweep, trials, groups, keys, power) if can_compare else (),
        better={name: m.better for name, m in sweep.metrics.items() if m.better},
        labels=_labels(sweep),
        chance={name: m.chance for name, m in sweep.metrics.items() if m.chance is not None},
        drawn=drawn,
        distinct=distinct,
        power_for=power,
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
        return len(drawn), len(set(map(_mark, drawn)))
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
    """The planned trials or those of a search, in the order of their start, and stale ones."""
    there = {place.path.name: place for place in results.trials()}
    remote: dict[str, SweepTrial] = {}
    if sweep.search and sweep.storage and (named or is_file_storage(sweep.storage)):
        check_search(sweep)
        remote = remote_trials(sweep, results.journal)
    found: dict[str, SweepTrial] = {}
    for id, params in ((trial.id, dict(trial.params)) for trial in expand(sweep)):
        pending = SweepTrial(id=id, state="pending", params=params, **NOT_STARTED)
        found[id] = read_trial(sweep, there[id]) if id in there else pending
    for id in [id for id in there if id not in found]:
        trial = read_trial(sweep, there[id])
        drawn = sweep.search and belongs(sweep, trial.params)
        if stale or (drawn and id == trial_of(sweep, trial.params).id):
            found[id] = trial
    if sweep.search:
        started = {id: there[id].status().started or 0.0 for id in found}
        found = dict(sorted(found.items(), key=lambda item: started[item[0]]))
        found = found | {id: trial for id, trial in remote.items() if id not in found}
    return list(found.values())


# -- names, conditions, order ------------------------------------------------------------------
def _known(name: str, names: Sequence[str]) -> str:
    name = canonical(name.strip())
    ends = [key for key in names if last_word(key) == name]
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
def _mark(values: Any) -> str:
    """A text that two lists or mappings share where they are equal; the order of keys is none."""
    return json.dumps(values, sort_keys=True, default=str)


def _groups(trials: Sequence[SweepTrial], keys: Sequence[str], sweep: Sweep) -> list[SweepGroup]:
    members: dict[str, list[SweepTrial]] = {}
    for trial in trials:
        members.setdefault(_mark([value_of(trial, key) for key in keys]), []).append(trial)
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


def belongs(sweep: Sweep, params: Mapping[str, Any]) -> bool:
    """Whether a trial found on disk is one that this search could have drawn."""
    free = {*sweep.space, *sweep.repeat}
    fixed = {key: value for key, value in params.items() if key not in free}
    return (
        fixed == dict(sweep.base)
        and all(key in params and axis.holds(params[key]) for key, axis in sweep.space.items())
        and all(params.get(key) in seeds for key, seeds in sweep.repeat.items())
    )


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
    cells: dict[tuple[str, ...], dict[str, list[SweepGroup]]] = {axis: {} for axis in axes}
    for axis in axes:
        for group in groups:
            rest = {key: value for key, value in group.params.items() if key not in axis}
            cells[axis].setdefault(_mark(rest), []).append(group)
    sizes = [len(levels) for apart in cells.values() for levels in apart.values()]
    if sum(math.comb(size, 2) for size in sizes) > MOST_PAIRS:
        return []
    found: list[Comparison] = []
    for axis, apart in cells.items():
        pairs = [pair for levels in apart.values() for pair in itertools.combinations(levels, 2)]
        family = [one for a, b in pairs if (one := _pair(axis, a, b, trials, metric))]
        tested = [made.p for made, _ in family if made.p is not None]
        adjusted = iter(holm(tested))
        alpha = (1 - CONFIDENCE) / max(1, len(tested))
        for made, spread in family:
            p_holm = None if made.p is None else next(adjusted)
            seeds = None
            if power_for is not None:
                seeds = seeds_needed(power_for, spread, alpha, made.paired)
            found.append(replace(made, p_holm=p_holm, pairs=len(tested), seeds_needed=seeds))
    return found


def _pair(
    axis: tuple[str, ...],
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
        at={key: value for key, value in a.params.items() if key not in axis},
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
            found[_mark(rest)] = float(value)
    return found
