"""OpenCLIP `open_clip_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.processors.values import (
    CLIP,
    Settings,
    pair,
    refuse,
    section,
    triple,
    validated,
)
from vitcli.config.schema import PreprocessConfig


def from_open_clip(
    settings: Settings, *, source: str = "open_clip_config.json"
) -> PreprocessConfig:
    """The preprocessing of an OpenCLIP `open_clip_config.json`, as its eval transform does it.

    The size is the vision tower's `image_size` where the file describes one, as in open_clip.
    """
    given = section(settings, "preprocess_cfg", source)
    model = section(settings, "model_cfg", source)
    defaults: dict[str, Any] = {
        "size": 224,
        "mode": "RGB",
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    defaults |= {"fill_color": 0, **CLIP}
    merged = {**defaults, **{key: value for key, value in given.items() if value is not None}}
    for key, value in merged.items():
        if key not in defaults:
            refuse(source, f"preprocess_cfg.{key}", value, "not handled")
    if merged["mode"] != "RGB":
        refuse(source, "preprocess_cfg.mode", merged["mode"], "only RGB is handled")
    vision = model.get("vision_cfg")
    if isinstance(vision, Mapping):
        size = pair(vision.get("image_size", 224), "model_cfg.vision_cfg.image_size", source)
    else:
        size = pair(merged["size"], "preprocess_cfg.size", source)
    rule, name = merged["resize_mode"], merged["interpolation"]
    if rule not in ("shortest", "squash"):
        refuse(source, "preprocess_cfg.resize_mode", rule, "shortest and squash are handled")
    if name not in ("bicubic", "bilinear", "random"):  # random is for training; then bicubic
        refuse(source, "preprocess_cfg.interpolation", name, "bicubic or bilinear expected")
    # For a size that is not square open_clip's shortest is bicubic whatever it was told.
    bilinear = name == "bilinear" and (rule == "squash" or size[0] == size[1])
    config = {
        "resize": rule,
        "resize_size": size,
        "filter": "bilinear" if bilinear else "bicubic",
        "crop_size": size if rule == "shortest" else None,
        "crop_rounding": "round",
        "mean": triple(merged["mean"], "preprocess_cfg.mean", source),
        "std": triple(merged["std"], "preprocess_cfg.std", source),
    }
    return validated(config, source)
