"""Scores of one encoder, a ranking of several on the same splits, or their agreement."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitcli.commands.probe import evaluate
from vitcli.commands.probe.evaluate import Answers
from vitcli.commands.probe.labeled import Encoded, Images, ordered
from vitcli.commands.probe.result import (
    Agreement,
    AgreementResult,
    ClassScore,
    Confusion,
    Cost,
    Difference,
    ProbeResult,
    ProbeScore,
    Ranked,
    RankingResult,
    RegressionScore,
)
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.stats import CONFIDENCE, holm, mean_interval, too_few, wilson

FEW_IMAGES = 5000
"""Up to this number of images cross-validation has SEEDS split seeds, above it two."""
SEEDS = 5
MOST_PAIRS = 10


@dataclasses.dataclass
class Trial:
    """The images with labels, split once for all encoders."""

    folder: Path
    images: Images
    k: int = 20
    folds: int = 5
    seeds: int | None = None
    confusion: bool = False

    def __post_init__(self) -> None:
        images = self.images
        self.classes: list[str] = []
        self.numbers = np.zeros(len(images.names), int)
        if not images.regression:
            keep = self._testable()
            unlabelled = images.unlabelled + int((~keep).sum())
            images = dataclasses.replace(images.kept(keep), unlabelled=unlabelled)
            self.classes, self.numbers = ordered(images.labels)
        if len(images.names) < 4 or (not images.regression and len(self.classes) < 2):
            of = "groups" if images.groups is not None else "images"
            raise VitcliError(
                f"{printable(self.folder)}: too few classes with at least two different {of} (got "
                f"{len(self.classes)} classes, {len(images.names)} images; expected 2 classes)",
                "put a folder per class into it, each with different images",
            )
        self.images, self.left_out = images, 0
        vectors = [encoder.vectors for encoder in images.encoders]
        groups, same = evaluate.join_groups(vectors, images.groups), evaluate.join_groups(vectors)
        self.grouped = len(np.unique(groups))
        self.duplicates = int((np.bincount(same)[same] > 1).sum())
        if images.is_test is not None:
            self.splits, self.left_out = evaluate.given_split(images.is_test, groups)
            if images.tested:
                words = f"{self.splits.words} ({images.tested})"
                self.splits = dataclasses.replace(self.splits, words=words)
            if not len(self.splits.rounds[0][1]):
                raise VitcliError(
                    f"{printable(self.folder)}: no test image is of a class in train and "
                    "differs from all training images",
                    "check which images are in train and in test",
                )
        else:
            seeds = self.seeds or (SEEDS if len(images.names) <= FEW_IMAGES else 2)
            self.splits = evaluate.cross_validation(self.numbers, groups, self.folds, seeds)
            if self.splits.folds < 2:
                raise VitcliError(
                    f"{printable(self.folder)}: all images are in one group (expected at least 2)",
                    "leave out --groups",
                )
        self.tested = np.concatenate([test for _, test in self.splits.rounds])
        if not images.regression:
            smallest = evaluate.smallest_class(self.numbers, self.splits)
            self.k = max(1, min(self.k, smallest))

    def _testable(self) -> np.ndarray:
        """Whether each image is of a class that occurs in train, or that has two groups."""
        images = self.images
        classes, numbers = ordered(images.labels)
        if images.is_test is not None:
            fit = np.isin(np.arange(len(classes)), numbers[~images.is_test])
        else:
            groups = evaluate.join_groups([e.vectors for e in images.encoders], images.groups)
            fit = evaluate.groups_per_class(numbers, groups) > 1
        kept: np.ndarray = fit[numbers]
        return kept

    def _facts(self, answers: Answers) -> dict[str, Any]:
        """The fields of `Tested` but for the verdict; `answers` are the linear model's."""
        per_class, pairs, matrix = self._by_class(answers)
        largest, share = self._largest()
        return {
            "folder": str(self.folder),
            "images": len(self.images.names),
            "classes": tuple(self.classes),
            "protocol": self.splits.words,
            "largest_class": largest,
            "largest_share": share,
            "failed": self.images.failed,
            "unlabelled": self.images.unlabelled,
            "duplicates": self.duplicates,
            "left_out": self.left_out,
            "groups": self.grouped,
            "per_class": per_class,
            "confusions": pairs,
            "confusion_matrix": matrix,
        }

    def single(self) -> ProbeResult:
        (encoder,) = self.images.encoders
        scores, regression, answers = self._scores(encoder)
        code, words = self._verdict(scores, regression)
        return ProbeResult(
            **self._facts(answers),
            model=encoder.model,
            weights=encoder.weights,
            width=encoder.vectors.shape[1],
            scores=scores,
            regression=regression,
            verdict=words,
            verdict_code=code,
        )

    def _scores(
        self, encoder: Encoded
    ) -> tuple[tuple[ProbeScore, ...], RegressionScore | None, Answers]:
        """Scores of an encoder, and the answers of its linear model."""
        if self.images.regression:
            assert self.images.labels is not None
            targets = self.images.labels
            answers = evaluate.regress(encoder.vectors, targets, self.splits)
            low, high = evaluate.mean_interval_of(answers, self.splits)
            gaps = [
                np.abs(said - targets[test])
                for said, (_, test) in zip(answers.said, self.splits.rounds, strict=True)
            ]
            error = float(np.concatenate(gaps).mean())
            most = min(1 - low, 1.0)  # no squared error is below zero
            score = RegressionScore("ridge", 1 - answers.mean, 1 - high, most, error)
            return (), score, answers
        found = dict(evaluate.classify(encoder.vectors, self.numbers, self.splits, self.k))
        scores = []
        for method, answers in found.items():
            right, tested = int(sum(r.sum() for r in answers.rounds)), len(self.tested)
            low, high = evaluate.accuracy_interval(answers, self.splits)
            scores.append(
                ProbeScore(method, right, tested, right / tested, low, high, answers.converged)
            )
        return tuple(scores), None, answers

    def _largest(self) -> tuple[str, float]:
        """The largest class among those tested, and its share."""
        if self.images.regression:
            return "", 0.0
        counts = np.bincount(self.numbers[self.tested], minlength=len(self.classes))
        return self.classes[int(counts.argmax())], float(counts.max() / counts.sum())

    def _by_class(
        self, answers: Answers
    ) -> tuple[tuple[ClassScore, ...], tuple[Confusion, ...], tuple[tuple[int, ...], ...]]:
        """Each class, pairs of classes that are confused, and the matrix if it is asked for."""
        if self.images.regression:
            return (), (), ()
        count = len(self.classes)
        matrix = np.zeros((count, count), int)  # [is, said]
        once = slice(self.splits.folds)
        for (_, test), said in zip(self.splits.rounds[once], answers.said[once], strict=True):
            np.add.at(matrix, (self.numbers[test], said), 1)
        tested = matrix.sum(1)
        scores = [
            ClassScore(name, int(right), int(n), right / n, *wilson(int(right), int(n)))
            for name, right, n in zip(self.classes, matrix.diagonal(), tested, strict=True)
            if n
        ]
        wrong = matrix - np.diag(matrix.diagonal())
        pairs = [
            Confusion(self.classes[i], self.classes[j], int(wrong[i, j]), wrong[i, j] / tested[i])
            for i, j in np.argwhere(wrong)
        ]
        pairs.sort(key=lambda pair: (-pair.count, -pair.share))
        whole = tuple(tuple(row) for row in matrix.tolist()) if self.confusion else ()
        return (
            tuple(sorted(scores, key=lambda score: score.accuracy)),
            tuple(pairs[:MOST_PAIRS]),
            whole,
        )

    def _verdict(
        self, scores: Sequence[ProbeScore], regression: RegressionScore | None
    ) -> tuple[str, str]:
        on = f"on {len(self.images.names):,} images"
        if regression is not None:
            words = f"R² {regression.r2:.3f} [{regression.low:.3f}, {regression.high:.3f}] {on}"
            if regression.low > 0:
                return "better", words
            return _unproven([regression.r2], [regression.high], 0.0, "the mean", words)
        name, share = self._largest()
        facts = ", ".join(
            f"{s.method} {s.accuracy:.1%} [{s.low:.1%}, {s.high:.1%}]" for s in reversed(scores)
        )
        always = f"always predicting {name!r} is right for {share:.1%}"
        of = f"{on} of {len(self.classes):,} classes"
        if any(score.low > share for score in scores):
            return "better", f"{facts} {of}; {always}"
        values, highs = [s.accuracy for s in scores], [s.high for s in scores]
        return _unproven(values, highs, share, f"{name!r} ({share:.1%})", f"{facts} {of}")

    def ranking(self, cost: Sequence[Cost]) -> RankingResult:
        """All encoders, best first by the linear probe, and differences to the best."""
        found = []
        for place, encoder in enumerate(self.images.encoders):
            found.append((encoder, *self._scores(encoder), cost[place] if cost else None))
        # A stable sort: of equal ones the first named comes first.
        sign = -1.0 if self.images.regression else 1.0
        found.sort(key=lambda item: -sign * item[3].mean)
        best = found[0][3]
        gaps = [
            evaluate.paired(best, item[3], self.splits, not self.images.regression)
            for item in found[1:]
        ]
        adjusted = holm([gap.p for gap in gaps])
        differences = [None] + [
            dataclasses.replace(gap, p_holm=p) for gap, p in zip(gaps, adjusted, strict=True)
        ]
        names = encoder_names([item[0] for item in found])
        ranked = tuple(
            Ranked(
                **_row(name, encoder),
                scores=scores,
                regression=regression,
                difference=difference,
                cost=one,
            )
            for name, (encoder, scores, regression, _, one), difference in zip(
                names, found, differences, strict=True
            )
        )
        code, words = self._ranking_verdict(ranked)
        timing = (
            f"images per second: median of {evaluate.TIMED_ROUNDS} passes of "
            f"{evaluate.TIMED_BATCH} images, encoders alternately; 100,000 images: the slower of "
            "the encoder and of decoding on all cores"
        )
        return RankingResult(
            **self._facts(best),
            ranked=ranked,
            timing=timing if cost else "",
            verdict=words,
            verdict_code=code,
        )

    def _ranking_verdict(self, ranked: Sequence[Ranked]) -> tuple[str, str]:
        best, images = ranked[0], f"on these {len(self.images.names):,} images"
        code, words = self._verdict(best.scores, best.regression)
        if code != "better":
            return code, f"the best one, {best.name}, is {words}"
        gaps = [(one, one.difference) for one in ranked[1:] if one.difference]
        tied = [one.name for one, gap in gaps if gap.p_holm >= evaluate.ALPHA]
        if tied:
            return "cannot be distinguished", (
                f"{' and '.join([best.name, *tied])} do not differ significantly {images}; "
                f"{best.name}: {words}"
            )
        second = f", {self._gap(gaps[0][1])} above {gaps[0][0].name}" if gaps else ""
        return "one best", f"{best.name} is best{second} {images}: {words}"

    def _gap(self, gap: Difference) -> str:
        if self.images.regression:
            return f"{gap.accuracy:.3f} [{gap.low:.3f}, {gap.high:.3f}] of R²"
        return f"{100 * gap.accuracy:.1f} points [{100 * gap.low:.1f}, {100 * gap.high:.1f}]"


