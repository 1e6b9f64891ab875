"""A built-in picture, so that `vitcli encode` answers without any file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def synthetic_image(size: tuple[int, int] = (224, 224)) -> Image.Image:
    """An RGB picture of `size` (height, width), the same on every machine.

    A sky that fades downwards, a sun, hills with grass-like noise, a striped house: smooth
    regions, edges, fine texture and all hues, so that no two patches are alike.
    """
    height, width = size
    rows, columns = np.mgrid[0:height, 0:width]
    y, x = rows / height, columns / width  # in 0..1, from the top left
    noise = _noise(rows.astype(np.uint32), columns.astype(np.uint32))
    sky = np.stack([90 + 120 * y, 150 + 70 * y, 235 - 40 * y], axis=-1)
    hills = 0.62 + 0.07 * _wave(x * 1.5) - 0.04 * _wave(x * 4 + 0.3)
    grass = np.stack([50 + 90 * noise, 110 + 100 * noise - 40 * y, 30 + 40 * noise], axis=-1)
    picture = np.where((y > hills)[..., None], grass, sky)
    sun = (x - 0.76) ** 2 + (y - 0.2) ** 2 < 0.1**2
    picture[sun] = (250, 225, 90)
    house = (abs(x - 0.33) < 0.15) & (abs(y - 0.63) < 0.15)
    brick = (np.floor(y * 40) % 2 == 0) ^ (np.floor(x * 28) % 4 == 0)
    picture[house] = np.where(brick[..., None], (178, 72, 58), (205, 190, 175))[house]
    roof = (y > 0.3) & (y < 0.48) & (abs(x - 0.33) < (y - 0.3) * 1.1)
    picture[roof] = (92, 42, 96)
    window = (abs(x - 0.33) < 0.05) & (abs(y - 0.6) < 0.05)
    picture[window] = (40, 60, 110)
    return Image.fromarray(np.clip(picture + 6 * (noise - 0.5)[..., None], 0, 255).astype(np.uint8))


def _wave(turns: NDArray[np.float64]) -> NDArray[np.float64]:
    """A smooth wave of period 1 in -1..1 from parabolas: exact arithmetic, no libm."""
    phase = turns - np.floor(turns)
    half = phase % 0.5
    return np.asarray(np.where(phase < 0.5, 16, -16) * half * (0.5 - half))


def _noise(y: NDArray[np.uint32], x: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Repeatable noise in 0..1 from an integer hash of the pixel's coordinates."""
    bits = x * np.uint32(374761393) + y * np.uint32(668265263)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(1274126177)
    return np.asarray(((bits ^ (bits >> np.uint32(16))) & np.uint32(0xFFFF)) / 65535)
