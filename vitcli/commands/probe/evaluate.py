"""Vectors evaluated: splits, neighbors, linear models, intervals, paired differences, costs.

N images, D channels of a vector, K folds, S split seeds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitcli.commands.compare.similarity import MinibatchCka, centered_gram
from vitcli.commands.probe.result import Difference
from vitcli.errors import VitcliError, install_extra
from vitcli.stats import CONFIDENCE, mcnemar, student_p, student_quantile, unit_rows, wilson

TEMPERATURE = 0.07
"""A neighbor votes with exp(cosine / 0.07), as in DINO (Caron et al. 2021, appendix F)."""
ROWS_AT_ONCE = 2**24
"""Cosines that exist at once: 64 MiB."""
ALPHAS = tuple(10.0**power for power in range(-3, 7))
"""Strengths that ridge regression chooses from, by leave-one-out on what it learns from."""
SAME = 1e-5
"""Vectors that differ by less, relative to their length, are of the same picture."""
COMPARED = 16
"""Neighbors along the random direction that each vector is compared with."""
Round = tuple[np.ndarray, np.ndarray]
"""Rows that are learned from, rows that are tested."""


def sklearn() -> Any:
    """scikit-learn with the modules that are used here."""
    try:
        import sklearn
        import sklearn.linear_model
        import sklearn.pipeline
        import sklearn.preprocessing
    except ImportError as error:
        raise VitcliError("probe: scikit-learn is missing", install_extra("probe")) from error
    return sklearn


def join_groups(vectors: Sequence[np.ndarray], names: Sequence[str] | None = None) -> np.ndarray:
    """A number for each image, the same for images that must stay on one side of a split.

    These are images whose vectors (N, D) are identical by every encoder, and images with the same
    name in `names`; groups that share an image are one. What is constant for one encoder alone,
    such as CLS before the first block, makes no copies.
    """
    count = len(vectors[0])
    each = np.stack([copies(rows) for rows in vectors])
    same = np.unique(each, axis=1, return_inverse=True)[1].ravel()
    sets = _Sets(count)
    for keys in (same.tolist(), names or ()):
        first: dict[Any, int] = {}
        for place, key in enumerate(keys):
            sets.join(place, first.setdefault(key, place))
    return sets.numbers()


def copies(rows: np.ndarray) -> np.ndarray:
    """A number for each row (N,), the same for rows that are equal but for rounding.

    The same picture in another batch can differ in the last bits. Rows near each other are near
    in a random direction too, so that only neighbors along it are compared.
    """
    direction = np.random.default_rng(0).normal(size=rows.shape[1])
    along = rows.astype(np.float64) @ direction
    order, sets = np.argsort(along, kind="stable"), _Sets(len(rows))
    length = np.linalg.norm(rows.astype(np.float64), axis=1)
    for step in range(1, min(COMPARED, len(rows) - 1) + 1):
        here, there = order[:-step], order[step:]
        allowed = SAME * length[here]
        near = np.abs(along[here] - along[there]) <= allowed * np.linalg.norm(direction)
        for a, b, most in zip(here[near], there[near], allowed[near], strict=True):
            if np.linalg.norm(rows[a] - rows[b]) <= most:
                sets.join(int(a), int(b))
    return sets.numbers()


class _Sets:
    """Which of N things belong together (union-find)."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def root(self, place: int) -> int:
        parent = self.parent
        while parent[place] != place:
            parent[place] = place = parent[parent[place]]
        return place

    def join(self, a: int, b: int) -> None:
        self.parent[self.root(a)] = self.root(b)

    def numbers(self) -> np.ndarray:
        roots = [self.root(place) for place in range(len(self.parent))]
        return np.unique(roots, return_inverse=True)[1]


