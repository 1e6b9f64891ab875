"""The synthetic classes: shapes drawn from (seed, index) alone, the same on every machine.

Only raw random bits, + - * /, square roots and comparisons are used: IEEE 754 rounds each of them
in one way, while sines, logarithms and matrix products differ between processors and libraries.
All shapes have the area of a circle of the same size, so that area says nothing of the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitcli.config.training import ShapesData
from vitcli.errors import VitcliError
from vitcli.files import atomic_write

Array = NDArray[np.float64]
Distance = Callable[[Array, Array], Array]
"""Signed distance (negative inside) of points (x right, y down) from a shape of area pi."""

DRAWS = 16
"""Random numbers an image is described by, before its noise."""
REACH = 1.7
"""No shape reaches farther than this many sizes from its center."""
VALIDATION = 1 << 40
"""Validation images are those from this index on: never seen in training."""


def _unit(points: int, turn: float) -> list[tuple[float, float]]:
    """Directions around the circle, rounded so that every libm gives the same ones."""
    angles = [2 * math.pi * (i + turn) / points for i in range(points)]
    return [(round(math.sin(a), 9), round(-math.cos(a), 9)) for a in angles]


def _polygon(sides: int) -> Distance:
    """A regular polygon standing on its base: the farthest of its sides' half-planes."""
    normals = _unit(sides, 0.5)
    inradius = round(math.sqrt(math.pi / (sides * math.tan(math.pi / sides))), 9)

    def distance(x: Array, y: Array) -> Array:
        out = normals[0][0] * x + normals[0][1] * y
        for a, b in normals[1:]:
            out = np.maximum(out, a * x + b * y)
        return out - inradius

    return distance


def _star(x: Array, y: Array) -> Array:
    """Five half-planes make a pentagram where at most one of them is left."""
    planes = [a * x + b * y for a, b in _unit(5, 0.5)]
    first = second = np.full_like(x, -np.inf)
    for plane in planes:
        first, second = np.maximum(first, plane), np.maximum(second, np.minimum(first, plane))
    return second - 0.516943


def _cross(x: Array, y: Array) -> Array:
    """Two bars, each three times as long as wide: 20/9 a^2 = pi."""
    x, y = np.abs(x), np.abs(y)
    long = 1.189
    return np.minimum(np.maximum(x - long, y - long / 3), np.maximum(x - long / 3, y - long))


def _ring(x: Array, y: Array) -> Array:
    """Outer radius R, inner radius R/2: 3/4 pi R^2 = pi."""
    outer = 1.1547
    return np.abs(np.sqrt(x * x + y * y) - 0.75 * outer) - 0.25 * outer


SHAPES: dict[str, Distance] = {
    "circle": lambda x, y: np.sqrt(x * x + y * y) - 1.0,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.886227,
    "triangle": _polygon(3),
    "cross": _cross,
    "diamond": lambda x, y: (np.abs(x) + np.abs(y)) * 0.707107 - 0.886227,
    "pentagon": _polygon(5),
    "hexagon": _polygon(6),
    "star": _star,
    "ring": _ring,
}


