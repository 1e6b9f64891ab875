"""The images of a call as batches that an encoder can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from vitcli.images.decode import DecodedImage, ImageError, decode
from vitcli.images.preprocess import preprocess
from vitcli.images.shapes import synthetic_image
from vitcli.model import Model
from vitcli.results import FailedImage

BATCH = 16
"""Images in one forward pass; more make a CPU no faster and the activations larger."""

Color = tuple[int, int, int]
Advance = Callable[[int, int], None]
"""Told (done, total) as work goes on."""


@dataclass(frozen=True)
class Prepared:
    """An image as the encoder reads it, and where it came from."""

    path: str
    decoded: DecodedImage
    pixels: Tensor
    """(3, height, width) in float32."""


def image_batches(
    model: Model,
    paths: Sequence[str],
    background: Color,
    failed: list[FailedImage],
    size: int = BATCH,
) -> Iterator[list[Prepared]]:
    """Images in order, up to `size` neighbors of equal shape at a time.

    Without paths it is the built-in synthetic image. One that cannot be read goes to `failed`.

    Raises:
        VitcliError: an encoder that does not read RGB, or whose preprocessing nothing tells.
    """
    model.check_reads_images()
    prepared = _prepare(model, [*paths] or [None], background, failed)
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


def _prepare(
    model: Model,
    sources: Sequence[str | None],
    background: Color,
    failed: list[FailedImage],
) -> Iterator[Prepared]:
    for source in sources:
        try:
            if source is None:
                picture = synthetic_image(model.input_size)
                decoded = DecodedImage(picture, "RGB", *picture.size, format=None)
            else:
                decoded = decode(source, background=background)
            pixels = torch.from_numpy(
                preprocess(decoded.image, model.preprocessing, name=str(source))
            )
        except ImageError as error:
            failed.append(FailedImage(str(source), error.code, error.message))
        else:
            yield Prepared("synthetic" if source is None else source, decoded, pixels)
