"""The patch features of the images of a call as sheets to be drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath

import torch
from torch import Tensor
from torch.nn import functional as F

from vitcli.commands.attention.reductions import patch_index
from vitcli.config.request import layer_index
from vitcli.images.patches import Box, FeatureSheet, grid_box, patch_box
from vitcli.inference import Prepared
from vitcli.model import Model
from vitcli.nn.hooks import layer_points, tapped

COMPONENTS = 3
DEVIATIONS = 2.5
"""Standard deviations of a component from the middle of its color to the end."""


class PrincipalColors:
    """Colors of patch tokens by the principal components of all patches of all images of a call.

    So colors mean the same in every picture of the call. Components come largest variance first;
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

    def explained(self) -> tuple[float, float, float]:
        """The share of the patches' variance along each of the three axes."""
        assert isinstance(self.sum, Tensor) and isinstance(self.products, Tensor)
        mean = self.sum / self.count
        total = float((self.products / self.count).trace() - mean @ mean)
        _, axes, deviations = self.axes()
        shares = (axes.square().sum(0) * deviations.square() / (total or 1.0)).tolist()
        return shares[0], shares[1], shares[2]

    def colors(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Patch tokens (rows, columns, D) of each image -> colors (rows, columns, 3) in [0, 1]."""
        mean, axes, deviations = self.axes()
        scale = axes / (2 * DEVIATIONS * deviations)
        return [(0.5 + (image.double().cpu() - mean) @ scale).clamp(0, 1) for image in images]


def cosines_to(vector: Tensor, image: Tensor) -> Tensor:
    """A token (D,) and patch tokens (rows, columns, D) -> their cosines, (rows, columns)."""
    return F.cosine_similarity(image.double().cpu(), vector.double().cpu(), dim=-1)


MOST_SHEETS = 24
"""Images drawn in one figure; the colors are fitted over all."""


@dataclass
class FeatureCollector:
    """Around each forward pass of `encode`: keeps the patch tokens of one layer of each image.

    `layer` counts as in `layer_index`; None is what the encoder gives, after its final norm.
    `query` is "ROW,COL" of a patch of the first image, or None.
    """

    layer: int | None = None
    query: str | None = None
    pictures: list[object] = field(default_factory=list)
    """The Pillow images that `FeatureSheet.image` counts, at most MOST_SHEETS."""
    left_out: int = 0
    """Images in the fit that are not drawn."""
    _fit: PrincipalColors = field(default_factory=PrincipalColors)
    _tokens: list[Tensor] = field(default_factory=list)
    _boxes: list[Box] = field(default_factory=list)
    _titles: list[str] = field(default_factory=list)

    @contextmanager
    def __call__(self, model: Model, batch: Sequence[Prepared]) -> Iterator[None]:
        points = layer_points(model.encoder)
        depth = model.config.encoder.depth
        name, module = points[-1 if self.layer is None else layer_index(self.layer, depth)]
        grid = model.encoder.front_end.grid(batch[0].pixels)
        if self.query is not None and not self._tokens:
            patch_index(self.query, grid)
        kept: list[Tensor] = []
        with tapped([(module, lambda x: kept.append(x[:, model.encoder.prefix_tokens :].cpu()))]):
            yield
        self._fit.add(kept[0].flatten(0, 1))
        room = MOST_SHEETS - len(self.pictures)
        self.left_out += max(0, len(batch) - room)
        for item, tokens in zip(batch[:room], kept[0], strict=False):
            picture = item.decoded.image
            size = picture.height, picture.width
            self.pictures.append(picture)
            self._tokens.append(tokens.float().unflatten(0, grid))
            self._boxes.append(
                grid_box(model.preprocessing, size, grid, model.config.encoder.patch_size)
            )
            self._titles.append(f"{PurePath(item.path).name}, {model.name}, {name}")

    def sheets(self) -> list[FeatureSheet]:
        """One for each of the first images, colors fitted over all."""
        colors = self._fit.colors(self._tokens)
        cosines: list[Tensor | None] = [None] * len(colors)
        query_box = None
        if self.query is not None:
            rows, columns = self._tokens[0].shape[:2]
            row, column = divmod(patch_index(self.query, (rows, columns)), columns)
            cosines = [cosines_to(self._tokens[0][row, column], image) for image in self._tokens]
            query_box = patch_box(self._boxes[0], row, column, (rows, columns))
        return [
            FeatureSheet(
                image=image,
                title=title,
                box=box,
                colors=tuple(tuple((r, g, b) for r, g, b in row) for row in colors[image].tolist()),
                cosines=None if likeness is None else tuple(map(tuple, likeness.tolist())),
                query_box=query_box if image == 0 else None,
            )
            for image, (title, box, likeness) in enumerate(
                zip(self._titles, self._boxes, cosines, strict=True)
            )
        ]
