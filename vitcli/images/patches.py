"""Values of patch grids, ready to be laid on the pictures they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from vitcli.config.schema import PreprocessConfig
from vitcli.config.variants import Grid
from vitcli.images.preprocess import plan

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of a picture."""


@dataclass(frozen=True)
class MapPanel:
    title: str
    values: tuple[tuple[float, ...], ...]
    """A value for each patch, by rows."""


@dataclass(frozen=True)
class MapSheet:
    """Attention maps of one image by one block of one encoder."""

    image: int
    """Which picture of the figure the maps belong to."""
    title: str
    box: Box
    """What the patch grid covers of the picture."""
    query_box: Box | None
    """The query's own patch, where it is one."""
    panels: tuple[MapPanel, ...]


@dataclass(frozen=True)
class FeatureSheet:
    """The patch features of one image as colors, and their cosine to one patch."""

    image: int
    title: str
    box: Box
    colors: tuple[tuple[tuple[float, float, float], ...], ...]
    """Red, green and blue in [0, 1] for each patch, by rows: the principal components."""
    cosines: tuple[tuple[float, ...], ...] | None
    query_box: Box | None
    """The chosen patch, on the picture that holds it."""


def grid_box(
    preprocess: PreprocessConfig, size: tuple[int, int], grid: Grid, patch_size: int
) -> Box:
    """What the patch grid covers of a picture of `size` (height, width), in its own pixels.

    The grid starts at the top left of what the encoder reads; trailing pixels that fill no patch
    are outside, and a padded crop reaches over the picture's edges.
    """
    steps = plan(preprocess, height=size[0], width=size[1])
    (top, left), (height, width) = steps.offset, steps.resized
    down, across = size[0] / height, size[1] / width
    return (
        left * across,
        top * down,
        (left + grid[1] * patch_size) * across,
        (top + grid[0] * patch_size) * down,
    )


def patch_box(box: Box, row: int, column: int, grid: Grid) -> Box:
    """The pixels of one patch of a grid that covers `box`."""
    left, top, right, bottom = box
    width, height = (right - left) / grid[1], (bottom - top) / grid[0]
    x, y = left + column * width, top + row * height
    return x, y, x + width, y + height
