"""Holes, intervals and tests against scipy, statsmodels where it is there, and closed forms."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from vitcli.errors import VitcliError
from vitcli.stats import (
    all_finite,
    evenly,
    largest,
    largest_difference,
    mcnemar,
    mean_interval,
    plane,
    student_quantile,
    wilson,
)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_a_hole_on_either_side_is_never_a_number(make, hole: float) -> None:  # type: ignore[no-untyped-def]
    sound, broken = make([1.0, 2.0, 3.0]), make([1.0, hole, 3.0])
    assert all_finite(sound) and not all_finite(broken)
    for a, b in ((sound, broken), (broken, sound), (broken, broken)):
        assert math.isnan(largest_difference(a, b))
    assert largest_difference(sound, make([1.0, 2.5, 1.0])) == 2.0
    assert largest_difference(sound[:0], sound[:0]) == 0.0


def test_a_difference_is_taken_in_float64() -> None:
    a = torch.tensor([65504.0, 1.0], dtype=torch.float16)
    assert largest_difference(a, -a) == 131008.0


def test_the_largest_of_numbers_keeps_a_hole() -> None:
    assert largest([0.0, 3.0]) == 3.0 and largest([]) == 0.0
    assert math.isnan(largest([0.0, math.nan, 3.0]))
    assert all_finite(3) and not all_finite(math.nan)


@pytest.mark.parametrize(("right", "n"), [(83, 100), (0, 7), (7, 7), (1, 2)])
def test_wilson_is_scipys(right: int, n: int) -> None:
    expected = stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert wilson(right, n) == pytest.approx(tuple(expected), abs=1e-12)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 20, 101, 1999])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_students_quantile_is_scipys(freedom: int, confidence: float) -> None:
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert student_quantile(freedom, confidence) == pytest.approx(expected, rel=1e-9)


def test_mean_interval_is_the_paired_t_interval() -> None:
    values = np.random.default_rng(0).normal(size=9)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_interval(values.tolist())[1:] == pytest.approx(tuple(expected), abs=1e-12)
    assert mean_interval([2.0]) == (2.0, -math.inf, math.inf)


@pytest.mark.parametrize("pair", [(0, 0), (5, 0), (3, 9), (40, 41), (900, 1100)])
def test_mcnemar_is_the_exact_binomial_test(pair: tuple[int, int]) -> None:
    expected = stats.binomtest(pair[0], sum(pair)).pvalue if sum(pair) else 1.0
    assert mcnemar(*pair) == pytest.approx(expected, rel=1e-9)


def test_a_plane_is_the_first_two_principal_components() -> None:
    from sklearn.decomposition import PCA

    vectors = np.random.default_rng(0).normal(size=(40, 7)) * [5, 1, 3, 1, 1, 2, 1] + 11
    reference = PCA(2).fit(vectors)
    found = plane(vectors, [str(i) for i in range(40)], [None] * 40)
    np.testing.assert_allclose(
        np.abs(found.points), np.abs(reference.transform(vectors)), rtol=0, atol=1e-11
    )
    np.testing.assert_allclose(found.explained, reference.explained_variance_ratio_, rtol=1e-12)
    assert plane(-vectors, [""] * 40, [None] * 40).points == tuple(
        (-x, -y) for x, y in found.points
    )


@pytest.mark.parametrize("vectors", [np.ones((1, 4)), np.ones((3, 1)), np.ones((5, 5))])
def test_a_plane_of_next_to_nothing_is_finite(vectors: np.ndarray) -> None:
    found = plane(vectors, [""] * len(vectors), ["a"] * len(vectors))
    assert found.explained == (0, 0) and not np.any(found.points)


def test_a_plane_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VitcliError, match="tsne: unknown"):
        plane(np.ones((2, 2)), "ab", "ab", by="tsne")
    with pytest.raises(VitcliError, match="none to show"):
        plane(np.empty((0, 2)), "", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(VitcliError, match=r"too few images \(got 2"):
        plane(np.ones((2, 2)), "ab", "ab", by="umap")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(VitcliError, match="umap-learn is missing"):
        plane(np.ones((2, 2)), "ab", "ab", by="umap")


def test_umap_gets_the_cosine_and_a_fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for umap-learn, which takes long to compile."""
    given: dict[str, Any] = {}

    class Umap:
        def __init__(self, **how: Any) -> None:
            given.update(how)

        def fit_transform(self, rows: np.ndarray) -> np.ndarray:
            return rows[:, :2]

    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=Umap))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    found = plane(np.eye(4), [""] * 4, [None] * 4, by="umap")
    assert found.explained is None and found.points[:2] == ((1, 0), (0, 1))
    assert (given["metric"], given["random_state"], given["n_neighbors"]) == ("cosine", 0, 3)


@pytest.mark.parametrize(("count", "most"), [(0, 3), (3, 3), (4, 3), (1000, 7)])
def test_evenly_spaced_places(count: int, most: int) -> None:
    places = evenly(count, most)
    assert len(set(places)) == min(count, most)
    if count:
        assert (places[0], places[-1]) == (0, count - 1)
    gaps = np.diff(places)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1
