"""How well classes or numbers are predicted from vectors of one encoder, or of several."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitcli.commands.embed.analysis import embed
from vitcli.commands.embed.job import shard_labels
from vitcli.commands.embed.result import MANIFEST, remembered
from vitcli.commands.params.analysis import model_costs
from vitcli.commands.probe import evaluate
from vitcli.commands.probe.evaluate import TIMED_BATCH, TIMED_ROUNDS
from vitcli.commands.probe.labeled import (
    Images,
    published_set,
    read_vectors,
    with_classes,
    with_groups,
    with_targets,
)
from vitcli.commands.probe.result import (
    AgreementResult,
    Cost,
    ProbeResult,
    RankingResult,
    check_options,
)
from vitcli.commands.probe.scores import Trial, agreement, encoder_names
from vitcli.commands.profile.memory import peak_memory
from vitcli.config.settings import parse_layers
from vitcli.engines.backbone import macs_per_image
from vitcli.engines.engine import timed
from vitcli.engines.reference import LibraryEncoder
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.decode import decode
from vitcli.images.folders import read_folder
from vitcli.images.preprocess import preprocess
from vitcli.images.sources import recognized
from vitcli.loading import as_model
from vitcli.model import Model
from vitcli.results import QUIET, Progress
from vitcli.stats import Plane, evenly, plane

Source = Model | str | os.PathLike[str]


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
    test: bool = False,
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
        test: where folders give train, val and test, test on `test` in place of `val`.
        out: folder in which to keep the vectors of images.
        tokens, workers: vectors of images as `vitcli.embed` names them, and its decoding processes.
        progress: called with the images encoded; its `line` with each note.

    Raises:
        VitcliError: no classes, too few images, no test split that `test` asks for, an argument
            without effect on these inputs, or scikit-learn is missing.
    """
    folder = Path(folder)
    single = model is None or isinstance(model, Model | str | os.PathLike)
    sources: list[Source] = [] if model is None else [model] if single else list(model)  # type: ignore[arg-type, list-item]
    check_options(
        folder if (folder / MANIFEST).is_file() else None,
        targets is not None,
        unlabeled,
        for_classes={"--confusion": confusion, "--test": test},
        for_labels={"--groups": groups, "--seeds": seeds},
        for_images={
            "--limit": limit,
            "--out": out,
            "--tokens": tokens != "pooled",
            "--workers": workers,
            "a model": sources,
        },
    )
    evaluate.sklearn()  # an error before hours of encoding
    models = [as_model(source, by_library=True) for source in sources]
    with contextlib.ExitStack() as stack:
        labeled = not unlabeled and targets is None
        kept = None if out is None else Path(out)
        work = _Encoding(folder, tokens, layers, limit, kept, workers, progress)
        images = work.images(models, labeled, stack)
        cost: list[Cost] = []
        if len(models) > 1 and layers is None and not unlabeled:
            progress.line(f"timing {len(models)} encoders alternately, then comparing them")
            cost = _costs(models, folder)
        if labeled and images.labels is None:
            kept_in = images.encoders[0].kept  # while the vectors are there
            images = with_classes(images, shard_labels(Path(kept_in)) if kept_in else None, test)
            if images.aside:
                other = "val" if test else "test"
                hint = "" if test else "; --test tests on it in place of val"
                progress.line(f"{other} left out: {images.aside:,} images{hint}")
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
    names = encoder_names(images.encoders)
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


