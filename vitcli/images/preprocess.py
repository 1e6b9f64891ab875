"""From RGB pixels to the array the encoder reads, as the source of the weights does it.

The maps of patches that lie on a picture have their boxes here too, from the same plan.
H, W = size of the decoded image, h, w = size of the result. Needs Pillow and numpy only.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitcli.config.schema import PreprocessConfig
from vitcli.config.variants import Grid
from vitcli.files import printable
from vitcli.images.decode import ImageError

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_MAX_ASPECT = 200
"""Qwen2-VL refuses a longer side above this many times the shorter."""
_MAX_RESIZED_PIXELS = 2**26
"""Above this a resized image is not made whole: only what the crop keeps of it is."""
Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of a picture."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to one image, in pixels; all pairs are (height, width) or (top, left)."""

    source: tuple[int, int]
    resized: tuple[int, int]
    crop: tuple[int, int] | None
    """Size of the center crop, or None where there is none."""
    offset: tuple[int, int]
    """Where the crop begins in the resized image; negative where a margin is before it."""
    before: tuple[tuple[int, int], ...] = ()
    """Sizes that the image is resized to first, one after another."""
    part: Box | None = None
    """What of the source is resized; None is all of it."""
    square: tuple[int, int, int] | None = None
    """Height and width of the image in the middle of a square, and its side; the square, in pixels
    of the source, is `part`."""

    @property
    def output(self) -> tuple[int, int]:
        return self.crop or self.resized

    @property
    def padded(self) -> bool:
        return self.crop is not None and any(
            crop > side for crop, side in zip(self.crop, self.resized, strict=True)
        )


