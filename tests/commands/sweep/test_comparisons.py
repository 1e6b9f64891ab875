"""Pairs of levels against statsmodels and scipy, and the words that say what they mean."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower, TTestPower
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from tests.commands.sweep.conftest import Sweeper
from vitcli.commands.sweep.report import compare_levels
from vitcli.commands.sweep.result import Comparison, SweepGroup, SweepTrial
from vitcli.commands.sweep.view import comparison_text
from vitcli.errors import VitcliError
from vitcli.stats import holm, paired_interval, power_of, seeds_needed, welch_interval


def samples(seed: int, n: int, m: int) -> tuple[list[float], list[float]]:
    generator = np.random.default_rng(seed)
    return list(generator.normal(0.9, 0.03, n)), list(generator.normal(0.88, 0.05, m))


@pytest.mark.parametrize(("seed", "n"), [(0, 2), (1, 3), (2, 8), (3, 40)])
def test_paired_interval_and_p_are_those_of_statsmodels(seed: int, n: int) -> None:
    one, two = samples(seed, n, n)
    low, high, p = paired_interval(one, two)
    wanted = DescrStatsW(np.subtract(one, two))
    assert (low, high) == pytest.approx(wanted.tconfint_mean(0.05), rel=1e-12, abs=1e-14)
    assert p == pytest.approx(wanted.ttest_mean(0)[1], rel=1e-12)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (5, 8), (30, 4)])
def test_welch_interval_and_p_are_those_of_statsmodels(n: int, m: int) -> None:
    one, two = samples(7, n, m)
    low, high, p = welch_interval(one, two)
    wanted = CompareMeans(DescrStatsW(one), DescrStatsW(two))
    interval = wanted.tconfint_diff(0.05, usevar="unequal")
    assert (low, high) == pytest.approx(interval, rel=1e-12, abs=1e-14)
    assert p == pytest.approx(wanted.ttest_ind(usevar="unequal")[1], rel=1e-12)


def test_what_does_not_vary_has_no_p() -> None:
    assert paired_interval([3.0, 3.1], [1.0, 1.1]) == (pytest.approx(2), pytest.approx(2), None)
    assert welch_interval([3.0, 3.0], [1.0, 1.0, 1.0]) == (2, 2, None)


@pytest.mark.parametrize("p", [[0.01], [0.04, 0.01, 0.03], [0.5, 0.001, 0.02, 0.02, 0.9], []])
def test_holm_is_that_of_statsmodels(p: list[float]) -> None:
    wanted = multipletests(p, method="holm")[1] if p else []
    assert holm(p) == pytest.approx(list(wanted), rel=1e-12)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(
    ("effect", "n", "alpha"), [(0.5, 8, 0.05), (1.2, 3, 0.01), (0.1, 90, 0.05)]
)
def test_power_is_that_of_statsmodels(effect: float, n: int, alpha: float, paired: bool) -> None:
    solver = TTestPower() if paired else TTestIndPower()
    wanted = solver.power(effect, n, alpha)
    assert power_of(effect, n, alpha, paired) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("spread", [0.005, 0.02, 0.1, 0.5])
def test_the_seeds_needed_are_the_fewest_with_a_power_of_80_percent(
    spread: float, paired: bool
) -> None:
    n = seeds_needed(0.02, spread, 0.05, paired)
    assert n is not None and power_of(0.02 / spread, n, 0.05, paired) >= 0.8
    assert n == 2 or power_of(0.02 / spread, n - 1, 0.05, paired) < 0.8


def test_up_to_a_million_seeds_are_counted() -> None:
    """n is about ((z_0.975 + z_0.8) / d)^2 where the t distribution is the normal one."""
    n = seeds_needed(0.003, 1.0, 0.05, True)
    assert n == pytest.approx(
        ((stats.norm.isf(0.025) + stats.norm.isf(0.2)) / 0.003) ** 2, rel=1e-4
    )
    assert 524_288 < n < 1_000_000


def test_a_difference_too_small_for_a_million_seeds() -> None:
    assert seeds_needed(1e-6, 1.0, 0.05, True) is None


def trials(values: dict[str, list[Any]]) -> tuple[list[SweepGroup], dict[str, SweepTrial]]:
    """A group per level of `norm`, whose trials have the seeds 0, 1, ..."""
    groups, found = [], {}
    for level, numbers in values.items():
        ids = [f"{level}{seed}" for seed in range(len(numbers))]
        for seed, (id, number) in enumerate(zip(ids, numbers, strict=True)):
            params = {"norm": level, "seed": seed}
            found[id] = SweepTrial(
                id, "done", params, {"accuracy": number}, 1.0, 1, "", "", "", "", ""
            )
        states = {"done": len(ids), "failed": 2}
        groups.append(SweepGroup({"norm": level}, tuple(ids), {}, {}, 1.0, states))
    return groups, found


def test_seeds_are_pairs_and_one_without_a_number_has_none() -> None:
    pre, post = [0.9, 0.8, 0.7, 0.95], [0.85, None, 0.6, 0.9]
    (made,) = compare_levels(*trials({"pre": pre, "post": post}), [("norm",)], "accuracy")
    assert (made.paired, made.n, made.pairs, made.left_out) == (True, 3, 1, 5)
    wanted = stats.ttest_rel([0.9, 0.7, 0.95], [0.85, 0.6, 0.9])
    assert made.p == pytest.approx(wanted.pvalue, rel=1e-12)
    assert made.difference == pytest.approx(0.2 / 3)


def test_levels_that_share_no_seed_are_compared_by_welch() -> None:
    groups, found = trials({"pre": [0.9, 0.8, 0.7], "post": [0.5, 0.6, 0.4]})
    for id, trial in found.items():
        if id.startswith("post"):
            trial.params["seed"] += 10  # type: ignore[index]
    (made,) = compare_levels(groups, found, [("norm",)], "accuracy")
    wanted = stats.ttest_ind([0.9, 0.8, 0.7], [0.5, 0.6, 0.4], equal_var=False)
    assert (made.paired, made.n) == (False, 3)
    assert made.p == pytest.approx(wanted.pvalue, rel=1e-12)


def test_p_is_adjusted_over_the_pairs_of_the_axis() -> None:
    generator = np.random.default_rng(0)
    means = {"a": 0.8, "b": 0.82, "c": 0.9}
    levels = {name: list(generator.normal(mean, 0.02, 6)) for name, mean in means.items()}
    made = compare_levels(*trials(levels), [("norm",)], "accuracy")
    p = [stats.ttest_rel(levels[x], levels[y]).pvalue for x, y in ("ab", "ac", "bc")]
    assert [c.p_holm for c in made] == pytest.approx(list(multipletests(p, method="holm")[1]))
    assert {c.pairs for c in made} == {3}


def test_a_grid_with_too_many_pairs_is_not_compared() -> None:
    """The pairs are counted, not made: 20,000 levels of one axis have 200 million."""
    levels = [SweepGroup({"lr": level}, (), {}, {}, None) for level in range(20_000)]
    assert compare_levels(levels, {}, [("lr",)], "accuracy") == []


def made(**changes: Any) -> Comparison:
    one = Comparison(
        metric="accuracy", axis="norm", a={"encoder.norm": "post"}, b={"encoder.norm": "pre"},
        at={"lr": 0.001}, n=8, paired=True, difference=-0.031, low=-0.052, high=-0.0104, p=0.002,
        p_holm=0.004, pairs=2,
    )  # fmt: skip
    return dataclasses.replace(one, **changes)


def test_words() -> None:
    assert comparison_text(made(), {"accuracy": "higher"}) == (
        "norm pre is better than norm post by 0.031 [0.010, 0.052] (lr 0.001), 8 pairs, p 0.004"
    )
    assert "norm pre is above norm post" in comparison_text(made())
    assert "norm pre is worse than norm post" in comparison_text(made(), {"accuracy": "lower"})
    assert comparison_text(made(p_holm=0.2, low=-0.07), {}) == (
        "norm pre and norm post cannot be distinguished (lr 0.001); a difference above 0.070 is "
        "excluded (0.031 [0.010, 0.070], 8 pairs, p 0.2)"
    )
    assert "8 pairs (5 trials without a number left out), p 0.004" in comparison_text(
        made(left_out=5)
    )
    power = comparison_text(made(p_holm=0.2, seeds_needed=14), {}, 0.02)
    assert power.endswith("; 14 seeds would detect 0.02")
    same = made(difference=0.0, low=0.0, high=0.0, p=None, p_holm=None)
    assert "are equal in every trial" in comparison_text(same)


TEXT = """
command: train-shapes
base: {norm: ok}
grid: {lr: [0.1, 0.3, 0.2]}
repeat: 3
metrics: {score: {path: result.score, better: higher}}
"""


def test_a_report_compares_the_levels_of_each_axis(sweeper: Sweeper) -> None:
    sweeper.run(TEXT, jobs=2)
    found = sweeper.report(TEXT, power=0.02)
    pairs = [(c.a["lr"], c.b["lr"]) for c in found.comparisons]
    assert pairs == [(0.1, 0.3), (0.1, 0.2), (0.3, 0.2)]
    # The fake's score is 1 - |lr - 0.5| + seed / 100: seeds are pairs without a spread.
    assert [c.difference for c in found.comparisons] == pytest.approx([-0.2, -0.1, 0.1])
    assert {(c.n, c.paired, c.p, c.seeds_needed) for c in found.comparisons} == {(3, True, None, 2)}
    assert json.loads(found.to_json())["comparisons"][0]["a"] == {"lr": 0.1}


def test_without_scipy_a_report_compares_nothing_and_power_names_the_extra(
    sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper.run(TEXT, jobs=3)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sweeper.report(TEXT).comparisons == ()
    with pytest.raises(VitcliError, match="needs scipy") as caught:
        sweeper.report(TEXT, power=0.1)
    assert "[stats]" in caught.value.hint
