"""Patch features as pictures: principal components as colours, and likeness to one patch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

COMPONENTS = 3
DEVIATIONS = 2.5
"""Standard deviations of a component from the middle of its colour to the end."""


class PrincipalColours:
    """Colours of patch tokens by the principal components of all patches of all images of a call.

    So colours mean the same in every picture of the call. Components come largest variance first;
    the sign of each makes its entry of largest absolute value positive; its mean is 0.5 and
    `DEVIATIONS` standard deviations reach 0 and 1. A component without variance stays at 0.5.
    Only moments are kept, so memory does not grow with the number of images.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum: Tensor | float = 0.0
        self.products: Tensor | float = 0.0

    def add(self, patches: Tensor) -> None:
        """Take patches (n, D) into the fit."""
        patches = patches.double().cpu()
        self.count += len(patches)
        self.sum = self.sum + patches.sum(0)
        self.products = self.products + patches.T @ patches

    def axes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (D,), unit axes (D, 3) and the standard deviation along each, (3,).

        A direction in which the patches do not vary beyond rounding is a zero axis of deviation 1.
        """
        assert isinstance(self.sum, Tensor) and isinstance(self.products, Tensor)
        mean, moments = self.sum / self.count, self.products / self.count
        variances, axes = torch.linalg.eigh(moments - mean[:, None] * mean)  # ascending
        variances, axes = variances.flip(0)[:COMPONENTS], axes.flip(1)[:, :COMPONENTS]
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        rounding = float(moments.trace()) * len(mean) * torch.finfo(axes.dtype).eps
        flat = variances <= rounding
        axes, variances = axes.masked_fill(flat, 0.0), variances.masked_fill(flat, 1.0)
        missing = COMPONENTS - axes.shape[1]
        return mean, F.pad(axes, (0, missing)), F.pad(variances.sqrt(), (0, missing), value=1.0)

    def colours(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Patch tokens (rows, columns, D) of each image -> colours (rows, columns, 3) in [0, 1]."""
        mean, axes, deviations = self.axes()
        scale = axes / (2 * DEVIATIONS * deviations)
        return [(0.5 + (image.double().cpu() - mean) @ scale).clamp(0, 1) for image in images]


def cosines_to(vector: Tensor, image: Tensor) -> Tensor:
    """A token (D,) and patch tokens (rows, columns, D) -> their cosines, (rows, columns)."""
    return F.cosine_similarity(image.double().cpu(), vector.double().cpu(), dim=-1)
