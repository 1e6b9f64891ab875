"""How well classes or numbers are predicted from vectors of one encoder, or of several."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitcli.commands.embed.analysis import embed
from vitcli.commands.embed.job import MANIFEST, remembered
from vitcli.commands.probe import evaluate
from vitcli.commands.probe import evaluate as ranking
from vitcli.commands.probe.evaluate import Answers
from vitcli.commands.probe.labeled import (
    Encoded,
    Images,
    layer_numbers,
    ordered,
    published_set,
    read_vectors,
    shard_labels,
    with_classes,
    with_groups,
    with_targets,
)
from vitcli.commands.probe.result import (
    Agreement,
    AgreementResult,
    ClassScore,
    Confusion,
    Cost,
    ProbeResult,
    ProbeScore,
    Ranked,
    RankingResult,
    RegressionScore,
)
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.decode import decode
from vitcli.images.folders import read_folder
from vitcli.images.preprocess import preprocess
from vitcli.images.sources import recognized
from vitcli.loading import as_model
from vitcli.measures import CONFIDENCE, Plane, evenly, holm, mean_interval, plane, too_few, wilson
from vitcli.model import Model
from vitcli.results import QUIET, Progress

Source = Model | str | os.PathLike[str]

FEW_IMAGES = 5000
"""Up to this number of images cross-validation has SEEDS split seeds, above it two."""
SEEDS = 5
MOST_PAIRS = 10


def probe(
    folder: str | os.PathLike[str],
    model: Source | Iterable[Source] | None = None,
    *,
    k: int = 20,
    folds: int = 5,
    seeds: int | None = None,
    layers: str | None = None,
    groups: str | None = None,
    targets: str | os.PathLike[str] | None = None,
    unlabeled: bool = False,
    confusion: bool = False,
    projection: str | None = None,
    limit: int | None = None,
    out: str | os.PathLike[str] | None = None,
    tokens: str = "pooled",
    workers: int | None = None,
    progress: Progress = QUIET,
) -> ProbeResult | RankingResult | AgreementResult:
    """Accuracy of nearest neighbors and of a linear probe on vectors of labeled images.

    Several encoders or layers are ranked, with paired differences on the same images.

    Neighbors: each of the `k` nearest by cosine votes with exp(cosine / 0.07) (Caron et al. 2021);
    k is at most the number of training images of the smallest class. Linear: logistic regression
    (C = 1) on standardized vectors; ridge regression for numbers. Images with identical vectors,
    or of one group, stay on one side of every split.

    Args:
        folder: vectors that `vitcli embed` wrote, a folder per class, or a published set's files.
        model: for images, one encoder or several: a model or what `vitcli.load` takes.
        folds, seeds: of cross-validation, if the folders give no split.
        layers: `all` or numbers with commas, of the layers that the vectors hold.
        groups: `parent` or a CSV of path and group.
        targets: a CSV of path and number, to predict numbers instead of classes.
        unlabeled: rank by agreement about nearest neighbors; this is not accuracy.
        confusion: put the whole confusion matrix into the result.
        projection: pca or umap: put the vectors of the best encoder into the result, in two
            dimensions.
        limit: images of each half of a published set.
        out: folder in which to keep the vectors of images.
        progress: called with the images encoded; its `line` with each note.

    Raises:
        VitcliError: no classes, too few images, or scikit-learn is missing.
    """
    folder = Path(folder)
    single = model is None or isinstance(model, Model | str | os.PathLike)
    sources: list[Source] = [] if model is None else [model] if single else list(model)  # type: ignore[arg-type, list-item]
    evaluate.sklearn()  # an error before hours of encoding
    models = [as_model(source, by_library=True) for source in sources]
    with contextlib.ExitStack() as stack:
        labeled = not unlabeled and targets is None
        images = _encoded(
            folder, models, labeled, layers, limit, out, tokens, workers, progress, stack
        )
        if len(models) > 1:
            progress.line(f"timing {len(models)} encoders alternately, then comparing them")
        cost = _costs(models, folder) if len(models) > 1 else []
        if labeled and images.labels is None:
            images = with_classes(images, shard_labels(images))  # while the vectors are there
    if len(models) == 1 and out is None:  # the folder of the vectors is gone
        gone = tuple(dataclasses.replace(encoder, kept="") for encoder in images.encoders)
        images = dataclasses.replace(images, encoders=gone)
    if targets is not None:
        images = with_targets(images, Path(targets))
    result: ProbeResult | RankingResult | AgreementResult
    if unlabeled:
        result = agreement(folder, images, k)
    else:
        trial = Trial(folder, with_groups(images, groups), k, folds, seeds, confusion)
        single = len(images.encoders) == 1 and layers is None
        result = trial.single() if single else trial.ranking(cost)
    if projection is None:
        return result
    best = "" if isinstance(result, ProbeResult) else result.ranked[0].name
    return dataclasses.replace(result, plane=_in_plane(images, best, projection))


def _in_plane(images: Images, best: str, by: str) -> Plane:
    """The vectors of the encoder or layer of this name, of the first without one."""
    names = _names(images.encoders)
    encoder = images.encoders[names.index(best) if best else 0]
    rows = evenly(len(images.names))
    labels = [None] * len(rows) if images.labels is None else images.labels[rows].tolist()
    layer = "" if encoder.layer is None else f", layer {encoder.layer}"
    return plane(
        encoder.vectors[rows],
        [images.names[row] for row in rows],
        labels,
        by=by,
        images=len(images.names),
        model=encoder.model + layer,
        weights=encoder.weights,
    )


def _encoded(
    folder: Path,
    models: Sequence[Model],
    labeled: bool,
    layers: str | None,
    limit: int | None,
    out: str | os.PathLike[str] | None,
    tokens: str,
    workers: int | None,
    progress: Progress,
    stack: contextlib.ExitStack,
) -> Images:
    """The vectors in a folder, or those of each model on the images in it."""
    if (folder / MANIFEST).is_file():
        if models:
            raise VitcliError(
                f"{printable(folder)}: holds vectors already (a model is only for images)",
                f"vitcli probe {folder}",
            )
        return read_vectors([folder], layers)
    if not models:
        raise VitcliError(
            f"{printable(folder)}: does not hold vectors of `vitcli embed`",
            "add --weights SOURCE or --preset NAME to encode its images",
        )
    if recognized(folder) != "folder":
        return published_set(models, folder, tokens, limit, progress)
    if limit is not None:
        raise VitcliError(
            "--limit: is for the files of a published set (got a folder)", "leave out --limit"
        )
    found = read_folder(folder)
    for line in found.lines():
        progress.line(line)
    if labeled and len(found.classes) < 2:
        raise VitcliError(
            f"{printable(folder)}: too few classes (got {len(found.classes)} folders with images, "
            "expected at least 2)",
            "put the images of each class into a folder of their own",
        )
    places = [
        _place(folder, one, number, len(models), tokens, layers, out, stack)
        for number, one in enumerate(models, start=1)
    ]
    if len(models) > 1:
        progress.line(f"vectors are kept in {printable(places[0].parent)}")
    for number, (one, place) in enumerate(zip(models, places, strict=True)):
        joint = _Joint(progress, number, len(models))
        _embed(one, folder, place, tokens, layers, workers, joint)
    return read_vectors(places, layers)


@dataclasses.dataclass(frozen=True)
class _Joint:
    """One encoder's progress as a share of that of all."""

    progress: Progress
    before: int
    models: int

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        self.progress(self.before * total + done, self.models * total, facts)

    def line(self, text: str) -> None:
        """Notes on the images are the same for every encoder."""


