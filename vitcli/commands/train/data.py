"""What a loop trains on: batches by step, so that a run can go on from any of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitcli.commands.train.seeds import derived_seed
from vitcli.config.schema import PreprocessConfig
from vitcli.images.shapes import VALIDATION, Shapes

Indices = Sequence[int] | NDArray[np.int64]
Batch = tuple[Tensor, Tensor]
"""Images (B, C, height, width) as the encoder reads them, and labels (B)."""


class TrainingData(Protocol):
    classes: tuple[str, ...]
    train_size: int
    val_size: int

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        """A batch for each (epoch, image indices)."""
        ...

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]: ...


def epoch_order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """The order of the training images in an epoch."""
    return np.random.default_rng(derived_seed(seed, "order", epoch)).permutation(size)


def batch_indices(
    seed: int, size: int, batch: int, steps: range, part: slice
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(epoch, image indices) of each step's part of the batch; a last short batch is left out."""
    per_epoch = size // batch
    order, of_epoch = np.empty(0, dtype=np.int64), -1
    for step in steps:
        epoch, place = divmod(step, per_epoch)
        if epoch != of_epoch:
            order, of_epoch = epoch_order(seed, epoch, size), epoch
        yield epoch, order[place * batch : (place + 1) * batch][part]


def channels(preprocess: PreprocessConfig) -> tuple[Tensor, Tensor]:
    """What to subtract from and multiply 8-bit levels with, (3, 1, 1) each."""
    mean, std = (
        torch.tensor(values).mul(255)[:, None, None] for values in (preprocess.mean, preprocess.std)
    )
    return mean, 1 / std


class ShapesSource:
    """Shapes, normalised as the encoder's preprocessing says."""

    def __init__(
        self, shapes: Shapes, train_size: int, val_size: int, preprocess: PreprocessConfig
    ) -> None:
        self.shapes = shapes
        self.classes = shapes.classes
        self.train_size = train_size
        self.val_size = val_size
        self.mean, self.scale = channels(preprocess)

    def _batch(self, indices: Indices) -> Batch:
        pixels, labels = self.shapes.batch(indices)
        images = torch.from_numpy(pixels).float().sub_(self.mean).mul_(self.scale)
        return images, torch.from_numpy(labels)

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        return (self._batch(indices) for _, indices in wanted)

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return (self._batch([VALIDATION + int(i) for i in indices]) for indices in wanted)
