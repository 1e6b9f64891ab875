"""Mixup and CutMix: each image is mixed with its neighbour in the batch.

Partners are images 2i and 2i + 1, so that splitting an evenly sized batch over micro-batches or
processes mixes the same pairs. The order is shuffled, so neighbours are random.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitcli.config.training import TrainConfig


def swap_neighbours(x: Tensor) -> Tensor:
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
    """lam of each image and 1 - lam of its neighbour; within `box`, the neighbour's pixels.

    images (B, C, height, width); targets (B, K); box (top, left, bottom, right) in pixels.
    """
    partners = swap_neighbours(images)
    if box is None:
        images = torch.lerp(partners, images, lam)
    else:
        top, left, bottom, right = box
        images = images.clone()
        images[:, :, top:bottom, left:right] = partners[:, :, top:bottom, left:right]
        area = (bottom - top) * (right - left)
        lam = 1 - area / (images.shape[-2] * images.shape[-1])  # what the clipped box left
    return images, targets * lam + swap_neighbours(targets) * (1 - lam)


def cut_box(
    height: int, width: int, lam: float, random: np.random.Generator
) -> tuple[int, int, int, int]:
    """A box of about 1 - lam of the image around a uniform centre, clipped (Yun et al., eq. 2)."""
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