def _place(
    folder: Path,
    model: Model,
    number: int,
    models: int,
    tokens: str,
    layers: str | None,
    out: str | os.PathLike[str] | None,
    stack: contextlib.ExitStack,
) -> Path:
    """Where a model's vectors go: `out`, or for several models a folder of each in the cache."""
    if models == 1:
        if out is not None:
            return Path(out)
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vitcli-")))
    asked = remembered(model.request) if model.request else {"id": id(model)}
    what = {"request": asked, "tokens": tokens, "layers": layers}
    name = f"{model.name}-{_digest(what)}".replace(os.sep, "-")
    if out is not None:
        parent = Path(out)
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        parent = cache / "vitcli" / "probe" / _digest(list(_state(folder)))
    (parent / name).mkdir(parents=True, exist_ok=True)
    return parent / name


def _embed(
    model: Model,
    folder: Path,
    place: Path,
    tokens: str,
    layers: str | None,
    workers: int | None,
    progress: Progress,
) -> None:
    """Turn the images into vectors; what an earlier run had finished is not done again."""
    depth = model.config.encoder.depth
    numbers = range(depth + 1) if layers == "all" else layer_numbers(layers) if layers else ()
    embed(
        model,
        folder,
        place,
        tokens=tokens,
        layers=numbers,
        format="npy" if not layers else "safetensors",
        workers=workers,
        progress=progress,
    )


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _state(folder: Path) -> Iterator[Any]:
    """What a folder holds: names, sizes and times, so that a changed folder is another one."""
    yield str(folder.resolve())
    for path, _, files in sorted(os.walk(folder)):
        for name in sorted(files):
            with contextlib.suppress(OSError):
                status = os.stat(os.path.join(path, name))  # noqa: PTH116, PTH118 (any bytes)
                yield [path, name, status.st_size, status.st_mtime_ns]


