"""The nearest images by cosine among the vectors that `vitcli embed` wrote."""

from __future__ import annotations

import heapq
import os
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from vitcli.commands.embed.job import (
    iterate_entries,
    iterate_parts,
    load_manifest,
    load_saved,
    picture_of,
    shard_labels,
    vector_column,
)
from vitcli.commands.embed.parts import OK, Rows
from vitcli.commands.embed.result import FolderOptions
from vitcli.commands.embed.rows import forward
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.decode import ImageError
from vitcli.images.folders import read_layout
from vitcli.images.preprocess import preprocess
from vitcli.images.sources import Entry
from vitcli.model import Model, Picture, read_picture
from vitcli.results import Result
from vitcli.stats import unit_rows


@dataclass(frozen=True)
class Neighbor:
    """One of the nearest images."""

    index: int
    """Its row among the vectors."""
    path: str
    cosine: float
    width: int
    height: int
    label: str | None = None
    """Its class, where the folders give one."""


@dataclass(frozen=True)
class NeighborsResult(Result):
    """The result of `vitcli neighbors DIR IMAGE`, nearest first."""

    rows_at: ClassVar[str] = "neighbours"

    image: str
    folder: str
    model: str
    weights: str
    index: int | None
    """Its own row if it is among the vectors; it is not a neighbor of itself."""
    searched: int
    """Number of vectors searched."""
    cosine_mean: float
    """Over all vectors that were searched."""
    cosine_std: float
    neighbours: tuple[Neighbor, ...]
    label: str | None = None
    """The class of the image, where it is one of those encoded and the folders give one."""
    same_class: int | None = None
    """How many of `neighbours` are of that class."""
    class_share: float | None = None
    """The share of that class among all that were searched."""


def neighbors(
    folder: str | os.PathLike[str], image: Picture, count: int = 10, device: str = "auto"
) -> NeighborsResult:
    """The `count` images of `folder` nearest to `image`, in one pass over the parts.

    Args:
        folder: vectors that `vitcli embed` wrote.
        image: one of those encoded, by its path or, where no such file is, by its name in the
            table; or any other file, PIL image or (H, W, 3) array, which the same model encodes.
        count: of equally near images the earlier rows come first.
        device: where another image is encoded.

    Raises:
        VitcliError: a folder without vectors, or weights that have changed since.
        ImageError: an image that cannot be read.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    row, vector, name = None, None, ""
    if isinstance(image, str | os.PathLike):
        row, vector, name = _row_of(folder, os.fspath(image), manifest["root"])
    if vector is None:
        if isinstance(image, str | os.PathLike) and not os.path.lexists(image):
            names = (name for part in iterate_parts(folder) for name in _good_names(part))
            example = next(names, "")
            raise ImageError(
                "unreadable",
                f"{printable(image)}: No such file, and no image of {printable(folder)} has this "
                "name",
                shlex.join(["vitcli", "neighbors", str(folder), example])
                if example
                else "run `vitcli embed` again with --retry-failed",
            )
        vector = _encoded(load_saved(folder, device), image, manifest["settings"])
    query = unit_rows(vector[None].astype(np.float64))[0]
    nearest: list[tuple[float, int, Neighbor]] = []
    seen, total, squares = 0, 0.0, 0.0
    said = shard_labels(folder)
    folders: Counter[tuple[str, str]] = Counter()
    for part in iterate_parts(folder):
        cosines = unit_rows(part.arrays["vector"].astype(np.float64)) @ query
        for place in np.flatnonzero(part.good):
            index, cosine = part.first + int(place), float(cosines[place])
            if index == row:
                continue
            seen, total, squares = seen + 1, total + cosine, squares + cosine**2
            path = part.names[place]
            folders[path.rpartition("/")[0], said.get(path, "")] += 1
            width, height = part.width[place] or 0, part.height[place] or 0
            item = (cosine, -index, Neighbor(index, path, cosine, width, height))
            take = heapq.heappush if len(nearest) < count else heapq.heappushpop
            take(nearest, item)
    if not seen:
        raise VitcliError(f"{printable(folder)}: does not hold other vectors", exit_code=1)
    mean = total / seen
    layout = read_layout(f"{above}/x" if above else "x" for above, _ in folders)

    def class_of(path: str) -> str | None:
        return layout.place(path, said.get(path, ""))[1]

    ranked = [item[2] for item in sorted(nearest, reverse=True)]
    labeled = tuple(replace(one, label=class_of(one.path)) for one in ranked)
    label = class_of(name) if row is not None else None
    of_class = sum(
        number
        for (above, own), number in folders.items()
        if layout.place(f"{above}/x", own)[1] == label
    )
    return NeighborsResult(
        image=os.fspath(image) if isinstance(image, str | os.PathLike) else "image",
        folder=str(folder),
        model=manifest["settings"]["model"],
        weights=manifest["settings"]["weights"],
        index=row,
        searched=seen,
        cosine_mean=mean,
        cosine_std=max(squares / seen - mean**2, 0.0) ** 0.5,
        neighbours=labeled,
        label=label,
        same_class=None if label is None else sum(one.label == label for one in labeled),
        class_share=None if label is None else of_class / seen,
    )


def _good_names(part: Rows) -> list[str]:
    return [name for name, good in zip(part.names, part.good, strict=True) if good]


def _row_of(folder: Path, image: str, root: str) -> tuple[int | None, np.ndarray | None, str]:
    """The row, vector and name of an image that is among those encoded."""
    base, asked, there = Path(image).name, _place(Path(image)), os.path.lexists(image)
    for part in iterate_parts(folder):
        for place, name in enumerate(part.names):
            if not name.endswith(base):  # all but a few; the rest costs a look at the disk
                continue
            if (there or name != image) and _place(Path(root, name)) != asked:
                continue
            if part.status[place] != OK:
                raise VitcliError(
                    f"{printable(image)}: its vector is missing ({part.status[place]}: "
                    f"{part.error[place]})",
                    exit_code=1,
                )
            return part.first + place, part.arrays["vector"][place], name
    return None, None, ""


def _place(path: Path) -> Path:
    """The one absolute path of a file; a link that is its last part stays one."""
    return path.parent.resolve() / path.name


def _encoded(model: Model, image: Picture, settings: dict[str, Any]) -> np.ndarray:
    red, green, blue = settings["background"]
    decoded = read_picture(image, (red, green, blue))
    pixels = preprocess(decoded.image, model.preprocessing)
    batch = torch.from_numpy(pixels)[None].to(model.device)
    options = FolderOptions(kind=settings["kind"], layers=tuple(settings.get("layers", ())))
    column = vector_column(settings)
    vector: np.ndarray = forward(model, batch, {column: options.columns[column]})()[column][0]
    return vector


def pictures(result: NeighborsResult) -> list[Any]:
    """The Pillow images of the image and its neighbors, None where they are gone."""
    rows = [result.index, *(found.index for found in result.neighbours)]
    wanted = dict.fromkeys(rows, Entry(result.image, result.image))
    for index, entry in enumerate(iterate_entries(Path(result.folder))):
        if index in wanted:
            wanted[index] = entry
    return [picture_of(wanted[row]) for row in rows]
