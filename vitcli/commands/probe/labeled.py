"""Which images are probed: their vectors by one or several encoders, classes, splits and groups."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from vitcli.commands.embed.job import iterate_entries, iterate_parts, load_manifest
from vitcli.commands.encode.analysis import select_tokens
from vitcli.commands.encode.result import check_tokens
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.folders import class_order, read_layout
from vitcli.images.preprocess import preprocess
from vitcli.images.sources import Items, published_sets, recognized
from vitcli.model import Model
from vitcli.results import Progress

EVALUATED = ("val", "test")
"""Splits of which the first that is there is tested, if there is a `train` split too."""
_BATCH = 16
_SEED = 0


@dataclass(frozen=True)
class Encoded:
    """The vectors of the images by one encoder or one of its layers."""

    model: str
    weights: str
    vectors: np.ndarray
    """(N, D) in float32, rows as `Images.names`."""
    layer: int | None = None
    """0 is the input of the first block, i the output of block i; None is the encoder's end."""
    kept: str = ""
    """The folder that holds the vectors, if they are kept."""
    registers: int = 0


@dataclass(frozen=True)
class Images:
    """The images that every encoder has a vector of; N of them."""

    names: tuple[str, ...]
    encoders: tuple[Encoded, ...]
    labels: np.ndarray | None = None
    """(N,) names of classes as objects, or numbers to predict; None without either."""
    is_test: np.ndarray | None = None
    """(N,) where the folders give a split."""
    groups: tuple[str, ...] | None = None
    """Images of one group stay on one side of a split."""
    failed: int = 0
    unlabelled: int = 0
    tested: str = ""
    """The split that is tested: val or test; empty where folders give none."""
    aside: int = 0
    """Labeled images of the other one, which nothing is learned from or tested on."""

    @property
    def regression(self) -> bool:
        return self.labels is not None and self.labels.dtype.kind == "f"

    def kept(self, keep: np.ndarray) -> Images:
        """The images where `keep` (N,) is true."""
        places = np.flatnonzero(keep)
        return dataclasses.replace(
            self,
            names=tuple(self.names[i] for i in places),
            encoders=tuple(
                dataclasses.replace(e, vectors=e.vectors[places]) for e in self.encoders
            ),
            labels=None if self.labels is None else self.labels[places],
            is_test=None if self.is_test is None else self.is_test[places],
            groups=None if self.groups is None else tuple(self.groups[i] for i in places),
        )


def read_vectors(folders: Sequence[Path], layers: str | None = None) -> Images:
    """The vectors in folders that `vitcli embed` wrote, of the images that all of them hold.

    `layers` (`all`, or numbers with commas) takes the columns of those layers, one encoder each.

    Raises:
        VitcliError: no vectors there, parts are missing, no such layers, no image in common.
    """
    columns = [(folder, column) for folder in folders for column in _columns(folder, layers)]
    found = [_column(folder, column) for folder, column in columns]
    common = set.intersection(*(set(names) for names, _, _ in found))
    if not common:
        raise VitcliError(
            f"{printable(folders[0])}: does not hold a vector",
            "run `vitcli embed` again with --retry-failed",
        )
    names = [name for name in found[0][0] if name in common]
    encoders = []
    for (folder, column), (own, vectors, _) in zip(columns, found, strict=True):
        settings = load_manifest(folder)["settings"]
        place = {name: row for row, name in enumerate(own)}
        rows = vectors if own == names else vectors[[place[name] for name in names]]
        encoders.append(
            Encoded(
                settings["model"],
                settings["weights"],
                rows,
                _layer_of(column),
                str(folder),
                settings.get("config", {}).get("registers", 0),
            )
        )
    failed = max(len(own) + bad for own, _, bad in found) - len(names)
    return Images(tuple(names), tuple(encoders), failed=failed)


