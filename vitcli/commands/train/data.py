"""What a loop trains on: batches by step, so that a run can go on from any of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitcli.commands.train.inputs import derived_seed
from vitcli.config.schema import PreprocessConfig
from vitcli.config.training import TrainConfig
from vitcli.images.shapes import VALIDATION, Shapes

Indices = Sequence[int] | NDArray[np.int64]
Batch = tuple[Tensor, Tensor]
"""Images (B, C, height, width) as the encoder reads them, and labels (B)."""


class TrainingData(Protocol):
    classes: tuple[str, ...]
    train_size: int
    val_size: int
    unreadable: dict[str, str]
    """Path -> reason of each image that was left out so far."""

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        """A batch for each (epoch, image indices)."""
        ...

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        """Labels below zero are of images that count nowhere."""
        ...


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
    """Shapes, normalized as the encoder's preprocessing says."""

    def __init__(
        self, shapes: Shapes, train_size: int, val_size: int, preprocess: PreprocessConfig
    ) -> None:
        self.shapes = shapes
        self.classes = shapes.classes
        self.train_size = train_size
        self.val_size = val_size
        self.unreadable: dict[str, str] = {}
        self.mean, self.scale = channels(preprocess)

    def _batch(self, indices: Indices) -> Batch:
        pixels, labels = self.shapes.batch(indices)
        images = torch.from_numpy(pixels).float().sub_(self.mean).mul_(self.scale)
        return images, torch.from_numpy(labels)

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        return (self._batch(indices) for _, indices in wanted)

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return (self._batch([VALIDATION + int(i) for i in indices]) for indices in wanted)


def seed_cpu(seed: int) -> None:
    """Seed torch's CPU generator alone; `torch.manual_seed` takes a millisecond for the others."""
    torch.default_generator.manual_seed(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators that a model on this device draws from."""
    seed_cpu(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def swap_neighbors(x: Tensor) -> Tensor:
    """(B, ...) with rows 2i and 2i + 1 exchanged; B is even."""
    swapped: Tensor = x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return swapped


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """(B) -> (B, K): one-hot rows moved by `smoothing` towards uniform; each sums to one."""
    hot = F.one_hot(labels, classes).float()
    return hot * (1 - smoothing) + smoothing / classes


def mix(
    images: Tensor, targets: Tensor, lam: float, box: tuple[int, int, int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """lam of each image and 1 - lam of its neighbor; within `box`, the neighbor's pixels.

    images (B, C, height, width); targets (B, K); box (top, left, bottom, right) in pixels.
    """
    partners = swap_neighbors(images)
    if box is None:
        images = torch.lerp(partners, images, lam)
    else:
        top, left, bottom, right = box
        images = images.clone()
        images[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
        area = (bottom - top) * (right - left)
        lam = 1 - area / (images.shape[-2] * images.shape[-1])  # what the clipped box left
    return images, targets * lam + swap_neighbors(targets) * (1 - lam)


def cut_box(
    height: int, width: int, lam: float, random: np.random.Generator
) -> tuple[int, int, int, int]:
    """A box of about 1 - lam of the image around a uniform center, clipped (Yun et al., eq. 2)."""
    side = (1 - lam) ** 0.5
    half = int(height * side) // 2, int(width * side) // 2
    row, column = int(random.integers(height)), int(random.integers(width))
    return (
        max(row - half[0], 0),
        max(column - half[1], 0),
        min(row + half[0], height),
        min(column + half[1], width),
    )


def mix_batch(
    images: Tensor, targets: Tensor, train: TrainConfig, seed: int
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix as the recipe says, drawn from the step's seed."""
    if not (train.mixup or train.cutmix):
        return images, targets
    random = np.random.default_rng(seed)
    cut = bool(train.cutmix) and (not train.mixup or random.random() < 0.5)
    alpha = train.cutmix if cut else train.mixup
    lam = float(random.beta(alpha, alpha))
    box = cut_box(images.shape[-2], images.shape[-1], lam, random) if cut else None
    return mix(images, targets, lam, box)
