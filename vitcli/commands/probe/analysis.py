"""Is an encoder any good on these images: nearest neighbors and a linear probe on its vectors."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitcli.commands.embed.analysis import Watch, encode_folder
from vitcli.commands.embed.encoder import checked
from vitcli.commands.embed.inputs import Listing
from vitcli.commands.embed.job import iterate_parts, load_manifest
from vitcli.commands.embed.result import FolderOptions
from vitcli.commands.encode.analysis import select_tokens
from vitcli.commands.probe.result import ProbeResult, ProbeScore
from vitcli.commands.train.datasets import Items, find_sets, recognized
from vitcli.config.request import ModelRequest
from vitcli.config.training import ImagesData
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.preprocess import preprocess
from vitcli.measures import wilson
from vitcli.model import Model

SPLITS = ("train", "val", "valid", "validation", "test")
_BATCH = 16
_SEED = 0


@dataclass
class Labeled:
    """Vectors (N, W) with a class each, and which of them are for testing, if that is given."""

    model: str
    weights: str
    vectors: np.ndarray
    labels: np.ndarray
    is_test: np.ndarray | None
    failed: int = 0
    unlabelled: int = 0


def from_vectors(folder: Path) -> Labeled:
    """Vectors that `vitcli encode` wrote; the class is the first folder that paths do not share.

    Below `train` with one of `val`, `valid`, `validation`, `test` beside it, it is the second, and
    `train` is what is learned from.

    Raises:
        VitcliError: no vectors there, or parts are missing.
    """
    settings = load_manifest(folder)["settings"]
    names: list[list[str]] = []
    arrays: list[np.ndarray] = []
    failed = 0
    for part in iterate_parts(folder):
        good = part.good
        failed += int((~good).sum())
        names += [name.split("/")[:-1] for name, ok in zip(part.names, good, strict=True) if ok]
        arrays.append(part.arrays["vector"][good].astype(np.float32))
    names = _unshared(names)
    tops = {folders[0] for folders in names if folders}
    split = "train" in tops and len(tops) > 1 and tops <= set(SPLITS)
    depth = 1 if split else 0
    kept = np.array([len(folders) > depth for folders in names], dtype=bool)
    labels = [folders[depth] for folders in names if len(folders) > depth]
    is_test = [folders[0] != "train" for folders in names if len(folders) > depth]
    return Labeled(
        settings["model"],
        settings["weights"],
        np.concatenate(arrays)[kept],
        np.array([printable(label) for label in labels], dtype=object),
        np.array(is_test) if split else None,
        failed,
        int((~kept).sum()),
    )


def _unshared(names: list[list[str]]) -> list[list[str]]:
    """Folders of paths without those that all begin with; as they are if all are the same."""
    first, last = min(names, default=[]), max(names, default=[])
    parting = (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    shared = next(parting, min(len(first), len(last))) if first != last else 0
    return [folders[shared:] for folders in names]


def from_images(
    request: ModelRequest,
    model: Model,
    folder: Path,
    out: Path | None,
    options: FolderOptions,
    watch: Watch,
    limit: int | None = None,
) -> Labeled:
    """Encode folders of classes (into `out`, where it is kept), or a published set's files.

    `limit` takes that many images of each half of a published set, drawn at random.

    Raises:
        VitcliError: nothing there to tell classes by, or scikit-learn is missing.
    """
    checked(model, options)
    _sklearn()  # told before hours of encoding
    if recognized(folder) != "folder":
        train, test, classes = find_sets(folder, ImagesData(), _SEED)
        halves = [_drawn(train, limit), _drawn(test, limit)]
        total = sum(len(places) for _, places in halves)
        vectors, labels = [], []
        for items, places in halves:
            for start in range(0, len(places), _BATCH):
                group = [items[int(place)] for place in places[start : start + _BATCH]]
                vectors.append(_encoded(model, [image for image, _ in group], options.kind))
                labels += [classes[label] for _, label in group]
                watch(len(labels), total, Counter())
        is_test = np.arange(total) >= len(halves[0][1])
        stacked = np.concatenate(vectors)
        return Labeled(model.name, model.weights, stacked, np.array(labels, object), is_test)
    if limit is not None:
        raise VitcliError("--limit is for a published set's files", "leave out --limit")
    if not any(child.is_dir() for child in folder.iterdir()):
        raise VitcliError(
            f"{folder}: no folders in there, so no classes",
            "a folder for each class, with images in them",
        )
    with contextlib.ExitStack() as stack:
        kept = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vitcli-")))
        encode_folder(request, model, Listing((str(folder),)), kept, options, watch)
        return from_vectors(kept)


def _drawn(items: Items, limit: int | None) -> tuple[Items, np.ndarray]:
    order = np.random.default_rng(_SEED).permutation(len(items))
    return items, np.sort(order[:limit])


def _encoded(model: Model, pictures: Sequence[Any], kind: str) -> np.ndarray:
    pixels = [preprocess(picture.convert("RGB"), model.preprocessing) for picture in pictures]
    batch = torch.from_numpy(np.stack(pixels)).to(model.device, model.dtype)
    with torch.inference_mode():
        return select_tokens(model, model.encoder(batch), kind).astype(np.float32)


def probe(folder: Path, data: Labeled, k: int = 20, folds: int = 5) -> ProbeResult:
    """Accuracy of nearest neighbors and of a linear classifier, both from scikit-learn.

    Neighbors: majority of the `k` nearest by cosine, or of all where there are fewer. Linear:
    logistic regression (C = 1) on standardized vectors. What is tested is never learned from: the
    given split, or each image once in stratified cross-validation, with fewer folds where a class
    has fewer images. The interval is Wilson's for as many independent trials as images tested
    (Wilson 1927).

    Raises:
        VitcliError: fewer than two classes of two images, or scikit-learn is missing.
    """
    sklearn = _sklearn()
    counts = Counter(data.labels)
    keep = np.array([counts[label] > 1 for label in data.labels], dtype=bool)
    if data.is_test is not None:
        keep = np.isin(data.labels, np.unique(data.labels[~data.is_test].astype(str)))
    vectors, labels = data.vectors[keep], data.labels[keep].astype(str)
    classes, numbers = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise VitcliError(
            f"{printable(folder)}: {len(classes)} classes of at least two images",
            "a folder for each class, with images in them",
        )
    rounds, protocol = _rounds(sklearn, numbers, data, keep, folds)
    tested = np.concatenate([test for _, test in rounds])
    scores = []
    for method, make in _methods(sklearn, min(k, *(len(train) for train, _ in rounds))).items():
        right, converged = 0, True
        for train, test in rounds:
            classifier = make()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                classifier.fit(vectors[train], numbers[train])
            converged &= not any("converge" in str(w.message) for w in caught)
            right += int((classifier.predict(vectors[test]) == numbers[test]).sum())
        low, high = wilson(right, len(tested))
        scores.append(
            ProbeScore(method, right, len(tested), right / len(tested), low, high, converged)
        )
    return ProbeResult(
        folder=str(folder),
        model=data.model,
        weights=data.weights,
        width=vectors.shape[1],
        images=len(vectors),
        classes=tuple(classes.tolist()),
        protocol=protocol,
        largest_share=float(np.bincount(numbers[tested]).max() / len(tested)),
        failed=data.failed,
        unlabelled=data.unlabelled + int((~keep).sum()),
        scores=tuple(scores),
    )


def _rounds(
    sklearn: Any, numbers: np.ndarray, data: Labeled, keep: np.ndarray, folds: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], str]:
    if data.is_test is not None:
        test = data.is_test[keep]
        train_rows, test_rows = np.flatnonzero(~test), np.flatnonzero(test)
        if not len(test_rows):
            raise VitcliError("no class of the test images is among those to learn from")
        protocol = f"learned from {len(train_rows):,} images, tested on {len(test_rows):,} others"
        return [(train_rows, test_rows)], protocol
    folds = min(folds, int(np.bincount(numbers).min()))
    splitter = sklearn.model_selection.StratifiedKFold(folds, shuffle=True, random_state=_SEED)
    return list(splitter.split(numbers, numbers)), f"{folds}-fold cross-validation"


def _methods(sklearn: Any, k: int) -> dict[str, Any]:
    def neighbors() -> Any:
        return sklearn.neighbors.KNeighborsClassifier(k, metric="cosine")

    def linear() -> Any:
        return sklearn.pipeline.make_pipeline(
            sklearn.preprocessing.StandardScaler(),
            sklearn.linear_model.LogisticRegression(max_iter=1000),
        )

    return {f"{k} nearest neighbors": neighbors, "linear probe": linear}


def _sklearn() -> Any:
    try:
        import sklearn
        import sklearn.linear_model
        import sklearn.model_selection
        import sklearn.neighbors
        import sklearn.pipeline
        import sklearn.preprocessing
    except ImportError as error:
        raise VitcliError("probe needs scikit-learn", "pip install 'vitcli[probe]'") from error
    return sklearn