def _columns(folder: Path, layers: str | None) -> list[str | None]:
    """The columns of a folder that `layers` asks for; None is its first one of vectors."""
    settings = load_manifest(folder)["settings"]
    if layers is None:
        return [None]
    there = {_layer_of(name): name for name, *_ in settings.get("columns", ())}
    numbers = sorted(layer for layer in there if layer is not None)
    wanted = numbers if layers == "all" else layer_numbers(layers)
    depth = settings.get("config", {}).get("depth", max(numbers, default=0))
    wanted = [depth + 1 + layer if layer < 0 else layer for layer in wanted]
    missing = [layer for layer in wanted if layer not in there]
    if missing or not wanted:
        held = ", ".join(map(str, numbers)) or "none"
        raise VitcliError(
            f"--layers {layers}: {printable(folder)} does not hold these layers (it holds: {held})",
            "vitcli embed PATH --out DIR --layers 3,6,9,12",
        )
    return [there[layer] for layer in dict.fromkeys(wanted)]


def layer_numbers(layers: str) -> list[int]:
    try:
        return [int(part) for part in layers.split(",")]
    except ValueError as error:
        raise VitcliError(
            f"--layers {layers}: are not layers (expected all, or numbers with commas)",
            "--layers all",
        ) from error


def _layer_of(column: str | None) -> int | None:
    _, found, number = (column or "").rpartition("_layer_")
    return int(number) if found and number.isdecimal() else None


def _column(folder: Path, column: str | None) -> tuple[list[str], np.ndarray, int]:
    """Names and vectors of the rows that have one, and how many have none."""
    names: list[str] = []
    arrays: list[np.ndarray] = []
    failed = 0
    for part in iterate_parts(folder, column):
        good = part.good
        failed += int((~good).sum())
        names += [name for name, ok in zip(part.names, good, strict=True) if ok]
        arrays.append(part.arrays["vector"][good].astype(np.float32))
    return names, np.concatenate(arrays), failed


def shard_labels(images: Images) -> dict[str, str]:
    """What tar shards say of their members, by name, of the images of one folder of vectors."""
    kept = images.encoders[0].kept
    entries = iterate_entries(Path(kept)) if kept else ()
    return {entry.name: entry.label for entry in entries if entry.label}


def with_classes(
    images: Images, labels: dict[str, str] | None = None, test: bool = False
) -> Images:
    """The images whose folders or shards give a class, with their split where there is one.

    As in training, `val` is tested if it is there and `test` is left out, but for the option.
    Without `train`, or without classes to test on, what splits there are is probed by
    cross-validation.

    Args:
        labels: what shards say of their members, by name.
        test: `test` is tested and `val` left out.

    Raises:
        VitcliError: a test split is asked for, and there is none with classes.
    """
    layout = read_layout(images.names)
    places = [layout.place(name, (labels or {}).get(name, "")) for name in images.names]
    splits = [split if label is not None else None for split, label in places]
    there = [split for split in EVALUATED if split in splits and "train" in splits]
    if test and "test" not in there:
        raise VitcliError(
            "--test: there are no train and test splits with classes", "leave --test out"
        )
    tested = "test" if test else next(iter(there), "")
    aside = [split in there and split != tested for split in splits]
    named = {"train", *EVALUATED, None}
    keep = np.array([label is not None and split in named for split, label in places], bool)
    # Cells of strings of any length; a name that cannot be printed is shown escaped.
    classes = np.array([printable(label or "") for _, label in places], dtype=object)
    is_test = np.array([split == tested for split in splits], bool) if tested else None
    labeled = dataclasses.replace(
        images, labels=classes, is_test=is_test, tested=tested, aside=sum(aside)
    )
    unlabelled = int((~keep).sum())
    return dataclasses.replace(labeled.kept(keep & ~np.array(aside, bool)), unlabelled=unlabelled)


def with_targets(images: Images, file: Path) -> Images:
    """The images that a CSV of path and number gives a number to predict."""
    table = _table(file)
    values = {}
    for place, (path, text) in enumerate(table):
        try:
            values[path] = float(text)
        except ValueError as error:
            if place:  # the first line may be a header
                raise VitcliError(
                    f"{printable(file)}:{place + 1}: is not a number (got {text!r})",
                    "write PATH,NUMBER on each line",
                ) from error
    found = [_lookup(values, name) for name in images.names]
    keep = np.array([value is not None and math.isfinite(value) for value in found], bool)
    if keep.sum() < 4:
        raise VitcliError(
            f"{printable(file)}: too few images have a number (got {int(keep.sum())} of "
            f"{len(found):,}, expected at least 4)",
            "write paths relative to the folder of images",
        )
    targets = np.array([math.nan if value is None else value for value in found])
    return dataclasses.replace(
        dataclasses.replace(images, labels=targets).kept(keep), unlabelled=int((~keep).sum())
    )