def _unproven(
    values: Sequence[float], highs: Sequence[float], chance: float, always: str, facts: str
) -> tuple[str, str]:
    """The verdict where no interval is above what is right without looking."""
    if any(too_few(value, high, chance) for value, high in zip(values, highs, strict=True)):
        words = f"tested on too few images to tell it from always predicting {always}"
        return "too few images", f"{words}: {facts}"
    return "no better", f"no better than always predicting {always}: {facts}"


def encoder_names(encoders: Sequence[Encoded]) -> list[str]:
    """Short names that differ: of models, else with their weights, or registers; and of layers."""
    kinds = {(e.model, e.weights, e.registers) for e in encoders}
    models = Counter(model for model, *_ in kinds)
    weights = Counter(kind[:2] for kind in kinds)

    def name(e: Encoded) -> str:
        if models[e.model] == 1:
            return e.model
        registers = f", registers {e.registers}" * (weights[e.model, e.weights] > 1)
        return f"{e.model}{registers} ({e.weights})"

    if all(e.layer is not None for e in encoders):
        return [f"{f'{name(e)} ' * (len(kinds) > 1)}layer {e.layer}" for e in encoders]
    return [name(e) for e in encoders]


def _row(name: str, encoder: Encoded) -> dict[str, Any]:
    """The fields of `result.Encoder`."""
    return {
        "name": name,
        "model": encoder.model,
        "weights": encoder.weights,
        "layer": encoder.layer,
        "width": encoder.vectors.shape[1],
        "vectors": encoder.kept,
    }


