"""One figure of several encoders and layers: features as principal-component colors.

The patches of all chosen layers and images of an encoder share one basis, after each layer was
centered and scaled to total variance 1, so that colors in one row can be compared.
Foreground is one side of the first component, as in Oquab et al. 2023 (DINOv2), figure 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitcli.commands.encode.analysis import PrincipalColors, not_finite
from vitcli.commands.explore.analysis import Source, choose_layers, models_of, read_images
from vitcli.errors import VitcliError
from vitcli.images.preprocess import Box
from vitcli.model import (
    Color,
    Model,
    Pictures,
    Prepared,
    covered_box,
    model_info,
    picture_list,
    stacked,
)
from vitcli.results import QUIET, FailedImage, ModelInfo, Progress, Result
from vitcli.stats import all_finite


@dataclass(frozen=True)
class GridPanel:
    """One image at one layer of one encoder."""

    image: int
    """Which of the result's images, from 0."""
    layer: int
    """0 is the input of the first block, i the output of block i."""
    colors: tuple[tuple[tuple[float, float, float] | None, ...], ...]
    """Red, green and blue in [0, 1] for each patch, by rows; None where it is background."""


@dataclass(frozen=True)
class GridRow:
    """One encoder; its panels share one basis of principal components."""

    model: ModelInfo
    layers: tuple[int, ...]
    boxes: tuple[tuple[float, float, float, float], ...]
    """The part of each image that the patch grid covers: left, top, right, bottom in its pixels."""
    explained: tuple[float, float, float]
    """Share of the variance of the colored patches along each of the three components."""
    foreground: float | None
    """Share of patches in the foreground; None where all patches are colored."""
    foreground_explained: float | None
    """Share of variance along the component that separates it."""
    panels: tuple[GridPanel, ...]


@dataclass(frozen=True)
class GridResult(Result):
    """What `vitcli grid` draws: encoders down, layers across."""

    view_prefix: ClassVar[str] = "grid_"
    rows_at: ClassVar[str] = "encoders"

    images: tuple[str, ...]
    failed: tuple[FailedImage, ...]
    encoders: tuple[GridRow, ...]


def grid(
    models: Source | Sequence[Source],
    images: Pictures = (),
    *,
    layers: Sequence[int] | None = None,
    foreground: bool = True,
    background: Color = (255, 255, 255),
    progress: Progress = QUIET,
) -> GridResult:
    """Features of images as colors, one row per encoder and image, one column per layer.

    Args:
        models: encoders: models, or what `vitcli.load` takes.
        images: as in `Model.transform`; by default the built-in image.
        layers: 0 is the input of the first block, i the output of block i, -1 the last; by
            default four, evenly spaced, with the last.
        foreground: color only the side of the first component that touches less of the border.

    Raises:
        VitcliError: a layer that an encoder does not have, no image that could be read, or
            features that are not finite.
    """
    loaded, images = models_of(models), picture_list(images)
    if not loaded:
        raise VitcliError("grid: no encoder", "name at least one")
    chosen = [choose_layers(model, layers) for model in loaded]
    hint = "vitcli grid photo.jpg --plot grid.png"
    prepared, failed = read_images(loaded, images, background, "grid", hint)
    rows: list[GridRow] = []
    for number, (model, pictures) in enumerate(zip(loaded, prepared, strict=True)):
        tokens: list[dict[int, Tensor]] = []
        boxes: list[Box] = []
        for place, item in enumerate(pictures, start=1):
            tokens.append(_tokens(model, item, chosen[number]))
            rows_columns = tokens[-1][chosen[number][0]].shape[:2]
            boxes.append(covered_box(model, item, (rows_columns[0], rows_columns[1])))
            progress(number * len(pictures) + place, len(loaded) * len(pictures))
        rows.append(_row(model, chosen[number], tokens, boxes, foreground))
    names = tuple(item.path for item in prepared[0])
    return GridResult(names, tuple(failed), tuple(rows))


def _tokens(model: Model, item: Prepared, layers: Sequence[int]) -> dict[int, Tensor]:
    """By layer: the patch tokens (rows, columns, D) of one image."""
    found = model.features(stacked(model, [item]), layers).layers
    tokens = {layer: found[layer].patches[0].cpu().double() for layer in layers}
    for layer, patches in tokens.items():
        if not all_finite(patches):
            raise not_finite(model, f"layer {layer}")
    return tokens


def _row(
    model: Model,
    layers: Sequence[int],
    tokens: Sequence[dict[int, Tensor]],
    boxes: Sequence[Box],
    foreground: bool,
) -> GridRow:
    side = _foreground([image[layers[-1]] for image in tokens]) if foreground else None
    everywhere = [torch.ones(image[layers[0]].shape[:2]).bool() for image in tokens]
    masks, separated = side or (everywhere, None)
    tokens = _standardized(layers, tokens, masks)
    fit = PrincipalColors()
    for image, mask in zip(tokens, masks, strict=True):
        for layer in layers:
            fit.add(image[layer][mask])
    panels = []
    for place, (image, mask) in enumerate(zip(tokens, masks, strict=True)):
        for layer, colors in zip(layers, fit.colors([image[i] for i in layers]), strict=True):
            values = tuple(
                tuple(
                    (r, g, b) if shown else None
                    for (r, g, b), shown in zip(line, chosen, strict=True)
                )
                for line, chosen in zip(colors.tolist(), mask.tolist(), strict=True)
            )
            panels.append(GridPanel(place, layer, values))
    share = torch.cat([mask.flatten() for mask in masks]).double().mean()
    return GridRow(
        model=model_info(model),
        layers=tuple(layers),
        boxes=tuple(boxes),
        explained=fit.explained(),
        foreground=float(share) if side else None,
        foreground_explained=separated,
        panels=tuple(panels),
    )


def _standardized(
    layers: Sequence[int], tokens: Sequence[dict[int, Tensor]], masks: Sequence[Tensor]
) -> list[dict[int, Tensor]]:
    """Each layer with mean 0 and total variance 1 over its colored patches of all images.

    Otherwise the layer with the longest vectors, mostly the last, would determine the basis.
    """
    found: list[dict[int, Tensor]] = [{} for _ in tokens]
    for layer in layers:
        colored = torch.cat([image[layer][m] for image, m in zip(tokens, masks, strict=True)])
        mean = colored.mean(0)
        spread = (colored - mean).square().sum(-1).mean().sqrt()
        for place, image in enumerate(tokens):
            found[place][layer] = (image[layer] - mean) / (spread if spread > 0 else 1.0)
    return found


def _foreground(images: Sequence[Tensor]) -> tuple[list[Tensor], float] | None:
    """The side of the first component, from its mean, that touches less of the images' border.

    A mask (rows, columns) of each image, and the share of variance along the component; None where
    patches do not vary or one side is empty.
    """
    fit = PrincipalColors()
    for image in images:
        fit.add(image.flatten(0, 1))
    mean, axes, _ = fit.axes()
    along = [(image - mean) @ axes[:, 0] > 0 for image in images]
    edge, count = 0.0, 0
    for mask in along:
        border = torch.ones_like(mask)
        border[1:-1, 1:-1] = False
        edge += float(mask[border].sum())
        count += int(border.sum())
    masks = along if edge <= count / 2 else [~mask for mask in along]
    if not any(bool(mask.any()) for mask in masks):
        return None
    return masks, fit.explained()[0]
