"""timm `config.json`."""

from __future__ import annotations

import math
from typing import Any

from vitcli.checkpoints.processors.values import (
    FILTERS,
    IMAGENET,
    Settings,
    is_list,
    is_number,
    pair,
    refuse,
    section,
    triple,
    validated,
)
from vitcli.config.schema import PreprocessConfig


def from_timm(settings: Settings, *, source: str = "config.json") -> PreprocessConfig:
    """The preprocessing of a timm `config.json` (its `pretrained_cfg`), as timm's eval transform.

    The size is `input_size`; keys that are missing or empty take timm's defaults.
    """
    given = section(settings, "pretrained_cfg", source) or settings
    defaults: dict[str, Any] = {
        "input_size": (3, 224, 224),
        "interpolation": "bicubic",
        "crop_pct": 0.875,
    }
    defaults |= {"crop_mode": "center", **IMAGENET}
    merged = {key: given.get(key) or default for key, default in defaults.items()}
    channels, *sides = merged["input_size"] if is_list(merged["input_size"], 3) else (0,)
    if channels != 3:
        refuse(source, "input_size", merged["input_size"], "3, height, width expected")
    size, pct = pair(sides, "input_size", source), merged["crop_pct"]
    if not is_number(pct) or pct <= 0:
        refuse(source, "crop_pct", pct, "a number above zero expected")
    if merged["crop_mode"] not in ("center", "squash"):
        refuse(source, "crop_mode", merged["crop_mode"], "center and squash are handled")
    if merged["interpolation"] not in FILTERS:
        known = ", ".join(FILTERS)
        refuse(source, "interpolation", merged["interpolation"], f"known: {known}")
    resized = (math.floor(size[0] / pct), math.floor(size[1] / pct))
    squash = merged["crop_mode"] == "squash"
    config = {
        "resize": "squash" if squash else "shortest",
        "resize_size": resized,
        "filter": merged["interpolation"],
        "crop_size": None if squash and resized == size else size,
        "crop_rounding": "round",
        "mean": triple(merged["mean"], "mean", source),
        "std": triple(merged["std"], "std", source),
    }
    return validated(config, source)
