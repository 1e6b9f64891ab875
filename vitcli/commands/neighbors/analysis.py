"""The nearest images by cosine among the vectors that `vitcli encode` wrote."""

from __future__ import annotations

import heapq
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitcli.commands.embed.encoder import forward
from vitcli.commands.embed.job import (
    INPUTS,
    iterate_parts,
    load_manifest,
    load_saved,
    vector_column,
)
from vitcli.commands.embed.parts import OK
from vitcli.commands.embed.result import FolderOptions
from vitcli.commands.neighbors.result import Neighbor, NeighborsResult
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.decode import decode
from vitcli.images.preprocess import preprocess
from vitcli.images.shards import Entry, content
from vitcli.model import Model


def neighbors(folder: Path, image: str, count: int = 10, device: str = "auto") -> NeighborsResult:
    """The `count` images of `folder` nearest to `image`, in one pass over the parts.

    `image` is one of those encoded, by its path or, where no such file is, by its name in the
    table; or any other file, which the same model then encodes. Of equally near ones the earlier
    rows come first.

    Raises:
        VitcliError: no vectors there, other weights than then, nothing to compare with.
        ImageError: an image that cannot be read.
    """
    manifest = load_manifest(folder)
    row, vector = _row_of(folder, image, manifest["root"])
    if vector is None:
        vector = _encoded(load_saved(folder, device), image, manifest["settings"])
    query = _unit(vector[None])[0]
    nearest: list[tuple[float, int, Neighbor]] = []
    seen, total, squares = 0, 0.0, 0.0
    for part in iterate_parts(folder):
        good = part.good
        cosines = _unit(part.arrays["vector"]) @ query
        for place in np.flatnonzero(good):
            index, cosine = part.first + int(place), float(cosines[place])
            if index == row:
                continue
            seen, total, squares = seen + 1, total + cosine, squares + cosine**2
            width, height = part.width[place] or 0, part.height[place] or 0
            found = Neighbor(index, part.names[place], cosine, width, height)
            item = (cosine, -index, found)
            if len(nearest) < count:
                heapq.heappush(nearest, item)
            else:
                heapq.heappushpop(nearest, item)
    if not seen:
        raise VitcliError(f"{printable(folder)}: no vectors to compare with", exit_code=1)
    mean = total / seen
    return NeighborsResult(
        image=image,
        folder=str(folder),
        model=manifest["settings"]["model"],
        weights=manifest["settings"]["weights"],
        index=row,
        searched=seen,
        cosine_mean=mean,
        cosine_std=max(squares / seen - mean**2, 0.0) ** 0.5,
        neighbours=tuple(item[2] for item in sorted(nearest, reverse=True)),
    )


def _row_of(folder: Path, image: str, root: str) -> tuple[int | None, np.ndarray | None]:
    """The row and vector of an image that is among those encoded."""
    base, asked, there = Path(image).name, _place(Path(image)), os.path.lexists(image)
    for part in iterate_parts(folder):
        for place, name in enumerate(part.names):
            if not name.endswith(base):  # all but a few; the rest costs a look at the disk
                continue
            if (there or name != image) and _place(Path(root, name)) != asked:
                continue
            if part.status[place] != OK:
                raise VitcliError(
                    f"{printable(image)}: has no vector: {part.status[place]}: {part.error[place]}",
                    exit_code=1,
                )
            return part.first + place, part.arrays["vector"][place]
    return None, None


def _place(path: Path) -> Path:
    """The one absolute path of a file; a link that is its last part stays one."""
    return path.parent.resolve() / path.name


def _encoded(model: Model, image: str, settings: dict[str, Any]) -> np.ndarray:
    red, green, blue = settings["background"]
    pixels = preprocess(decode(image, background=(red, green, blue)).image, model.preprocessing)
    batch = torch.from_numpy(pixels)[None].to(model.device)
    options = FolderOptions(kind=settings["kind"], layers=tuple(settings["layers"]))
    column = vector_column(settings)
    vector: np.ndarray = forward(model, batch, {column: options.columns[column]})()[column][0]
    return vector


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1 in float64; a row of zeros stays."""
    rows = vectors.astype(np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(length == 0, 1, length)


def pictures(result: NeighborsResult) -> list[Any]:
    """The Pillow images of the image and its neighbors, None where they are gone."""
    rows = [result.index, *(found.index for found in result.neighbours)]
    wanted = dict.fromkeys(rows, Entry(result.image, result.image))
    with (Path(result.folder) / INPUTS).open("rb") as file:
        for index, line in enumerate(file):
            if index in wanted:
                wanted[index] = Entry.from_line(line)
    return [_picture(wanted[row]) for row in rows]


def _picture(entry: Entry) -> Any:
    try:
        return decode(content(entry)).image
    except VitcliError:
        return None
