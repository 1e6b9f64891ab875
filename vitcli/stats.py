"""What numbers are worth: holes, largest differences, intervals and paired tests.

Works on torch tensors, numpy arrays and plain numbers; imports neither torch nor scipy.
"""

from __future__ import annotations

import bisect
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Any

from vitcli.errors import VitcliError, check_choice, install_extra


@dataclass(frozen=True)
class Plane:
    """Vectors of images in two dimensions."""

    by: str
    """One of `PROJECTIONS`."""
    model: str
    weights: str
    images: int
    """How many there are; where that is more than `names`, these are evenly spaced among them."""
    names: tuple[str, ...]
    labels: tuple[str | float | None, ...]
    """The class of each, or a number; None without."""
    points: tuple[tuple[float, float], ...]
    explained: tuple[float, float] | None
    """The share of the vectors' variance along each axis; None for UMAP."""


PROJECTIONS = ("pca", "umap")
MOST_POINTS = 10_000
"""Vectors that a view in two dimensions shows; of more, evenly spaced ones."""
CONFIDENCE = 0.95
MARGIN = 0.1
"""The part of the way from chance to a perfect score that is clearly more than chance."""
NORMAL_FROM = 2000
"""From so many degrees of freedom on Student's quantile is the normal one to 1e-3."""


def is_number(value: Any) -> bool:
    """Whether it is a finite number; `true` is a word."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def all_finite(values: Any) -> bool:
    """Whether an array or a number holds no NaN and no infinity; an empty array is finite."""
    if isinstance(values, int | float):
        return math.isfinite(values)
    return bool((abs(values) < math.inf).all())  # false for NaN, and without a warning


def largest_difference(a: Any, b: Any) -> float:
    """The largest |a - b| of two arrays of one shape in float64; NaN where either has a hole.

    Python's `max` forgets a NaN that is not its first argument: a hole must not become a 0.
    """
    if not (all_finite(a) and all_finite(b)):
        return math.nan
    difference = abs(_wide(a) - _wide(b))
    if isinstance(difference, int | float):
        return float(difference)
    return float(difference.max()) if math.prod(difference.shape) else 0.0


def _wide(values: Any) -> Any:
    """In float64, on the CPU: a difference in float16 would overflow, and MPS has no float64."""
    if hasattr(values, "double"):
        return values.detach().cpu().double()
    return values.astype("float64") if hasattr(values, "astype") else values


def unit_rows(vectors: Any) -> Any:
    """Rows (N, D) of length 1; a row of zeros stays."""
    import numpy as np

    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length == 0, 1, length)


def largest(values: Sequence[float]) -> float:
    """The largest of some numbers, NaN if any is NaN; 0 without any."""
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


def wilson(
    correct: float, tested: float, confidence: float = CONFIDENCE, *, z: float | None = None
) -> tuple[float, float]:
    """The score interval of a proportion (Wilson 1927, two-sided).

    Args:
        z: the normal quantile itself, in place of a confidence.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2) if z is None else z
    p, z2 = correct / tested, z * z
    center = p + z2 / (2 * tested)
    spread = z * math.sqrt(p * (1 - p) / tested + z2 / (4 * tested * tested))
    low, high = ((center + sign * spread) / (1 + z2 / tested) for sign in (-1, 1))
    # exactly at the ends, which rounding may miss by a bit
    return 0.0 if p == 0 else max(low, 0.0), 1.0 if p == 1 else min(high, 1.0)


def above_chance(chance: float, times: float = 1) -> float:
    """`times` MARGIN of the way from chance to one."""
    return chance + times * MARGIN * (1 - chance)


def too_few(value: float, high: float, chance: float) -> bool:
    """Whether more images would decide on a value that its interval does not hold above chance.

    It is MARGIN above chance, and the interval reaches what twice the margin is.
    """
    return value > above_chance(chance) and high > above_chance(chance, 2)


@lru_cache(maxsize=256)
def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| <= t) = confidence for whole degrees of freedom.

    By bisection of the finite series of the distribution (Abramowitz and Stegun 26.7.3, 26.7.4).
    """
    if freedom >= NORMAL_FROM:
        return NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = 0.0, math.pi / 2  # the angle atan(t / sqrt(freedom))
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def student_p(t: float, freedom: int) -> float:
    """Two-sided p-value of Student's t with whole degrees of freedom."""
    if freedom >= NORMAL_FROM:
        return math.erfc(abs(t) / math.sqrt(2))
    return max(0.0, 1 - _within(math.atan(abs(t) / math.sqrt(freedom)), freedom))