def with_groups(images: Images, groups: str | None) -> Images:
    """The groups that `--groups` names: `parent`, or a CSV of path and group.

    Raises:
        VitcliError: a file that cannot be read, or without some image.
    """
    if groups is None:
        return images
    if groups == "parent":
        names = tuple(str(PurePosixPath(name).parent) for name in images.names)
        return dataclasses.replace(images, groups=names)
    table = dict(_table(Path(groups)))
    found = [_lookup(table, name) for name in images.names]
    missing = [name for name, group in zip(images.names, found, strict=True) if group is None]
    if missing:
        raise VitcliError(
            f"--groups {groups}: the group of {printable(missing[0])} is missing "
            f"({len(missing):,} of {len(found):,} images are without a group)",
            "write PATH,GROUP for every image, or use --groups parent",
        )
    return dataclasses.replace(images, groups=tuple(str(group) for group in found))


def _lookup(table: dict[str, Any], name: str) -> Any:
    """The value of a name, also where the table names it below some of its own folders."""
    if name in table:
        return table[name]
    parts = name.split("/")
    endings = ("/".join(parts[at:]) for at in range(1, len(parts)))
    return next((table[ending] for ending in endings if ending in table), None)


def _table(file: Path) -> list[tuple[str, str]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = [row for row in csv.reader(lines) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise VitcliError(
            f"{printable(file)}: {reason}", "name a CSV file of two columns"
        ) from error
    if any(len(row) != 2 for row in rows):
        raise VitcliError(
            f"{printable(file)}: a line does not have two columns", "name a CSV file of two columns"
        )
    return [(os.path.normpath(path.strip()), value.strip()) for path, value in rows]


def published_set(
    models: Sequence[Model],
    folder: Path,
    kind: str,
    limit: int | None,
    progress: Progress,
) -> Images:
    """A published set's files by each model; `limit` images of each half, drawn at random."""
    for model in models:
        check_tokens(model.config, [kind])
    train, test, classes = published_sets(folder, recognized(folder))
    halves = [_drawn(train, limit), _drawn(test, limit)]
    total = sum(len(places) for _, places in halves)
    labels = [classes[items[int(place)][1]] for items, places in halves for place in places]
    encoders, done = [], 0
    for model in models:
        vectors = []
        for group in _batches(halves):
            vectors.append(_encoded(model, group, kind))
            done += len(group)
            progress(done, total * len(models))
        registers = model.config.encoder.registers
        encoders.append(
            Encoded(model.name, model.weights, np.concatenate(vectors), registers=registers)
        )
    learned = len(halves[0][1])
    names = tuple(f"{'train' if i < learned else 'test'}/{i}" for i in range(total))
    is_test = np.arange(total) >= learned
    return Images(names, tuple(encoders), np.array(labels, object), is_test)


def _drawn(items: Items, limit: int | None) -> tuple[Items, np.ndarray]:
    order = np.random.default_rng(_SEED).permutation(len(items))
    return items, np.sort(order[:limit])


def _batches(halves: Sequence[tuple[Items, np.ndarray]]) -> Iterator[list[Any]]:
    for items, places in halves:
        for start in range(0, len(places), _BATCH):
            yield [items[int(place)][0] for place in places[start : start + _BATCH]]


def _encoded(model: Model, pictures: Sequence[Any], kind: str) -> np.ndarray:
    pixels = [preprocess(picture.convert("RGB"), model.preprocessing) for picture in pictures]
    batch = torch.from_numpy(np.stack(pixels)).to(model.device, model.dtype)
    with torch.inference_mode():
        return select_tokens(model, model.runner(batch), kind).astype(np.float32)


def ordered(labels: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The classes, numbers in their order, and the number of each label's class (N,)."""
    classes = class_order(labels.tolist())
    number = {name: place for place, name in enumerate(classes)}
    return classes, np.array([number[label] for label in labels])
