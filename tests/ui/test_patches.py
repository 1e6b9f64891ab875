"""Maps must land on the pixels that their patches were made from, at any aspect."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vitcli.config.schema import PreprocessConfig
from vitcli.images.preprocess import grid_box, preprocess
from vitcli.ui.figures import LONGEST_SIDE, covered, lay, scaled, shrunk

CROP = PreprocessConfig(resize="shortest", resize_size=(256, 256), crop_size=(224, 224))
SQUASH = PreprocessConfig()
SMART = PreprocessConfig(resize="smart", resize_size=None, multiple=28)
AS_IS = PreprocessConfig(resize="none", resize_size=None)
PADDED = PreprocessConfig(resize="none", resize_size=None, crop_size=(512, 512))


def bright_square(width: int, height: int, side: int) -> tuple[Image.Image, slice, slice]:
    pixels = np.zeros((height, width, 3), np.uint8)
    top, left = int(0.55 * (height - side)), int(0.4 * (width - side))
    rows, columns = slice(top, top + side), slice(left, left + side)
    pixels[rows, columns] = 255
    return Image.fromarray(pixels), rows, columns


def shrink(where: slice, by: int) -> slice:
    return slice(max(where.start + by, 0), max(where.stop - by, 0))


@pytest.mark.parametrize("config", [CROP, SQUASH, SMART, AS_IS, PADDED], ids=lambda c: c.resize)
@pytest.mark.parametrize("size", [(400, 400), (640, 360), (300, 620), (223, 501), (900, 300)])
@pytest.mark.parametrize("patch", [14, 16])
def test_a_bright_square_is_found_where_it_is(
    config: PreprocessConfig, size: tuple[int, int], patch: int
) -> None:
    """The map is each patch's mean brightness, so it must light up the square and nothing else."""
    picture, rows, columns = bright_square(*size, side=150)
    pixels = preprocess(picture, config)[0]
    grid = pixels.shape[0] // patch, pixels.shape[1] // patch
    whole = pixels[: grid[0] * patch, : grid[1] * patch]
    brightness = whole.reshape(grid[0], patch, grid[1], patch).mean((1, 3))
    brightness = (brightness - brightness.min()) / (brightness.max() - brightness.min())
    box = grid_box(config, (picture.height, picture.width), grid, patch)
    laid = lay(brightness, box, picture.height, picture.width)

    assert laid.shape == (picture.height, picture.width)
    # Pixels a patch or more from the square's edges, at the picture's own scale.
    across = int(np.ceil((box[2] - box[0]) / grid[1])) + 2
    down = int(np.ceil((box[3] - box[1]) / grid[0])) + 2
    core, halo = np.zeros(laid.shape, bool), np.zeros(laid.shape, bool)
    core[shrink(rows, down), shrink(columns, across)] = True
    halo[shrink(rows, -down), shrink(columns, -across)] = True
    assert core.any()
    assert (laid[core & ~np.isnan(laid)] > 0.95).all()
    assert not np.isnan(laid[core]).all()
    assert (laid[~halo & ~np.isnan(laid)] < 0.05).all()
    lit = np.argwhere(laid > 0.5)
    center = np.array([(rows.start + rows.stop - 1) / 2, (columns.start + columns.stop - 1) / 2])
    assert (np.abs(lit.mean(0) - center) < (down / 2 + 1, across / 2 + 1)).all()


def test_outside_the_crop_there_is_no_map() -> None:
    box = grid_box(CROP, (300, 600), (14, 14), 16)
    laid = lay(np.ones((14, 14)), box, 300, 600)
    # Resized to 512x256, cropped at x 144 to 368, y 16 to 240: times 300/256.
    assert box == pytest.approx((168.75, 18.75, 431.25, 281.25))
    seen = ~np.isnan(laid)
    assert seen[19:281, 169:431].all()
    assert seen.sum() == 262 * 262
    assert covered(box, 300, 600) == "x 169-431, y 19-281 of 600x300 px"


def test_trailing_pixels_are_not_covered() -> None:
    box = grid_box(AS_IS, (50, 100), (3, 6), 16)
    assert box == (0, 0, 96, 48)
    assert covered(box, 50, 100) == "x 0-96, y 0-48 of 100x50 px"
    assert covered((0, 0, 100, 50), 50, 100) == "whole image, 100x50 px"


def test_a_patch_has_its_own_pixels_and_no_smoothing() -> None:
    laid = lay([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], (0, 0, 6, 4), 4, 6)
    assert laid[0].tolist() == [1, 1, 2, 2, 3, 3]
    assert laid[:, 0].tolist() == [1, 1, 4, 4]


def test_colors_are_laid_channel_by_channel() -> None:
    colors = np.random.default_rng(0).random((2, 3, 3))
    laid = lay(colors, (0, 0, 30, 20), 20, 30)
    assert laid.shape == (20, 30, 3)
    assert (laid[10:, 20:] == colors[1, 2]).all()


def test_a_large_picture_is_shrunk_and_its_box_with_it() -> None:
    shown = shrunk(Image.new("RGB", (4000, 1000)))
    assert shown.shape == (LONGEST_SIDE // 4, LONGEST_SIDE, 3)
    box = scaled((1000, 0, 3000, 1000), Image.new("RGB", (4000, 1000)), shown)
    assert box == pytest.approx((LONGEST_SIDE / 4, 0, 3 * LONGEST_SIDE / 4, LONGEST_SIDE / 4))
    assert shrunk(Image.new("RGB", (30, 20))).shape == (20, 30, 3)
