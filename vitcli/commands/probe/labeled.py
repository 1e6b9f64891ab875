"""Which images are probed: their vectors by one or several encoders, classes, splits and groups."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from vitcli.commands.embed.job import iterate_parts, load_manifest
from vitcli.commands.encode.analysis import select_tokens
from vitcli.commands.encode.result import check_tokens
from vitcli.config.settings import parse_layers
from vitcli.errors import VitcliError
from vitcli.files import first_names, printable
from vitcli.images.folders import class_order, read_layout
from vitcli.images.preprocess import preprocess
from vitcli.images.sources import published_sets, recognized
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
    wanted = numbers if layers == "all" else parse_layers(layers)
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
    classes = np.array([label or "" for _, label in places], dtype=object)  # of any length
    is_test = np.array([split == tested for split in splits], bool) if tested else None
    labeled = dataclasses.replace(
        images, labels=classes, is_test=is_test, tested=tested, aside=sum(aside)
    )
    unlabelled = int((~keep).sum())
    return dataclasses.replace(labeled.kept(keep & ~np.array(aside, bool)), unlabelled=unlabelled)


def with_targets(images: Images, file: Path) -> Images:
    """The images that a CSV of path and number gives a number to predict."""
    rows = _table(file)
    for line, (_, text) in enumerate(rows, start=1):
        if not _is_number(text) and line > 1:  # the first line may be a header
            raise VitcliError(
                f"{printable(file)}:{line}: is not a number (got {text!r})",
                "write PATH,NUMBER on each line",
            )
    values = _values(file, [row for row in rows if _is_number(row[1])], images.names)
    targets = np.array([math.nan if value is None else float(value) for value in values])
    keep = np.isfinite(targets)
    if keep.sum() < 4:
        raise VitcliError(
            f"{printable(file)}: too few images have a number (got {int(keep.sum())} of "
            f"{len(keep):,}, expected at least 4)",
            "write paths relative to the folder of images",
        )
    if np.ptp(targets[keep]) == 0:
        raise VitcliError(
            f"{printable(file)}: every image has the number {targets[keep][0]:g}, so there is "
            "nothing to predict",
            "write numbers that differ",
        )
    numbered = dataclasses.replace(images, labels=targets).kept(keep)
    return dataclasses.replace(numbered, unlabelled=int((~keep).sum()))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def with_groups(images: Images, groups: str | None) -> Images:
    """The groups that `--groups` names: `parent`, or a CSV of path and group."""
    if groups is None:
        return images
    if groups == "parent":
        names = tuple(str(PurePosixPath(name).parent) for name in images.names)
        return dataclasses.replace(images, groups=names)
    file = Path(groups)
    found = _values(file, _table(file), images.names)
    missing = [name for name, group in zip(images.names, found, strict=True) if group is None]
    if missing:
        raise VitcliError(
            f"--groups {groups}: the group of {printable(missing[0])} is missing "
            f"({len(missing):,} of {len(found):,} images are without a group)",
            "write PATH,GROUP for every image, or use --groups parent",
        )
    return dataclasses.replace(images, groups=tuple(map(str, found)))


def _values(file: Path, rows: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str | None]:
    """The value of each image by the rows (path, value) of a file; None without one.

    A path may leave out the first folders of an image's name, and be written as Windows or macOS
    writes it; it means one image, which has one value.
    """
    table: dict[str, str] = {}
    for path, value in rows:
        for spelled in {path, path.replace("\\", "/")}:
            key = unicodedata.normalize("NFC", os.path.normpath(spelled))
            if table.setdefault(key, value) != value:
                raise VitcliError(
                    f"{printable(file)}: {printable(path)} is given twice (got {table[key]} and "
                    f"{value})",
                    "write one line for each image",
                )
    found: list[str | None] = []
    meant: dict[str, str] = {}
    for name in names:
        parts = unicodedata.normalize("NFC", name).split("/")
        endings = ("/".join(parts[at:]) for at in range(len(parts)))
        key = next((ending for ending in endings if ending in table), "")
        if key and meant.setdefault(key, name) != name:
            raise VitcliError(
                f"{printable(file)}: {printable(key)} is more than one image "
                f"({first_names([meant[key], name])})",
                "write paths relative to the folder of images",
            )
        found.append(table.get(key))
    return found


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
    return [(path.strip(), value.strip()) for path, value in rows]


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
    chosen = []
    for half, items in (("train", train), ("test", test)):
        order = np.random.default_rng(_SEED).permutation(len(items))
        chosen += [(half, items, int(place)) for place in np.sort(order[:limit])]
    encoders, done = [], 0
    for model in models:
        vectors = []
        for at in range(0, len(chosen), _BATCH):
            group = [items[place][0] for _, items, place in chosen[at : at + _BATCH]]
            vectors.append(_encoded(model, group, kind))
            done += len(group)
            progress(done, len(chosen) * len(models))
        registers = model.config.encoder.registers
        encoders.append(
            Encoded(model.name, model.weights, np.concatenate(vectors), registers=registers)
        )
    names = tuple(f"{half}/{i}" for i, (half, _, _) in enumerate(chosen))
    labels = np.array([classes[items[place][1]] for _, items, place in chosen], object)
    is_test = np.array([half == "test" for half, _, _ in chosen], bool)
    return Images(names, tuple(encoders), labels, is_test)


def _encoded(model: Model, pictures: Sequence[Any], kind: str) -> np.ndarray:
    pixels = [preprocess(picture.convert("RGB"), model.preprocessing) for picture in pictures]
    batch = torch.from_numpy(np.stack(pixels)).to(model.device, model.dtype)
    with torch.inference_mode():
        return select_tokens(model, model.runner(batch), kind).astype(np.float32)


def ordered(labels: np.ndarray | None) -> tuple[list[str], np.ndarray]:
    """The classes, numbers in their order, and the number of each label's class (N,)."""
    assert labels is not None
    classes = class_order(labels.tolist())
    number = {name: place for place, name in enumerate(classes)}
    return classes, np.array([number[label] for label in labels])
