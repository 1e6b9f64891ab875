"""What the trials say of each pair of levels of an axis: difference, interval, adjusted p, power.

Seeds (or whatever else two levels share) make pairs: what a seed does to both is taken out. Without
two shared seeds the levels are compared by Welch's test. Needs scipy (extra `stats`).
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitcli.commands.sweep.result import Comparison, SweepGroup, SweepTrial
from vitcli.errors import VitcliError, install_extra
from vitcli.measures import holm

CONFIDENCE = 0.95
POWER = 0.8
MOST_PAIRS = 2000
"""Pairs of levels per metric; a larger grid is not a design that pairs can answer."""
MOST_SEEDS = 1_000_000
EXACT = 1e-12
"""A spread below this share of the values is rounding: the difference has no uncertainty."""


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


def paired_interval(
    one: Sequence[float], two: Sequence[float]
) -> tuple[float, float, float | None]:
    """The 95% interval of the mean of one - two over pairs, and Student's two-sided p.

    p is None where every pair differs by the same amount.
    """
    from scipy import stats

    differences = [x - y for x, y in zip(one, two, strict=True)]
    if _same(differences, [*one, *two]):
        mean = statistics.fmean(differences)
        return mean, mean, None
    test = stats.ttest_rel(one, two)
    interval = test.confidence_interval(CONFIDENCE)
    return float(interval.low), float(interval.high), float(test.pvalue)


def welch_interval(one: Sequence[float], two: Sequence[float]) -> tuple[float, float, float | None]:
    """The 95% interval of the difference of two means and its two-sided p, variances unequal.

    Welch (1947). p is None where neither sample varies.
    """
    from scipy import stats

    if _same(one, one) and _same(two, two):
        difference = statistics.fmean(one) - statistics.fmean(two)
        return difference, difference, None
    test = stats.ttest_ind(one, two, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
    return float(interval.low), float(interval.high), float(test.pvalue)


def _same(values: Sequence[float], scale: Sequence[float]) -> bool:
    return max(values) - min(values) <= EXACT * max(abs(value) for value in scale)


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


def seeds_needed(difference: float, spread: float, alpha: float, paired: bool) -> int | None:
    """The least seeds per level with which a t test finds `difference` with probability 0.8.

    Args:
        spread: the standard deviation of the paired differences, or of each level.
        alpha: the two-sided level of the test.

    Returns None where a million are too few.
    """
    if spread <= EXACT * abs(difference):
        return 2
    effect = abs(difference) / spread
    enough = functools.partial(_is_enough, effect, alpha, paired)
    high = 2
    while not enough(high):
        high *= 2
        if high > MOST_SEEDS:
            return None
    low = max(2, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def _is_enough(effect: float, alpha: float, paired: bool, n: int) -> bool:
    return power_of(effect, n, alpha, paired) >= POWER


def power_of(effect: float, n: int, alpha: float, paired: bool) -> float:
    """The power of the two-sided t test of `n` pairs, or of `n` values on each side.

    Args:
        effect: the difference in standard deviations (Cohen's d).
    """
    from scipy import stats

    freedom = n - 1 if paired else 2 * n - 2
    shift = effect * math.sqrt(n if paired else n / 2)
    if shift > 37:  # scipy's noncentral t ends here, and the power is 1 to all digits
        return 1.0
    cut = stats.t.isf(alpha / 2, freedom)
    near, far = stats.nct.sf(cut, freedom, shift), stats.nct.cdf(-cut, freedom, shift)
    return float(near) + (0.0 if math.isnan(far) else float(far))  # NaN where it underflows
