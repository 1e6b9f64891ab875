"""Splits that leak nothing, votes known by hand, intervals that cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from tests.commands.probe.sources import blobs
from vitcli.commands.probe.evaluate import (
    Answers,
    Splits,
    accuracy_interval,
    classify,
    copies,
    corrected_variance,
    cross_validation,
    deal,
    given_split,
    join_groups,
    linear_classes,
    neighbor_votes,
    regress,
    smallest_class,
)
from vitcli.stats import student_quantile, unit_rows, wilson


def test_groups_that_share_an_image_are_one() -> None:
    vectors = np.array([[1.0, 0], [2, 0], [1, 0], [3, 0], [4, 0]], np.float32)
    same = partition(join_groups([vectors]))
    assert same == {frozenset({0, 2}), frozenset({1}), frozenset({3}), frozenset({4})}
    joined = partition(join_groups([vectors], ["x", "y", "z", "y", "z"]))  # 4 joins 0 and 2
    assert joined == {frozenset({0, 2, 4}), frozenset({1, 3})}


def partition(numbers: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(numbers == n).tolist()) for n in set(numbers.tolist())}


def test_copies_are_what_every_encoder_takes_for_the_same() -> None:
    first = np.array([[1.0, 0], [2, 0], [1, 0], [2, 0]], np.float32)
    constant = np.ones((4, 3), np.float32)
    assert partition(join_groups([first, constant])) == partition(join_groups([first]))
    assert len(partition(join_groups([constant]))) == 1


def test_copies_differ_by_rounding_alone() -> None:
    rng = np.random.default_rng(0)
    pictures = rng.normal(size=(40, 64)).astype(np.float32)
    again = pictures * (1 + 1e-6 * rng.normal(size=pictures.shape)).astype(np.float32)
    order = rng.permutation(80)
    found = copies(np.concatenate([pictures, again])[order])
    for place in range(40):
        a, b = np.flatnonzero(order == place), np.flatnonzero(order == place + 40)
        assert found[a] == found[b]
    assert len(set(found)) == 40
    assert len(set(copies(pictures + 1e-3 * rng.normal(size=pictures.shape)))) == 40
    assert copies(np.array([[0.0, 1.0], [-0.0, 1.0]])).tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_groups_are_dealt_whole_and_classes_evenly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(40), rng.integers(1, 5, 40))
    labels = (groups % 3) + 0
    fold = deal(labels, groups, 5, seed)
    assert all(len(set(fold[groups == group])) == 1 for group in range(40))
    counts = np.array([[np.sum((fold == f) & (labels == c)) for c in range(3)] for f in range(5)])
    largest = max(np.bincount(groups))
    assert (counts.max(0) - counts.min(0) <= largest).all() and counts.min() > 0


def test_each_image_is_tested_once_for_each_seed_and_never_learned_from() -> None:
    labels = np.repeat([0, 1, 2], [20, 9, 5])
    splits = cross_validation(labels, np.arange(34), folds=10, seeds=3)
    assert (splits.folds, len(splits.rounds)) == (5, 15)  # the smallest class has five images
    for seed in range(3):
        rounds = splits.rounds[5 * seed : 5 * seed + 5]
        assert sorted(np.concatenate([test for _, test in rounds])) == list(range(34))
    for train, test in splits.rounds:
        assert not set(train) & set(test) and len(train) + len(test) == 34
    assert smallest_class(labels, splits) == 4


def test_a_tested_image_that_is_learned_from_too_is_left_out() -> None:
    is_test = np.array([False, False, True, True, True])
    splits, left_out = given_split(is_test, np.array([0, 1, 1, 2, 2]))
    assert left_out == 1
    assert [rows.tolist() for rows in splits.rounds[0]] == [[0, 1], [3, 4]]
    assert splits.independent == 1


def test_neighbors_vote_by_similarity() -> None:
    """Cosines 1, 0.9, 0.9: one vote e^(1/0.07) against two of e^(0.9/0.07): e^1.43 > 2."""
    angles = [0.0, math.acos(0.9), -math.acos(0.9)]
    learned = np.array([[math.cos(a), math.sin(a)] for a in angles])
    asked = np.array([[2.0, 0.0]])  # length does not matter
    assert neighbor_votes(learned, np.array([0, 1, 1]), asked, k=3).tolist() == [0]
    # At 0.97 each: e^0.43 < 2.
    angles = [0.0, math.acos(0.97), -math.acos(0.97)]
    learned = np.array([[math.cos(a), math.sin(a)] for a in angles])
    assert neighbor_votes(learned, np.array([0, 1, 1]), asked, k=3).tolist() == [1]


@pytest.mark.parametrize("k", [1, 5, 17])
def test_votes_are_those_of_scikit_learn_with_the_same_weights(k: int) -> None:
    vectors, names = blobs(30, 4, 1.0)
    labels = np.unique(names, return_inverse=True)[1]
    order = np.random.default_rng(1).permutation(len(labels))
    train, test = order[:80], order[80:]
    reference = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    ).fit(vectors[train], labels[train])
    said = neighbor_votes(vectors[train], labels[train], vectors[test], k)
    assert said.tolist() == reference.predict(vectors[test]).tolist()


def test_rows_of_zeros_stay() -> None:
    assert unit_rows(np.array([[0.0, 0.0], [3.0, 4.0]])).tolist() == [[0, 0], [0.6, 0.8]]


def test_the_corrected_variance_is_the_papers() -> None:
    means = np.array([0.8, 0.9, 0.7, 0.75, 0.85])
    train, test = np.arange(40), np.arange(10)
    splits = Splits(((train, test),) * 5, 1, 5, 50, "")
    assert corrected_variance(means, splits) == pytest.approx(
        (1 / 5 + 10 / 40) * np.var(means, ddof=1), rel=1e-12
    )


def test_an_interval_stays_within_zero_and_one_and_never_has_no_width() -> None:
    rounds = tuple(np.ones(8) for _ in range(5))
    splits = Splits(((np.arange(32), np.arange(8)),) * 5, 1, 5, 40, "")
    low, high = accuracy_interval(Answers(rounds, rounds), splits)
    assert (low, high) == pytest.approx(wilson(32, 32, z=student_quantile(4)))
    assert low < 0.95 and high == 1.0
    # Copies are not independent: four copies of ten pictures are ten trials.
    copies = Splits(splits.rounds, 1, 5, 10, "")
    assert accuracy_interval(Answers(rounds, rounds), copies)[0] < low


def test_under_cross_validation_the_interval_covers_what_it_says() -> None:
    """The accuracy of classifiers that learn from 48 of this distribution, 80 draws of 60 images.

    With a coverage of 0.95 fewer than 69 of 80 have a probability below 0.002; Wilson's interval
    over the pooled folds covers nearest neighbors in 0.85.
    """
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3

    def draw(count: int) -> np.ndarray:
        return rng.normal(size=(count, 8)) + 1.5 * np.eye(3, 8)[np.arange(count) % 3]

    large = draw(3000)
    k = 16
    truth = np.mean(
        [
            (neighbor_votes(draw(48), labels[:48], large, k) == np.arange(3000) % 3).mean()
            for _ in range(40)
        ]
    )
    covered = 0
    for _ in range(80):
        vectors = draw(60)
        splits = cross_validation(labels, np.arange(60), 5, 5)
        rounds = tuple(
            (neighbor_votes(vectors[a], labels[a], vectors[b], k) == labels[b]).astype(float)
            for a, b in splits.rounds
        )
        low, high = accuracy_interval(Answers(rounds, rounds), splits)
        covered += low <= truth <= high
    assert covered >= 69


def test_classes_that_are_apart_are_all_told_and_the_linear_probe_converges() -> None:
    vectors, names = blobs(10, 3, 20.0)
    labels = np.unique(names, return_inverse=True)[1]
    splits = cross_validation(labels, np.arange(30), 5, 2)
    found = dict(classify(vectors, labels, splits, 8))
    assert list(found) == ["8 nearest neighbors", "linear probe"]
    assert all(answers.mean == 1.0 and answers.converged for answers in found.values())
    assert linear_classes(vectors, labels, vectors)[1]


def test_ridge_finds_a_linear_number() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, 5))
    targets = vectors @ np.arange(5.0) + 7 + 1e-3 * rng.normal(size=60)
    splits = cross_validation(np.zeros(60, int), np.arange(60), 5, 2)
    assert regress(vectors, targets, splits).mean < 1e-4
    noise = regress(vectors, rng.normal(size=60), splits)
    assert noise.mean > 0.9


def test_numbers_far_from_zero_or_very_large_are_predicted_as_well() -> None:
    """Seconds since 1970, of which float32 has one in 128; numbers whose squares overflow."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(60, 5)).astype(np.float32)
    targets = vectors @ np.arange(5.0) + 1e-3 * rng.normal(size=60)
    splits = cross_validation(np.zeros(60, int), np.arange(60), 5, 2)
    near = regress(vectors, targets, splits)
    for far in (targets + 1.7e9, targets * 1e300):
        found = regress(vectors, far, splits)
        assert found.mean == pytest.approx(near.mean, rel=1e-2)  # 2e-7 of a second is lost
        assert found.said[0] == pytest.approx(far[splits.rounds[0][1]], rel=1e-2)
