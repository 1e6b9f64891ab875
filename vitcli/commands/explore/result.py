"""The results of `vitcli explore` and `vitcli grid`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import FailedImage, ModelInfo, Result


@dataclass(frozen=True)
class ExploredEncoder:
    """The part of the page about one encoder."""

    model: ModelInfo
    layers: tuple[int, ...]
    """0 is the input of the first block, i the output of block i."""
    grids: tuple[tuple[int, int], ...]
    """(rows, columns) of patches, for each image."""
    directions: int
    """Directions of feature space that are kept, of `model.hidden`."""
    cosine_error: float
    """Largest error of a cosine similarity on the page, over a sample of pairs of patches."""
    attention_error: float
    """Largest error of an attention value on the page, relative to the largest of its map."""
    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    """What does not fit on the page, most useful first."""


@dataclass(frozen=True)
class ExploreResult(Result):
    """The page that `vitcli explore` wrote."""

    rows_at: ClassVar[str] = "encoders"

    path: str
    bytes: int
    images: tuple[str, ...]
    failed: tuple[FailedImage, ...]
    encoders: tuple[ExploredEncoder, ...]


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
