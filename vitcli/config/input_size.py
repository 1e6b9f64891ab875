"""Preprocessing for another input size than its own."""

from __future__ import annotations

import math
from typing import Any

from vitcli.config.schema import PreprocessConfig


def resized_to(config: PreprocessConfig, size: tuple[int, int]) -> PreprocessConfig:
    """The preprocessing for another input size (height, width) of the encoder.

    A centre crop becomes `size`, and the resize before it keeps its proportion to the crop as
    timm's `crop_pct` does: floor(side / crop_pct), where crop_pct is the roundest number (in
    steps of 1, 0.1, 0.01, 0.005, 0.001) that gives the present pair. So 256 then 224 (0.875)
    becomes 592 then 518, and 248 then 224 (0.9) becomes 426 then 384. A size that is not square
    makes `shortest` cover both sides. Without a crop: `squash` squashes to `size`; `shortest`
    covers `size` and crops it; `smart` and `none`, whose result follows the image, become
    `squash`.
    """
    crop, resize = config.crop_size, config.resize_size
    changes: dict[str, Any]
    if config.resize in ("smart", "none") and crop is None:
        changes = {"resize": "squash", "resize_size": size}
    elif config.resize == "squash" and crop is None:
        changes = {"resize_size": size}
    elif crop is None or resize is None:
        changes = {"resize_size": resize and size, "crop_size": size}
    else:
        sides = zip(size, crop, resize, strict=True)
        new = tuple(math.floor(to / _crop_pct(c, r)) for to, c, r in sides)
        changes = {"resize_size": new, "crop_size": size}
    return PreprocessConfig.model_validate({**dict(config), **changes})


def _crop_pct(crop: int, resize: int) -> float:
    for steps in (1, 10, 100, 200, 1000):
        pct = math.floor(crop / resize * steps) / steps
        if pct > 0 and math.floor(crop / pct) == resize:
            return pct
    return crop / resize