def _costs(models: Sequence[Model], folder: Path) -> list[Cost]:
    suffixes = (".jpg", ".jpeg", ".png", ".webp")
    files = [str(p) for p in sorted(folder.rglob("*")) if p.suffix.lower() in suffixes][:200]

    def read(path: str) -> object:
        return preprocess(decode(path).image, models[0].preprocessing)

    return ranking.costs(models, lambda: ranking.decode_seconds(read, files))


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
        groups = self._groups(images)
        if not images.regression:
            assert images.labels is not None
            keep = self._testable(images, groups)
            images = dataclasses.replace(
                images.kept(keep), unlabelled=images.unlabelled + int((~keep).sum())
            )
            assert images.labels is not None
            self.classes, self.numbers = ordered(images.labels)
            groups = self._groups(images)
        if len(images.names) < 4 or (not images.regression and len(self.classes) < 2):
            of = "groups" if images.groups is not None else "images"
            raise VitcliError(
                f"{printable(self.folder)}: too few classes with at least two different {of} (got "
                f"{len(self.classes)} classes, {len(images.names)} images; expected 2 classes)",
                "put a folder per class into it, each with different images",
            )
        self.images, self.left_out = images, 0
        self.grouped = len(np.unique(groups))
        vectors = [encoder.vectors for encoder in images.encoders]
        same = evaluate.join_groups(vectors)
        self.duplicates = int((np.bincount(same)[same] > 1).sum())
        if images.is_test is not None:
            self.splits, self.left_out = evaluate.given_split(images.is_test, groups)
            if not len(self.splits.rounds[0][1]):
                raise VitcliError(
                    f"{printable(self.folder)}: no test image is of a class in train and "
                    "differs from "
                    "all training images",
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

    def _groups(self, images: Images) -> np.ndarray:
        vectors = [encoder.vectors for encoder in images.encoders]
        return evaluate.join_groups(vectors, images.groups)

    def _testable(self, images: Images, groups: np.ndarray) -> np.ndarray:
        """Images of classes that occur in train, or that have two groups."""
        assert images.labels is not None
        classes, numbers = ordered(images.labels)
        if images.is_test is not None:
            learned = np.isin(np.arange(len(classes)), numbers[~images.is_test])
            return np.asarray(learned[numbers])
        return np.asarray((evaluate.groups_per_class(numbers, groups) > 1)[numbers])

    def single(self) -> ProbeResult:
        (encoder,) = self.images.encoders
        scores, regression, answers = self._scores(encoder)
        per_class, pairs, matrix = self._by_class(answers)
        name, share = self._largest()
        code, words = self._verdict(scores, regression)
        return ProbeResult(
            folder=str(self.folder),
            model=encoder.model,
            weights=encoder.weights,
            width=encoder.vectors.shape[1],
            images=len(self.images.names),
            classes=tuple(self.classes),
            protocol=self.splits.words,
            largest_share=share,
            failed=self.images.failed,
            unlabelled=self.images.unlabelled,
            scores=scores,
            verdict=words,
            verdict_code=code,
            largest_class=name,
            duplicates=self.duplicates,
            left_out=self.left_out,
            groups=self.grouped,
            per_class=per_class,
            confusions=pairs,
            regression=regression,
            confusion_matrix=matrix,
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
            score = RegressionScore("ridge", 1 - answers.mean, 1 - high, 1 - low, error)
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
            ranking.paired(best, item[3], self.splits, not self.images.regression)
            for item in found[1:]
        ]
        adjusted = holm([gap.p for gap in gaps])
        differences = [None] + [
            dataclasses.replace(gap, p_holm=p) for gap, p in zip(gaps, adjusted, strict=True)
        ]
        names = _names([item[0] for item in found])
        ranked = tuple(
            Ranked(
                name=name,
                model=encoder.model,
                weights=encoder.weights,
                layer=encoder.layer,
                width=encoder.vectors.shape[1],
                vectors=encoder.kept,
                scores=scores,
                regression=regression,
                difference=difference,
                cost=one,
            )
            for name, (encoder, scores, regression, _, one), difference in zip(
                names, found, differences, strict=True
            )
        )
        per_class, pairs, matrix = self._by_class(best)
        largest, share = self._largest()
        code, words = self._ranking_verdict(ranked)
        timing = (
            f"images per second: median of {ranking.TIMED_ROUNDS} passes of "
            f"{ranking.TIMED_BATCH} images, encoders alternately; 100,000 images: the slower of "
            "the encoder and of decoding on all cores"
        )
        return RankingResult(
            folder=str(self.folder),
            images=len(self.images.names),
            classes=tuple(self.classes),
            protocol=self.splits.words,
            largest_class=largest,
            largest_share=share,
            failed=self.images.failed,
            unlabelled=self.images.unlabelled,
            duplicates=self.duplicates,
            left_out=self.left_out,
            groups=self.grouped,
            ranked=ranked,
            per_class=per_class,
            confusions=pairs,
            timing=timing if cost else "",
            verdict=words,
            verdict_code=code,
            confusion_matrix=matrix,
        )

    def _ranking_verdict(self, ranked: Sequence[Ranked]) -> tuple[str, str]:
        best, images = ranked[0], f"on these {len(self.images.names):,} images"
        code, words = self._verdict(best.scores, best.regression)
        if code != "better":
            return code, f"the best one, {best.name}, is {words}"
        gaps = [(one, one.difference) for one in ranked[1:] if one.difference]
        tied = [one.name for one, gap in gaps if gap.p_holm >= ranking.ALPHA]
        if tied:
            return "cannot be distinguished", (
                f"{' and '.join([best.name, *tied])} do not differ significantly {images}; "
                f"{best.name}: {words}"
            )
        second = (
            f", {_gap(gaps[0][1], self.images.regression)} above {gaps[0][0].name}" if gaps else ""
        )
        return "one best", f"{best.name} is best{second} {images}: {words}"


def _unproven(
    values: Sequence[float], highs: Sequence[float], chance: float, always: str, facts: str
) -> tuple[str, str]:
    """The verdict where no interval is above what is right without looking."""
    if any(too_few(value, high, chance) for value, high in zip(values, highs, strict=True)):
        words = f"tested on too few images to tell it from always predicting {always}"
        return "too few images", f"{words}: {facts}"
    return "no better", f"no better than always predicting {always}: {facts}"


def _gap(gap: Any, regression: bool) -> str:
    if regression:
        return f"{gap.accuracy:.3f} [{gap.low:.3f}, {gap.high:.3f}] of R²"
    return f"{100 * gap.accuracy:.1f} points [{100 * gap.low:.1f}, {100 * gap.high:.1f}]"


def _names(encoders: Sequence[Encoded]) -> list[str]:
    """Short names that differ: of layers, of models, else with their weights, or registers."""
    if all(encoder.layer is not None for encoder in encoders):
        several = len({(e.model, e.weights) for e in encoders}) > 1
        return [f"{f'{e.model} ' * several}layer {e.layer}" for e in encoders]
    counts = Counter(encoder.model for encoder in encoders)
    names = [e.model if counts[e.model] == 1 else f"{e.model} ({e.weights})" for e in encoders]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{e.model}, registers {e.registers} ({e.weights})"
        for name, e in zip(names, encoders, strict=True)
    ]


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
    nearest = [ranking.nearest_rows(encoder.vectors, k) for encoder in images.encoders]
    shared = np.ones((count, count, number))
    for i in range(count):
        for j in range(i):
            shared[i, j] = shared[j, i] = ranking.shared_neighbors(nearest[i], nearest[j])
    chosen = np.random.default_rng(0).permutation(number)[: ranking.CKA_IMAGES]
    cka = ranking.cka_matrix([encoder.vectors[chosen] for encoder in images.encoders])
    others = ~np.eye(count, dtype=bool)
    by_image = np.stack([shared[i][others[i]].mean(0) for i in range(count)])  # (E, N)
    order = np.argsort(-by_image.mean(1), kind="stable")
    names = _names(images.encoders)
    ranked = []
    for i in order:
        mean, low, high = mean_interval(by_image[i].tolist())
        encoder = images.encoders[i]
        ranked.append(
            Agreement(
                name=names[i],
                model=encoder.model,
                weights=encoder.weights,
                layer=encoder.layer,
                width=encoder.vectors.shape[1],
                vectors=encoder.kept,
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
