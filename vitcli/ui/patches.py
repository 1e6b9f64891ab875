"""Values of a patch grid laid on the pixels of the picture they belong to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitcli.images.patches import Box

LONGEST_SIDE = 448
"""Pixels of a picture's longer side in a figure; more only makes the file larger."""


def shrunk(picture: Any) -> NDArray[np.uint8]:
    """A Pillow picture as (height, width, 3), its longer side at most LONGEST_SIDE."""
    factor = min(1.0, LONGEST_SIDE / max(picture.size))
    size = tuple(max(1, round(side * factor)) for side in picture.size)
    small: NDArray[np.uint8] = np.asarray(picture.convert("RGB").resize(size, reducing_gap=2.0))
    return small


def scaled(box: Box, picture: Any, shown: NDArray[np.uint8]) -> Box:
    """A box in a Pillow picture's pixels as one in those of its `shrunk` form."""
    across, down = shown.shape[1] / picture.width, shown.shape[0] / picture.height
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def lay(values: Any, box: Box, height: int, width: int) -> NDArray[np.float64]:
    """Patch values (rows, columns, ...) as an image (height, width, ...); NaN outside the box.

    A pixel has the value of the patch under its center: what the encoder cannot tell apart is not
    made smooth.
    """
    grid = np.asarray(values, dtype=np.float64)
    left, top, right, bottom = box
    row = np.floor((np.arange(height) + 0.5 - top) / (bottom - top) * grid.shape[0]).astype(int)
    column = np.floor((np.arange(width) + 0.5 - left) / (right - left) * grid.shape[1]).astype(int)
    inside_y, inside_x = (
        (row >= 0) & (row < grid.shape[0]),
        (column >= 0) & (column < grid.shape[1]),
    )
    laid: NDArray[np.float64] = grid[row.clip(0, grid.shape[0] - 1)][
        :, column.clip(0, grid.shape[1] - 1)
    ]
    laid[~inside_y] = np.nan
    laid[:, ~inside_x] = np.nan
    return laid


def covered(box: Box, height: int, width: int) -> str:
    """The pixels under the map, in words."""
    left, top, right, bottom = (round(side) for side in box)
    whole = left <= 0 and top <= 0 and right >= width and bottom >= height
    if whole:
        return f"whole image, {width}x{height} px"
    across = f"x {max(left, 0)}-{min(right, width)}"
    down = f"y {max(top, 0)}-{min(bottom, height)}"
    return f"{across}, {down} of {width}x{height} px"


def bare(axes: Any, title: str = "") -> None:
    """No ticks; the frame stays off."""
    axes.set_axis_off()
    if title:
        axes.set_title(title, fontsize=7, pad=2)


def outline(axes: Any, box: Box, color: str = "yellow") -> None:
    """A frame, such as around what the patch grid covers."""
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    axes.add_patch(
        Rectangle((left - 0.5, top - 0.5), right - left, bottom - top, fill=False, ec=color, lw=0.8)
    )
