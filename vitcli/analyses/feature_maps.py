"""Patch features as pictures: principal components as colours, and likeness to one patch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

COMPONENTS = 3
DEVIATIONS = 2.5
"""Standard deviations of a component from the middle of its colour to the end."""


def principal_colours(images: Sequence[Tensor]) -> list[Tensor]:
    """Patch tokens (rows, columns, D) of each image -> colours (rows, columns, 3) in [0, 1].

    The components are those of all patches of all images together, largest variance first, so
    colours mean the same in every picture of a call. The sign of a component makes its entry of
    largest absolute value positive; its mean is 0.5 and `DEVIATIONS` standard deviations reach 0
    and 1. A component without variance stays at 0.5.
    """
    patches = torch.cat([image.flatten(0, 1) for image in images]).double().cpu()  # (n, D)
    mean = patches.mean(0)
    axes, deviations = principal_axes(patches - mean)
    return [
        (0.5 + (image.double().cpu() - mean) @ axes / (2 * DEVIATIONS * deviations)).clamp(0, 1)
        for image in images
    ]


def principal_axes(centred: Tensor) -> tuple[Tensor, Tensor]:
    """(n, D) -> unit axes (D, 3) of fixed sign and the standard deviation along each, (3,).

    A direction in which the data do not vary beyond rounding is a zero axis with deviation 1.
    """
    n, channels = centred.shape
    variances, axes = torch.linalg.eigh(centred.T @ centred / n)  # ascending
    variances, axes = variances.flip(0)[:COMPONENTS], axes.flip(1)[:, :COMPONENTS]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    axes = axes * largest.sign()
    flat = variances <= max(variances[0].item(), 1e-300) * channels * torch.finfo(axes.dtype).eps
    axes, variances = axes.masked_fill(flat, 0.0), variances.masked_fill(flat, 1.0)
    missing = COMPONENTS - axes.shape[1]
    return F.pad(axes, (0, missing)), F.pad(variances.sqrt(), (0, missing), value=1.0)


def query_cosines(image: Tensor, row: int, column: int) -> Tensor:
    """Patch tokens (rows, columns, D) -> each patch's cosine to the one chosen, (rows, columns)."""
    image = image.double().cpu()
    return F.cosine_similarity(image, image[row, column], dim=-1)