def agreement(folder: Path, images: Images, k: int) -> AgreementResult:
    """Rank encoders by their agreement with each other about nearest neighbors."""
    if len(images.encoders) < 2:
        raise VitcliError(
            f"{printable(folder)}: agreement needs at least 2 encoders or layers (got 1)",
            "name two encoders by --weights and --preset, or add --layers all",
        )
    count, number = len(images.encoders), len(images.names)
    k = min(k, number - 2)
    if k < 1:
        raise VitcliError(
            f"{printable(folder)}: too few images (got {number}, expected at least 3)",
            "add images to the folder",
        )
    nearest = [evaluate.nearest_rows(encoder.vectors, k) for encoder in images.encoders]
    shared = np.ones((count, count, number))
    for i in range(count):
        for j in range(i):
            shared[i, j] = shared[j, i] = evaluate.shared_neighbors(nearest[i], nearest[j])
    chosen = np.random.default_rng(0).permutation(number)[: evaluate.CKA_IMAGES]
    cka = evaluate.cka_matrix([encoder.vectors[chosen] for encoder in images.encoders])
    others = ~np.eye(count, dtype=bool)
    by_image = np.stack([shared[i][others[i]].mean(0) for i in range(count)])  # (E, N)
    order = np.argsort(-by_image.mean(1), kind="stable")
    names = encoder_names(images.encoders)
    ranked = []
    for i in order:
        mean, low, high = mean_interval(by_image[i].tolist())
        ranked.append(
            Agreement(
                **_row(names[i], images.encoders[i]),
                neighbors=mean,
                low=max(low, 0.0),
                high=min(high, 1.0),
                cka=float(cka[i][others[i]].mean()),
            )
        )
    first, rest = order[0], order[1:]
    confidence = 1 - (1 - CONFIDENCE) / len(rest)
    tied = [
        names[i]
        for i in rest
        if not mean_interval((by_image[first] - by_image[i]).tolist(), confidence)[1] > 0
    ]
    caution = "this is agreement about nearest neighbors, not accuracy"
    if tied:
        code = "cannot be distinguished"
        words = (
            f"{' and '.join([names[first], *tied])} do not differ significantly in their "
            f"agreement with other encoders; {caution}"
        )
    else:
        code = "most agreement"
        words = (
            f"{names[first]} agrees most with the other encoders on {number:,} images; {caution}"
        )
    return AgreementResult(
        folder=str(folder),
        images=number,
        k=k,
        failed=images.failed,
        ranked=tuple(ranked),
        neighbors=_matrix(shared.mean(2), order),
        cka=_matrix(cka, order),
        cka_images=len(chosen),
        verdict=words,
        verdict_code=code,
    )


def _matrix(values: np.ndarray, order: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values[np.ix_(order, order)].tolist())