class Shapes:
    """An endless set of labeled images; image i is a function of (seed, i) and the settings.

    Args:
        size: (height, width) in pixels.
        classes: names out of `SHAPES`; the label is the place in this list.
        difficulty: 0 to 1; more rotation, less contrast, more noise.
    """

    def __init__(
        self, size: tuple[int, int], classes: Sequence[str], difficulty: float, seed: int
    ) -> None:
        self.size = size
        self.classes = tuple(classes)
        self.seed = seed
        self.half_turn = 0.06 + 0.12 * difficulty  # tan(angle / 2): 7 to 20 degrees
        self.contrast = 0.6 - 0.5 * difficulty  # least distance of the two colors, of 1
        self.noise = 0.05 + 0.35 * difficulty  # peak, of 1

    def _raw(self, index: int) -> NDArray[np.uint64]:
        height, width = self.size
        key = np.array([self.seed, index], dtype=np.uint64)
        raw: NDArray[np.uint64] = np.random.Philox(key=key).random_raw(
            DRAWS + -(-height * width * 3 * 2 // 8)
        )
        return raw

    def batch(
        self, indices: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Images (B, 3, height, width), 8 bits a channel, and labels (B)."""
        height, width = self.size
        raw = np.stack([self._raw(int(i)) for i in indices])
        u = (raw[:, :DRAWS] >> np.uint64(11)).astype(np.float64) * 2.0**-53  # (B, 16) in [0, 1)
        labels = (u[:, 0] * len(self.classes)).astype(np.int64)
        inside = self._coverage(u, labels)[:, None].astype(np.float32)  # (B, 1, height, width)
        back, fore = (color[:, :, None, None] for color in self._colors(u))  # (B, 3, 1, 1)
        pairs = raw[:, DRAWS:].astype("<u8").view(np.uint8)[:, : height * width * 6]
        pairs = pairs.reshape(-1, 2, 3, height, width).astype(np.int16)
        noise = pairs[:, 0] - pairs[:, 1]  # triangular on (-255, 255)
        pixels = (fore - back) * inside
        pixels += back
        pixels += noise * np.float32(self.noise)
        np.maximum(pixels, np.float32(0), out=pixels)
        np.minimum(pixels, np.float32(255), out=pixels)
        return (pixels + np.float32(0.5)).astype(np.uint8), labels

    def _coverage(self, u: Array, labels: NDArray[np.int64]) -> Array:
        """The part of each pixel that the shape covers, (B, height, width)."""
        height, width = self.size
        side = min(height, width)
        radius = side * (0.2 + 0.09 * u[:, 1])  # pixels, of the circle of equal area
        margin = REACH * radius
        column = margin + u[:, 2] * (width - 2 * margin)
        row = margin + u[:, 3] * (height - 2 * margin)
        t = self.half_turn * (2 * u[:, 4] - 1)
        cos, sin = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
        x = (np.arange(width) + 0.5)[None, :] - column[:, None]  # (B, width)
        y = (np.arange(height) + 0.5)[None, :] - row[:, None]  # (B, height)
        cos, sin = cos / radius, sin / radius
        along = (cos[:, None] * x)[:, None, :] + (sin[:, None] * y)[:, :, None]
        across = (cos[:, None] * y)[:, :, None] - (sin[:, None] * x)[:, None, :]
        distance = np.empty_like(along)
        for label in range(len(self.classes)):
            of = labels == label
            if of.any():
                distance[of] = SHAPES[self.classes[label]](along[of], across[of])
        return np.clip(0.5 - distance * radius[:, None, None], 0.0, 1.0)

    def _colors(self, u: Array) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Background and shape, (B, 3) each, 0 to 255; each channel differs by the contrast."""
        room = (1 - self.contrast) / 2
        dark, light = u[:, 5:8] * room, 1 - u[:, 8:11] * room
        swap = u[:, 11:12] < 0.5
        pair = np.where(swap, dark, light), np.where(swap, light, dark)
        return pair[0].astype(np.float32) * 255, pair[1].astype(np.float32) * 255


def draw_sheet(shapes: Shapes, path: Path, rows: int = 6, columns: int = 8) -> None:
    """Write a labeled sheet of the first images as a PNG or whatever the suffix says."""
    format_ = Image.registered_extensions().get(path.suffix.lower())
    if format_ not in Image.SAVE:
        raise VitcliError(f"{path}: cannot draw this format", "name a file that ends in .png")
    scale = max(1, 64 // min(shapes.size))
    height, width = (side * scale for side in shapes.size)
    caption, gap = 14, 4
    cell = (width + gap, height + gap + caption)
    sheet = Image.new("RGB", (columns * cell[0] + gap, rows * cell[1] + gap), "white")
    pen: Any = ImageDraw.Draw(sheet)
    images, labels = shapes.batch(range(rows * columns))
    for place, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        left, top = (place % columns) * cell[0] + gap, (place // columns) * cell[1] + gap
        picture = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
        sheet.paste(picture.resize((width, height), Image.Resampling.NEAREST), (left, top))
        pen.text((left, top + height), shapes.classes[label], fill="black")
    with atomic_write(path) as file:
        sheet.save(file, format=format_)


def synthetic_image(size: tuple[int, int] = (224, 224)) -> Image.Image:
    """An RGB picture of `size` (height, width), the same on every machine.

    A sky that fades downwards, a sun, hills with grass-like noise, a striped house: smooth
    regions, edges, fine texture and all hues, so that all patches differ.
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


def shapes(
    count: int,
    *,
    first: int = 0,
    size: int | tuple[int, int] = 32,
    classes: Sequence[str] = ShapesData().classes,
    difficulty: float = ShapesData().difficulty,
    seed: int = 0,
) -> tuple[list[NDArray[np.uint8]], list[str]]:
    """Images of shapes as `train_shapes` draws them, and the name of the shape in each.

    Args:
        first: the number of the first image; image i is a function of seed, i and the settings.
        size: (height, width) in pixels, or the side of a square.
        classes: names out of circle, square, triangle, cross and the other shapes.
        difficulty: 0 to 1; more rotation, less contrast, more noise.

    Each image is (H, W, 3), 8 bits a channel, as `Model.transform` reads it.
    """
    height, width = (size, size) if isinstance(size, int) else size
    drawn = Shapes((height, width), classes, difficulty, seed)
    pixels, labels = drawn.batch(range(first, first + count))
    images = [np.ascontiguousarray(image.transpose(1, 2, 0)) for image in pixels]
    return images, [drawn.classes[label] for label in labels]