def deal(labels: np.ndarray, groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """A fold for each image (N,): whole groups, classes spread as evenly as groups allow.

    Groups are taken in random order, large ones first, each into the fold that has fewest images
    of its classes.
    """
    classes, number = int(labels.max()) + 1, int(groups.max()) + 1
    sizes = np.zeros((number, classes), int)
    np.add.at(sizes, (groups, labels), 1)
    total = sizes.sum(0)
    order = np.random.default_rng(seed).permutation(number)
    order = order[np.argsort(-sizes[order].sum(1), kind="stable")]
    held = np.zeros((folds, classes))
    chosen = np.zeros(number, int)
    for group in order:
        share = sizes[group] / total
        load = (held[:, share > 0] * share[share > 0]).sum(1)
        chosen[group] = np.lexsort((held.sum(1), load))[0]
        held[chosen[group]] += sizes[group]
    dealt: np.ndarray = chosen[groups]
    return dealt


def groups_per_class(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each class the number of groups that hold one of its images."""
    pairs = np.unique(np.stack([labels, groups]), axis=1)
    return np.bincount(pairs[0], minlength=int(labels.max()) + 1)


@dataclass(frozen=True)
class Splits:
    """Rounds of learning and testing, the same for every encoder."""

    rounds: tuple[Round, ...]
    seeds: int
    """Split seeds of cross-validation; 0 where the split is given."""
    folds: int
    independent: int
    """Groups among what is tested: no more images than these count as independent."""
    words: str

    @property
    def given(self) -> bool:
        return self.seeds == 0


def cross_validation(labels: np.ndarray, groups: np.ndarray, folds: int, seeds: int) -> Splits:
    """Stratified K-fold cross-validation over groups, with S split seeds.

    Fewer folds where a class has fewer groups. `labels` (N,) are numbers of classes.
    """
    folds = min(folds, int(groups_per_class(labels, groups).min()))
    rounds = []
    for seed in range(seeds):
        fold = deal(labels, groups, folds, seed)
        rounds += [(np.flatnonzero(fold != f), np.flatnonzero(fold == f)) for f in range(folds)]
    words = f"{folds}-fold cross-validation" + (f" with {seeds} split seeds" if seeds > 1 else "")
    return Splits(tuple(rounds), seeds, folds, int(groups.max()) + 1, words)


def given_split(is_test: np.ndarray, groups: np.ndarray) -> tuple[Splits, int]:
    """The split as given, without tested images that are learned from too; how many those are."""
    learned = np.isin(groups, groups[~is_test])
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test & ~learned)
    words = f"learned from {len(train):,} images, tested on {len(test):,} others"
    independent = len(np.unique(groups[test]))
    return Splits(((train, test),), 0, 1, independent, words), int((is_test & learned).sum())


def smallest_class(labels: np.ndarray, splits: Splits) -> int:
    """The images of the smallest class in what any round learns from."""
    classes = int(labels.max()) + 1
    counts = (np.bincount(labels[train], minlength=classes) for train, _ in splits.rounds)
    return min(int(count[count > 0].min()) for count in counts)


def neighbor_votes(
    learned: np.ndarray, labels: np.ndarray, tested: np.ndarray, k: int
) -> np.ndarray:
    """The class that the `k` nearest learned vectors by cosine vote for, (rows of `tested`,).

    Each votes with exp(cosine / TEMPERATURE).
    """
    learned, tested = unit_rows(learned), unit_rows(tested)
    classes = int(labels.max()) + 1
    step = max(1, ROWS_AT_ONCE // len(learned))
    said = []
    for start in range(0, len(tested), step):
        cosine = tested[start : start + step] @ learned.T
        nearest = np.argpartition(-cosine, k - 1, axis=1)[:, :k]
        near = np.take_along_axis(cosine, nearest, axis=1)
        weights = np.exp((near - near.max(1, keepdims=True)) / TEMPERATURE)
        votes = np.zeros((len(cosine), classes))
        np.add.at(votes, (np.arange(len(cosine))[:, None], labels[nearest]), weights)
        said.append(votes.argmax(1))
    return np.concatenate(said)


def linear_classes(
    learned: np.ndarray, labels: np.ndarray, tested: np.ndarray
) -> tuple[np.ndarray, bool]:
    """The classes by logistic regression (C = 1) on standardized vectors; whether it converged."""
    library = sklearn()
    model = library.pipeline.make_pipeline(
        library.preprocessing.StandardScaler(),
        library.linear_model.LogisticRegression(max_iter=1000),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(learned, labels)
    said: np.ndarray = model.predict(tested)
    return said, not any("converge" in str(w.message) for w in caught)


def ridge_values(learned: np.ndarray, targets: np.ndarray, tested: np.ndarray) -> np.ndarray:
    """Numbers by ridge regression on standardized vectors, its strength by leave-one-out."""
    library = sklearn()
    model = library.pipeline.make_pipeline(
        library.preprocessing.StandardScaler(), library.linear_model.RidgeCV(ALPHAS)
    )
    said: np.ndarray = model.fit(learned, targets).predict(tested)
    return said


@dataclass(frozen=True)
class Answers:
    """What one method said of what was tested, by round."""

    rounds: tuple[np.ndarray, ...]
    """Of each round whether each tested image was right, or its squared error in units of the
    variance of all targets."""
    said: tuple[np.ndarray, ...]
    converged: bool = True

    @property
    def means(self) -> np.ndarray:
        return np.array([values.mean() for values in self.rounds])

    @property
    def mean(self) -> float:
        return float(np.concatenate(self.rounds).mean())


def classify(
    vectors: np.ndarray, labels: np.ndarray, splits: Splits, k: int
) -> Iterator[tuple[str, Answers]]:
    """Nearest neighbors, then the linear probe, of vectors (N, D) on every round."""
    near = [neighbor_votes(vectors[a], labels[a], vectors[b], k) for a, b in splits.rounds]
    yield f"{k} nearest neighbors", _right(near, labels, splits)
    linear = [linear_classes(vectors[a], labels[a], vectors[b]) for a, b in splits.rounds]
    converged = all(fine for _, fine in linear)
    yield "linear probe", _right([said for said, _ in linear], labels, splits, converged)


def _right(
    said: Sequence[np.ndarray], labels: np.ndarray, splits: Splits, converged: bool = True
) -> Answers:
    right = tuple(
        (answers == labels[test]).astype(float)
        for answers, (_, test) in zip(said, splits.rounds, strict=True)
    )
    return Answers(right, tuple(said), converged)


def regress(vectors: np.ndarray, targets: np.ndarray, splits: Splits) -> Answers:
    """Ridge regression on every round, of the numbers over their range: no square overflows."""
    mean, size = targets.mean(), np.ptp(targets)
    scaled = (targets - mean) / size
    said = [ridge_values(vectors[a], scaled[a], vectors[b]) for a, b in splits.rounds]
    errors = [
        (answers - scaled[test]) ** 2 / scaled.var()
        for answers, (_, test) in zip(said, splits.rounds, strict=True)
    ]
    return Answers(tuple(errors), tuple(answers * size + mean for answers in said))


def corrected_variance(means: np.ndarray, splits: Splits) -> float:
    """Variance of the mean of J rounds: (1/J + tested / learned) s^2 (Nadeau and Bengio 2003).

    Rounds share what they learn from, so that s^2 / J alone is too small.
    """
    train, test = (np.mean([len(r[side]) for r in splits.rounds]) for side in (0, 1))
    return float((1 / len(means) + test / train) * means.var(ddof=1))


def accuracy_interval(answers: Answers, splits: Splits) -> tuple[float, float]:
    """The 95% interval of an accuracy.

    With a given split Wilson's interval over the tested images. Under cross-validation Wilson's
    with so many images as the corrected resampled variance leaves, at most those that a round
    learns from, and Student's quantile: without that bound 95% intervals of k-NN cover 92%.
    """
    p = answers.mean
    if splits.given:
        return wilson(p * splits.independent, splits.independent)
    variance = corrected_variance(answers.means, splits)
    images = splits.independent * (1 - 1 / splits.folds)
    if variance > 0 and 0 < p < 1:
        images = max(1.0, min(images, p * (1 - p) / variance))
    z = student_quantile(len(answers.rounds) - 1, CONFIDENCE)
    return wilson(p * images, images, z=z)


def mean_interval_of(answers: Answers, splits: Splits) -> tuple[float, float]:
    """The 95% interval of a mean without bounds, such as of an error."""
    if splits.given:
        (values,) = answers.rounds
        variance, freedom = values.var(ddof=1) / splits.independent, splits.independent - 1
    else:
        variance = corrected_variance(answers.means, splits)
        freedom = len(answers.rounds) - 1
    half = student_quantile(max(freedom, 1), CONFIDENCE) * math.sqrt(variance)
    return answers.mean - half, answers.mean + half


ALPHA = 1 - CONFIDENCE
TIMED_ROUNDS = 7
TIMED_BATCH = 8
CKA_IMAGES = 2048
"""CKA is computed on at most so many images: its Gram matrix has their square."""


def paired(best: Answers, other: Answers, splits: Splits, larger_is_better: bool) -> Difference:
    """How much better `best` is on the same images; `p_holm` is still that of one comparison.

    With a given split and right or wrong answers: McNemar's exact test, and the normal interval
    of the paired differences. Otherwise Student's t with the corrected resampled variance of the
    differences by round (Nadeau and Bengio 2003).
    """
    sign = 1.0 if larger_is_better else -1.0
    rounds = tuple(sign * (a - b) for a, b in zip(best.rounds, other.rounds, strict=True))
    first = np.concatenate(rounds[: splits.folds])  # each image once
    mean = float(np.concatenate(rounds).mean())
    wins, losses = int((first > 0).sum()), int((first < 0).sum())
    spread = float(first.var(ddof=1)) / splits.independent if len(first) > 1 else math.inf
    if splits.given:
        freedom, variance = splits.independent - 1, spread
    else:
        freedom = len(rounds) - 1
        means = np.array([values.mean() for values in rounds])
        variance = max(corrected_variance(means, splits), _within_seeds(rounds, splits))
    error = math.sqrt(variance)
    half = student_quantile(max(freedom, 1), CONFIDENCE) * error
    if splits.given and larger_is_better:
        test, p = "McNemar, exact", mcnemar(wins, losses)
    else:
        test = "paired t" if splits.given else "corrected resampled t"
        p = student_p(mean / error, freedom) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, p, test, wins, losses)


def _within_seeds(rounds: Sequence[np.ndarray], splits: Splits) -> float:
    """Variance of the mean difference as if rounds were independent: the least it can be."""
    values = np.concatenate(rounds)
    return float(values.var()) / splits.independent / max(splits.seeds, 1)


def nearest_rows(vectors: np.ndarray, k: int) -> np.ndarray:
    """(N, D) -> (N, k): the rows nearest to each by cosine, without itself."""
    rows = unit_rows(vectors.astype(np.float64))
    step = max(1, ROWS_AT_ONCE // len(rows))
    found = []
    for start in range(0, len(rows), step):
        cosine = rows[start : start + step] @ rows.T
        cosine[np.arange(len(cosine)), start + np.arange(len(cosine))] = -np.inf
        found.append(np.argpartition(-cosine, k - 1, axis=1)[:, :k])
    return np.concatenate(found)


def shared_neighbors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N, k) twice -> (N,): the share of each image's neighbors that both name.

    Mutual k-nearest-neighbor agreement (Huh et al. 2024, section 3).
    """
    both = [len(np.intersect1d(x, y)) for x, y in zip(a, b, strict=True)]
    shares: np.ndarray = np.array(both) / a.shape[1]
    return shares


def cka_matrix(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Unbiased linear CKA of all pairs of encoders on the same images."""
    grams = [centered_gram(torch.from_numpy(rows)) for rows in vectors]
    total = MinibatchCka()
    total.add(grams, grams, [len(vectors[0])])
    matrix: np.ndarray = total.value().numpy()
    return matrix