@dataclasses.dataclass(frozen=True)
class _Encoding:
    """The arguments of `probe` that say how images become vectors."""

    folder: Path
    tokens: str
    layers: str | None
    limit: int | None
    out: Path | None
    workers: int | None
    progress: Progress

    def images(self, models: Sequence[Model], labeled: bool, stack: contextlib.ExitStack) -> Images:
        """The vectors in the folder, or those of each model on the images in it."""
        folder, shown = self.folder, printable(self.folder)
        if (folder / MANIFEST).is_file():
            return read_vectors([folder], self.layers)
        if not models:
            raise VitcliError(
                f"{shown}: does not hold vectors of `vitcli embed`",
                "add --weights SOURCE or --preset NAME to encode its images",
            )
        if recognized(folder) != "folder":
            asked = {"--layers": self.layers, "--out": self.out, "--workers": self.workers}
            if given := [name for name, value in asked.items() if value is not None]:
                raise VitcliError(
                    f"{given[0]}: is for a folder of images (got the files of a published set)",
                    f"leave out {', '.join(given)}",
                )
            return published_set(models, folder, self.tokens, self.limit, self.progress)
        if self.limit is not None:
            raise VitcliError(
                "--limit: is for the files of a published set (got a folder)", "leave out --limit"
            )
        found = read_folder(folder)
        for line in found.lines(labeled):
            self.progress.line(line)
        if labeled and len(found.classes) < 2:
            raise VitcliError(
                f"{shown}: too few classes (got {len(found.classes)} folders with images, "
                "expected at least 2)",
                "put the images of each class into a folder of their own",
            )
        places = [self._place(one, len(models) > 1, stack) for one in models]
        if len(models) > 1:
            self.progress.line(f"vectors are kept in {printable(places[0].parent)}")
        for number, (one, place) in enumerate(zip(models, places, strict=True)):
            self._embed(one, place, _Joint(self.progress, number, len(models)))
        return read_vectors(places, self.layers)

    def _place(self, model: Model, several: bool, stack: contextlib.ExitStack) -> Path:
        """Where a model's vectors go: `out`, or of several models a folder of each in the cache."""
        if not several:
            if self.out:
                return self.out
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vitcli-")))
        asked = remembered(model.request) if model.request else {"id": id(model)}
        what = {"request": asked, "tokens": self.tokens, "layers": self.layers}
        parent = self.out
        if parent is None:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            parent = cache / "vitcli" / "probe" / _digest(list(_state(self.folder)))
        place = parent / f"{model.name}-{_digest(what)}".replace(os.sep, "-")
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _embed(self, model: Model, place: Path, progress: Progress) -> None:
        """Turn the images into vectors; what an earlier run had finished is not done again."""
        every = range(model.config.encoder.depth + 1)
        numbers = parse_layers(self.layers) if self.layers and self.layers != "all" else every
        embed(
            model,
            self.folder,
            place,
            tokens=self.tokens,
            layers=numbers if self.layers else (),
            format="safetensors" if self.layers else "npy",
            workers=self.workers,
            progress=progress,
        )


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
    """What each encoder costs here; timed in turn, A B C A B C, after a pass to warm up."""
    steps = [_step(model) for model in models]
    added = []
    for model, step in zip(models, steps, strict=True):
        step()
        added.append(peak_memory(step, model.device) or 0)
    times: list[list[float]] = [[] for _ in models]
    for _ in range(TIMED_ROUNDS):
        for place, (model, step) in enumerate(zip(models, steps, strict=True)):
            times[place].append(timed(step, model.device))
    decoding = _decode_seconds(models[0], folder) / (os.cpu_count() or 1)
    found = []
    for model, seconds, memory in zip(models, times, added, strict=True):
        slow, middle, fast = np.quantile(TIMED_BATCH / np.array(seconds), [0.1, 0.5, 0.9]).tolist()
        weights = sum(p.numel() * p.element_size() for p in model.encoder.parameters())
        if isinstance(model.encoder, LibraryEncoder):  # torch counts another library's operations
            macs = macs_per_image(model.encoder.backbone, model.input_size)
        else:
            macs = model_costs(model.config, model.input_size).macs_per_image
        found.append(
            Cost(
                parameters=model.parameters,
                macs_per_image=macs,
                images_per_s=middle,
                images_per_s_p10=slow,
                images_per_s_p90=fast,
                embed_100k_s=1e5 * max(1 / middle, decoding),
                memory_bytes=weights + memory,
                batch=TIMED_BATCH,
            )
        )
    return found


def _step(model: Model) -> Callable[[], object]:
    """A pass over a batch of noise."""
    shape = (TIMED_BATCH, model.config.encoder.channels, *model.input_size)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return partial(model.runner, pixels.to(model.device, model.dtype))


def _decode_seconds(model: Model, folder: Path, most: int = 12) -> float:
    """Median seconds in which a core prepares an image of the folder; 0 where none is readable."""
    suffixes = (".jpg", ".jpeg", ".png", ".webp")
    paths = [str(p) for p in sorted(folder.rglob("*")) if p.suffix.lower() in suffixes][:200]
    seconds = []
    for path in paths[:: max(1, len(paths) // most)][:most]:
        start = time.perf_counter()
        try:
            preprocess(decode(path).image, model.preprocessing)
        except VitcliError:
            continue
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)) if seconds else 0.0
