"""The images of a call as batches that an encoder can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike, fspath

import torch
from torch import Tensor

from vitcli.images.decode import DecodedImage, ImageError
from vitcli.images.preprocess import preprocess
from vitcli.images.shapes import synthetic_image
from vitcli.model import AT_ONCE, Color, Model, Picture, Pictures, picture_list, read_picture
from vitcli.results import FailedImage


@dataclass(frozen=True)
class Prepared:
    """An image as the encoder reads it, and where it came from."""

    path: str
    decoded: DecodedImage
    pixels: Tensor
    """(3, height, width) in float32."""


def image_batches(
    model: Model,
    images: Pictures,
    background: Color,
    failed: list[FailedImage],
    size: int = AT_ONCE,
) -> Iterator[list[Prepared]]:
    """Images in order, up to `size` neighbors of equal shape at a time.

    Without images it is the built-in synthetic one. One that cannot be read goes to `failed`.

    Raises:
        VitcliError: an encoder that does not read RGB, or whose preprocessing is unknown.
    """
    model.check_reads_images()
    prepared = _prepare(model, picture_list(images) or [None], background, failed)
    for _, same in groupby(prepared, key=lambda item: item.pixels.shape):
        batch: list[Prepared] = []
        for item in same:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch


def stacked(model: Model, batch: Sequence[Prepared]) -> Tensor:
    """(B, 3, height, width) on the model's device in its dtype."""
    return torch.stack([item.pixels for item in batch]).to(model.device, model.dtype)


def picture_name(picture: Picture, number: int) -> str:
    """The path of a file; `image 3` for the third image where it is none."""
    return fspath(picture) if isinstance(picture, str | PathLike) else f"image {number}"


def _prepare(
    model: Model,
    sources: Sequence[Picture | None],
    background: Color,
    failed: list[FailedImage],
) -> Iterator[Prepared]:
    for number, source in enumerate(sources, start=1):
        name = "synthetic" if source is None else picture_name(source, number)
        try:
            if source is None:
                picture = synthetic_image(model.input_size)
                decoded = DecodedImage(picture, "RGB", *picture.size, format=None)
            else:
                decoded = read_picture(source, background)
            pixels = torch.from_numpy(preprocess(decoded.image, model.preprocessing, name=name))
        except ImageError as error:
            failed.append(FailedImage(name, error.code, error.message))
        else:
            yield Prepared(name, decoded, pixels)
