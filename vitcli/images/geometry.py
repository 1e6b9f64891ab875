"""Where an encoder's patches lie in the picture as it was given, before resizing and cropping."""

from __future__ import annotations

from vitcli.config.schema import PreprocessConfig
from vitcli.images.patches import Box
from vitcli.images.preprocess import plan
from vitcli.nn.positions import Grid


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