def plan(config: PreprocessConfig, width: int, height: int, label: str = "") -> Plan:
    """The sizes that `preprocess` goes through for an image of this width and height.

    Raises ImageError (`unsupported`) where the resize rule refuses such an aspect ratio, and
    VitcliError for a `fit` without a size.
    """
    if config.fit:
        return _fitted(config.fit, config.fit_size, height, width)
    source, part, square = (height, width), None, None
    if config.square is not None:
        high, wide, side = square = _square(config, height, width)
        down, across = height / high, width / wide
        top, left = -down * ((side - high) // 2), -across * ((side - wide) // 2)
        part = (left, top, left + across * side, top + down * side)
        height = width = side
    resized = _resized_size(config, height, width, label or f"{width}x{height} px")
    crop, offset = config.crop_size, (0, 0)
    before = _tile_steps(config, height, width) if config.resize == "tile" else ()
    if crop:
        top, left = (
            _offset(side - target, config.crop_rounding)
            for side, target in zip(resized, crop, strict=True)
        )
        offset = top, left
    elif config.resize == "canvas" and resized != config.resize_size:
        crop = config.resize_size
    elif config.fill:
        rows, columns = (-(-side // config.fill) * config.fill for side in resized)
        crop = (rows, columns) if (rows, columns) != resized else None
    return Plan(source, resized, crop, offset, before, part, square)


def preprocess(
    image: Image.Image, config: PreprocessConfig, *, name: str = "the image"
) -> NDArray[np.float32]:
    """Resize, crop, divide by 255 and normalize an RGB image: float32 (3, h, w).

    With `resize_dtype: uint8` the resized image has 8 bits, as in transformers' Pillow
    processors, timm, torchvision and open_clip on Pillow images: its pixels equal theirs. With
    `float32` (DINOv3) the division comes first and each channel is resized in float.
    An image whose resized form would have more than 2**26 pixels is resized only where the crop
    keeps it: the same to an 8-bit level, but for some edges where a filter overshoots.
    `name` is how errors call the image.

    Raises ImageError: `too_large` where the result itself would be above that, `unsupported` for
    an aspect ratio that the resize rule refuses, `out_of_memory`.
    """
    return normalize(levels(image, config, name=name), config)


def levels(
    image: Image.Image, config: PreprocessConfig, *, name: str = "the image"
) -> NDArray[np.uint8] | NDArray[np.float32]:
    """`preprocess` before its last step: resized and cropped, not normalized.

    With `resize_dtype: uint8` these are 8-bit levels (h, w, 3), a quarter of what the encoder
    reads; with `float32` values from 0 to 1 (3, h, w).

    Raises ImageError: as `preprocess`.
    """
    label = f"{printable(name)}: {image.width}x{image.height} px"
    steps = plan(config, image.width, image.height, label)
    for height, width in (*([steps.square[2:] * 2] if steps.square else []), steps.output):
        if height * width > _MAX_RESIZED_PIXELS:
            raise ImageError(
                "too_large",
                f"{label}: becomes {width}x{height} px",
                "give crop_size, or resize: squash",
            )
    resampling = _FILTERS[config.filter]
    fill = margin_color(config) if config.fit else (0, 0, 0)
    try:
        if steps.square:
            image = _in_square(image, steps.square, resampling, margin_color(config))
        if config.resize_dtype == "uint8":
            return np.asarray(_transform(image, steps, resampling, fill))
        # Dividing by 255 after the resize instead of before it is the same but for rounding.
        channels = (
            _transform(c.convert("F"), steps, resampling, 255 * value if config.fit else 0)
            for c, value in zip(image.split(), config.mean, strict=True)
        )
        unit = np.stack([np.asarray(channel) for channel in channels]) / 255
        return np.asarray(unit, dtype=np.float32)
    except MemoryError as error:
        raise ImageError("out_of_memory", f"{label}: no memory left to resize it") from error


def margin_color(config: PreprocessConfig) -> tuple[int, int, int]:
    """What is around an image: the mean with `fit` and in a `square`, else black."""
    if not config.fit and config.square is None:
        return 0, 0, 0
    levels = (round(255 * v) if config.fit else int(255 * v) for v in config.mean)
    red, green, blue = (min(max(level, 0), 255) for level in levels)
    return red, green, blue


def normalize(
    pixels: NDArray[np.uint8] | NDArray[np.float32],
    config: PreprocessConfig,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """What `levels` gives to float32 (3, h, w): (value - mean) / std of values from 0 to 1.

    Into `out` where it is given: new memory for each image takes longer than the arithmetic.
    """
    mean, std = (np.array(v, np.float32).reshape(3, 1, 1) for v in (config.mean, config.std))
    unit = pixels.dtype == np.float32
    planes = pixels if unit else pixels.transpose(2, 0, 1)
    result = np.empty(planes.shape, np.float32) if out is None else out
    result[...] = planes  # first: arithmetic on channels that lie apart takes twice as long
    if not unit:
        result /= np.float32(255)
    result -= mean
    result /= std
    return result


def _transform(
    image: Image.Image, steps: Plan, resampling: Image.Resampling, fill: Any
) -> Image.Image:
    """Resize and crop one image, RGB or one float channel; `fill` is the color of a margin."""
    (height, width), (top, left), (h, w) = steps.resized, steps.offset, steps.output
    if height * width > _MAX_RESIZED_PIXELS:
        return _transform_part(image, steps, resampling)
    for step in steps.before:
        image = image.resize(step[::-1], resampling)
    box = None if steps.square else steps.part
    if box or steps.resized != (image.height, image.width):
        image = image.resize((width, height), resampling, box=box)
    if steps.crop is None:
        return image
    if steps.padded and fill not in (0, (0, 0, 0)):
        canvas = Image.new(image.mode, (w, h), fill)
        canvas.paste(image, (-left, -top))
        return canvas
    return image.crop((left, top, left + w, top + h))  # Pillow pads with black outside


def _in_square(
    image: Image.Image,
    square: tuple[int, int, int],
    resampling: Image.Resampling,
    color: tuple[int, int, int],
) -> Image.Image:
    """The whole image, resized, in the middle of a square of this color."""
    height, width, side = square
    if (height, width) != (image.height, image.width):
        image = image.resize((width, height), resampling)
    canvas = Image.new("RGB", (side, side), color)
    canvas.paste(image, ((side - width) // 2, (side - height) // 2))
    return canvas


def _transform_part(image: Image.Image, steps: Plan, resampling: Image.Resampling) -> Image.Image:
    """The same from the part of the source under the crop."""
    (height, width), (top, left), (h, w) = steps.resized, steps.offset, steps.output
    y0, y1 = max(top, 0), min(top + h, height)
    x0, x1 = max(left, 0), min(left + w, width)
    down, across = image.height / height, image.width / width
    part = image.resize(
        (x1 - x0, y1 - y0), resampling, box=(x0 * across, y0 * down, x1 * across, y1 * down)
    )
    return part.crop((left - x0, top - y0, left - x0 + w, top - y0 + h))


def _fitted(fit: str, size: tuple[int, int], height: int, width: int) -> Plan:
    """An image in (height, width) `size`, as Pillow's ImageOps.fit, ImageOps.pad or resize."""
    h, w = size
    source, ratio = (height, width), w / h
    if fit == "squash" or width * h == height * w:
        return Plan(source, size, None, (0, 0))
    if fit == "crop":
        wide = width / height >= ratio
        across, down = (ratio * height, height) if wide else (width, width / ratio)
        left, top = (width - across) / 2, (height - down) / 2
        return Plan(source, size, None, (0, 0), part=(left, top, left + across, top + down))
    if width / height > ratio:
        resized = max(round(height / width * w), 1), w
    else:
        resized = h, max(round(width / height * h), 1)
    margin = (round((h - resized[0]) / 2), round((w - resized[1]) / 2))
    return Plan(source, resized, size, (-margin[0], -margin[1]))


def _resized_size(config: PreprocessConfig, height: int, width: int, label: str) -> tuple[int, int]:
    if config.resize == "none":
        return height, width
    if config.resize == "smart" and max(height, width) > _MAX_ASPECT * min(height, width):
        raise ImageError(
            "unsupported",
            f"{label}: the longer side is more than {_MAX_ASPECT} times the shorter",
        )
    if rule := _RULES.get(config.resize):
        return rule(config, height, width)
    assert config.resize_size is not None  # the schema holds it
    target_h, target_w = config.resize_size
    if config.resize == "canvas" and height <= target_h and width <= target_w:
        down, across = target_h / height, target_w / width
        if across < down:
            return max(min(math.floor(height * across), target_h), 1), target_w
        return target_h, max(min(math.floor(width * down), target_w), 1)
    if config.resize in ("squash", "tile", "canvas"):
        return target_h, target_w
    if target_h == target_w:  # torchvision and transformers truncate the longer side
        if height <= width:
            return target_h, int(target_h * width / height)
        return int(target_w * height / width), target_w
    ratio = min(height / target_h, width / target_w)  # timm and open_clip round both
    return round(height / ratio), round(width / ratio)


def _smart_size(config: PreprocessConfig, height: int, width: int) -> tuple[int, int]:
    """Qwen2-VL: multiples of `multiple` with an area between min_pixels and max_pixels."""
    unit = config.multiple
    h, w = round(height / unit) * unit, round(width / unit) * unit
    if h * w > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        h, w = (max(unit, math.floor(s / shrink / unit) * unit) for s in (height, width))
    elif h * w < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        h, w = (math.ceil(s * grow / unit) * unit for s in (height, width))
    return h, w


def _bounded_size(config: PreprocessConfig, height: int, width: int) -> tuple[int, int]:
    """Idefics 2: the longer side at most one number, then each at least another."""
    most, ratio = config.longest_edge, width / height
    if width >= height and width > most:
        height, width = int(most / ratio), most
    elif height > width and height > most:
        height, width = most, int(most * ratio)
    return max(height, config.shortest_edge), max(width, config.shortest_edge)


def _patch_budget(config: PreprocessConfig, height: int, width: int) -> tuple[int, int]:
    """SigLIP 2 NaFlex: the largest scale, by bisection, whose sides, rounded up to whole patches,
    give at most `max_patches` of them."""
    unit, low, high = config.multiple, 1e-6, 100.0

    def sides(scale: float) -> tuple[int, int]:
        h, w = (max(unit, math.ceil(side * scale / unit) * unit) for side in (height, width))
        return h, w

    while high - low >= 1e-5:
        middle = (low + high) / 2
        h, w = sides(middle)
        if (h / unit) * (w / unit) <= config.max_patches:
            low = middle
        else:
            high = middle
    return sides(low)


def _within(config: PreprocessConfig, height: int, width: int) -> tuple[int, int]:
    """Pixtral: no side above `longest_edge` before both go up to multiples of `multiple`."""
    unit, ratio = config.multiple, max(height, width) / config.longest_edge
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    h, w = (max(((side - 1) // unit + 1) * unit, unit) for side in (height, width))
    return h, w


def _square(config: PreprocessConfig, height: int, width: int) -> tuple[int, int, int]:
    """Height and width of an image in a square, and the square's side."""
    if not config.square:
        return height, width, max(height, width)
    scale = config.square / max(height, width)
    h, w = (max(round(side * scale), config.shortest_edge) for side in (height, width))
    return h, w, max(h, w)


def _to_longest(config: PreprocessConfig, height: int, width: int) -> tuple[int, int]:
    """Aria: the longer side to one number, the other by the same factor to at least another."""
    scale = config.longest_edge / max(height, width)
    h, w = (max(int(side * scale), config.shortest_edge) for side in (height, width))
    return (h, config.longest_edge) if width >= height else (config.longest_edge, w)


def _shrunk(config: PreprocessConfig, height: int, width: int) -> tuple[int, int]:
    """Kimi: as many whole patches as allowed, and no side above `longest_edge`."""
    unit, edge = config.multiple, config.longest_edge
    patches = max(1, height // unit) * max(1, width // unit)
    scale = min(1.0, math.sqrt(config.max_patches / patches), edge / height, edge / width)
    h, w = (min(max(int(side * scale), 1), edge) for side in (height, width))
    return h, w


def _closest(config: PreprocessConfig, height: int, width: int) -> tuple[int, int]:
    """DPT: one side as asked for, the one that scales less; both to the nearest multiples."""
    assert config.resize_size is not None  # the schema holds it
    down, across = config.resize_size[0] / height, config.resize_size[1] / width
    scale = across if abs(1 - across) < abs(1 - down) else down
    unit = config.multiple
    h, w = (max(round(side * scale / unit), 1) * unit for side in (height, width))
    return h, w


def _largest_area(config: PreprocessConfig, height: int, width: int) -> tuple[int, int]:
    """Gemma 4: the area of `max_pixels`, each side down to a multiple; one of none gets one."""
    unit, scale = config.multiple, math.sqrt(config.max_pixels / (height * width))
    h, w = (math.floor(side * scale / unit) * unit for side in (height, width))
    most = config.max_pixels // unit
    if h == 0:
        return unit, min(width // height * unit, most) or unit
    if w == 0:
        return min(height // width * unit, most) or unit, unit
    return h, w


_RULES: dict[str, Callable[[PreprocessConfig, int, int], tuple[int, int]]] = {
    "smart": _smart_size,
    "patches": _patch_budget,
    "bounded": _bounded_size,
    "within": _within,
    "longest": _to_longest,
    "shrink": _shrunk,
    "area": _largest_area,
    "closest": _closest,
}
"""Rules of one family each: config, height and width to the resized (height, width)."""


def _tile_steps(config: PreprocessConfig, height: int, width: int) -> tuple[tuple[int, int], ...]:
    """Idefics 3: the sizes before the last, which is the tile's."""
    assert config.resize_size is not None  # the schema holds it
    height, width = _longest(height, width, config.longest_edge)
    steps = [(height, width)]
    if config.split:
        tile, ratio = config.resize_size[0], width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        steps.append((height, width))
    return tuple(steps)


def _longest(height: int, width: int, edge: int) -> tuple[int, int]:
    """The longer side to `edge`; the other truncated, made even and at least 1."""
    ratio = width / height
    if width >= height:
        other = int(edge / ratio)
        return max(other + other % 2, 1), edge
    other = int(edge * ratio)
    return edge, max(other + other % 2, 1)


def _offset(margin: int, rounding: str) -> int:
    if rounding == "floor":
        return margin // 2  # transformers, also for negative margins
    return round(margin / 2) if margin >= 0 else -(-margin // 2)


def grid_box(
    preprocess: PreprocessConfig, size: tuple[int, int], grid: Grid, patch_size: int
) -> Box:
    """What the patch grid covers of a picture of `size` (height, width), in its own pixels.

    The grid starts at the top left of what the encoder reads; trailing pixels that fill no patch
    are outside, and a padded crop reaches over the picture's edges.
    """
    steps = plan(preprocess, height=size[0], width=size[1])
    (top, left), (height, width) = steps.offset, steps.resized
    x0, y0, x1, y1 = steps.part or (0.0, 0.0, size[1], size[0])
    down, across = (y1 - y0) / height, (x1 - x0) / width
    return (
        x0 + left * across,
        y0 + top * down,
        x0 + (left + grid[1] * patch_size) * across,
        y0 + (top + grid[0] * patch_size) * down,
    )


def patch_box(box: Box, row: int, column: int, grid: Grid) -> Box:
    """The pixels of one patch of a grid that covers `box`."""
    left, top, right, bottom = box
    width, height = (right - left) / grid[1], (bottom - top) / grid[0]
    x, y = left + column * width, top + row * height
    return x, y, x + width, y + height


def small_jpeg(picture: Image.Image, side: int) -> tuple[tuple[int, int], str]:
    """(width, height) and a JPEG as a data URL, the longer side at most `side`."""
    small = picture.convert("RGB")
    small.thumbnail((side, side))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=85)
    return small.size, f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