def _within(angle: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    if freedom == 1:
        return 2 * angle / math.pi
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def mean_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Mean of independent values with Student's interval; of one value it is infinite."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return mean, -math.inf, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = student_quantile(n - 1, confidence) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value that two classifiers are right equally often on the same images.

    The binomial test of the images that only one of the two gets right (McNemar 1947, exact).
    """
    n = only_first + only_second
    if n == 0:
        return 1.0
    fewer = min(only_first, only_second)
    log_half = n * math.log(2)
    terms = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - log_half
        for k in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(math.exp(term) for term in terms))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number, in the order given (Holm 1979, step-down)."""
    m, running = len(p_values), 0.0
    adjusted = [0.0] * m
    for rank, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (m - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def check_projection(by: str) -> None:
    """Refuse a projection that is unknown, or whose library is missing.

    Raises:
        VitcliError: as said.
    """
    check_choice("--projection", by, PROJECTIONS)
    if by == "umap" and importlib.util.find_spec("umap") is None:
        raise VitcliError("--projection umap: umap-learn is missing", install_extra("umap"))


def evenly(count: int, most: int = MOST_POINTS) -> list[int]:
    """At most `most` of `count` places, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def plane(
    vectors: Any,
    names: Sequence[str],
    labels: Sequence[str | float | None],
    *,
    by: str = "pca",
    images: int | None = None,
    model: str = "",
    weights: str = "",
) -> Plane:
    """Vectors (N, D) in two dimensions.

    pca: along the two directions of largest variance of the centered vectors, in float64; the sign
    of each makes its entry of largest absolute value positive. umap: UMAP (McInnes et al. 2018) by
    cosine distance, with the seed 0.

    Raises:
        VitcliError: an unknown projection, no vectors, fewer than 3 for UMAP, or umap-learn is
            missing.
    """
    import numpy as np

    check_projection(by)
    rows = np.asarray(vectors, np.float64)
    if not len(rows):
        raise VitcliError("vectors: there are none to show", "embed at least one image")
    explained = None
    if by == "umap":
        if len(rows) < 3:
            raise VitcliError(
                f"--projection umap: too few images (got {len(rows)}, expected at least 3)",
                "--projection pca",
            )
        from umap import UMAP

        near = min(15, max(len(rows) - 1, 2))
        how = {"n_components": 2, "metric": "cosine", "random_state": 0, "n_jobs": 1}
        how |= {"n_neighbors": near, "init": "spectral" if len(rows) > 10 else "random"}
        points = np.asarray(UMAP(**how).fit_transform(rows), np.float64)
    else:
        centered = rows - rows.mean(0)
        variances, axes = np.linalg.eigh(centered.T @ centered)  # ascending
        axes = axes[:, ::-1][:, :2]
        axes = axes * np.sign(axes[np.abs(axes).argmax(0), range(axes.shape[1])])
        points = np.zeros((len(rows), 2))
        points[:, : axes.shape[1]] = centered @ axes
        first, second = (points**2).sum(0) / (variances.sum() or 1.0)
        explained = (float(first), float(second))
    return Plane(
        by=by,
        model=model,
        weights=weights,
        images=len(rows) if images is None else images,
        names=tuple(names),
        labels=tuple(labels),
        points=tuple((float(x), float(y)) for x, y in points),
        explained=explained,
    )


POWER = 0.8
MOST_SEEDS = 1_000_000
EXACT = 1e-12
"""A spread below this share of the values is rounding: the difference has no uncertainty."""


def paired_interval(
    one: Sequence[float], two: Sequence[float]
) -> tuple[float, float, float | None]:
    """The 95% interval of the mean of one - two over pairs, and Student's two-sided p.

    p is None where every pair differs by the same amount.
    """
    from scipy import stats

    differences = [x - y for x, y in zip(one, two, strict=True)]
    if _same(differences, [*one, *two]):
        return fmean(differences), fmean(differences), None
    return _interval_and_p(stats.ttest_rel(one, two))


def welch_interval(one: Sequence[float], two: Sequence[float]) -> tuple[float, float, float | None]:
    """The 95% interval of the difference of two means and its two-sided p, variances unequal.

    Welch (1947). p is None where neither sample varies.
    """
    from scipy import stats

    if _same(one, one) and _same(two, two):
        difference = fmean(one) - fmean(two)
        return difference, difference, None
    return _interval_and_p(stats.ttest_ind(one, two, equal_var=False))


def _interval_and_p(test: Any) -> tuple[float, float, float]:
    interval = test.confidence_interval(CONFIDENCE)
    return float(interval.low), float(interval.high), float(test.pvalue)


def _same(values: Sequence[float], scale: Sequence[float]) -> bool:
    return max(values) - min(values) <= EXACT * max(abs(value) for value in scale)


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
    seeds = range(2, MOST_SEEDS + 1)
    enough = bisect.bisect_left(seeds, POWER, key=lambda n: power_of(effect, n, alpha, paired))
    return seeds[enough] if enough < len(seeds) else None


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
