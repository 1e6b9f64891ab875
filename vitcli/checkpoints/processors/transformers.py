"""Hugging Face `preprocessor_config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.processors.values import (
    CLIP,
    FILTERS,
    HALF,
    IMAGENET,
    Pair,
    Settings,
    pair,
    refuse,
    triple,
    validated,
    whole,
)
from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _assumes(size: Settings, resample: int, statistics: Settings, **more: Any) -> Settings:
    statistics = {f"image_{name}": values for name, values in statistics.items()}
    return {"size": size, "resample": resample, **statistics, **more}


_CENTER_224 = {"do_center_crop": True, "crop_size": _square(224)}
_SHORTEST = {"default_to_square": False}  # what a bare number means as `size`
_PROCESSORS: Mapping[str, Settings] = {
    "ViTImageProcessor": _assumes(_square(224), 2, HALF),
    "DeiTImageProcessor": _assumes(_square(256), 3, HALF, **_CENTER_224),
    "CLIPImageProcessor": _assumes({"shortest_edge": 224}, 3, CLIP, **_CENTER_224, **_SHORTEST),
    "BitImageProcessor": _assumes({"shortest_edge": 224}, 3, CLIP, **_CENTER_224, **_SHORTEST),
    "SiglipImageProcessor": _assumes(_square(224), 3, HALF, **_SHORTEST),
    "DINOv3ViTImageProcessor": _assumes(_square(224), 2, IMAGENET),
    "GotOcr2ImageProcessor": _assumes(_square(384), 3, CLIP),
    "Qwen2VLImageProcessor": _assumes(
        {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        3,
        CLIP,
        patch_size=14,
        merge_size=2,
    ),
}
_COMMON = {
    "do_resize": True,
    "do_center_crop": False,
    "crop_size": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "default_to_square": True,
}
_PROCESSOR_OF_MODEL = {
    "vit": "ViTImageProcessor",
    "vit_mae": "ViTImageProcessor",
    "ijepa": "ViTImageProcessor",
    "deit": "DeiTImageProcessor",
    "clip": "CLIPImageProcessor",
    "clip_vision_model": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "siglip_vision_model": "SiglipImageProcessor",
    "dinov2": "BitImageProcessor",
    "dinov2_with_registers": "BitImageProcessor",
    "dinov3_vit": "DINOv3ViTImageProcessor",
    "internvl": "GotOcr2ImageProcessor",
    "internvl_vision": "GotOcr2ImageProcessor",
    "qwen2_vl": "Qwen2VLImageProcessor",
    "qwen2_5_vl": "Qwen2VLImageProcessor",
}
_FLOAT_RESIZE = ("DINOv3ViTImageProcessor",)
_NO_CROP = ("GotOcr2ImageProcessor", "Qwen2VLImageProcessor")
_NEUTRAL = frozenset(
    [
        # names and bookkeeping
        *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
        *("_name_or_path", "transformers_version", "_valid_processor_keys"),
        # how arrays come in and go out; pixels are RGB before this begins
        *("do_convert_rgb", "data_format", "input_data_format", "return_tensors", "device"),
        "disable_grouping",
        # repeats a still image in time
        "temporal_patch_size",
        # tiling is the language model's choice: the tower reads one whole image
        *("crop_to_patches", "min_patches", "max_patches"),
    ]
)
_PIXELS = ("min_pixels", "max_pixels")  # an older way to write Qwen2-VL's size


def from_transformers(
    settings: Settings, *, model_type: str | None = None, source: str = "preprocessor_config.json"
) -> PreprocessConfig:
    """The preprocessing of a Hugging Face `preprocessor_config.json`.

    Missing and null keys take the processor class's defaults. A file without a class, as old ones
    are, is read by the class that `model_type` (of config.json) stands for. Crops as the Pillow
    processors do: floor of half the margin.

    Raises VitcliError for an unknown class and for settings that cannot be honored.
    """
    if isinstance(settings.get("image_processor"), Mapping):  # processor_config.json
        settings = settings["image_processor"]
    kind = _processor(settings, model_type, source)
    given = {key: value for key, value in settings.items() if value is not None}
    known = {**_COMMON, **_PROCESSORS[kind]}
    for key, value in given.items():
        known_here = key in known or (kind == "Qwen2VLImageProcessor" and key in _PIXELS)
        if not known_here and key not in _NEUTRAL and value is not False:
            refuse(source, key, value, f"not handled for {kind}")
    merged = {**known, **given}
    for key in ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "default_to_square"):
        if not isinstance(merged[key], bool):
            refuse(source, key, merged[key], "true or false expected")
    _require_unit_scale(merged, source)

    config: dict[str, Any] = {"crop_rounding": "floor"}
    config["resize_dtype"] = "float32" if kind in _FLOAT_RESIZE else "uint8"
    config["filter"] = _resample(merged["resample"], source)
    if not merged["do_resize"]:
        config |= {"resize": "none", "resize_size": None}
    elif kind == "Qwen2VLImageProcessor":
        config |= _smart(merged, given, source)
    else:
        rule, size = _size(merged, "size", source, merged["default_to_square"])
        config |= {"resize": rule, "resize_size": size}
    if merged["do_center_crop"]:
        if kind in _NO_CROP:
            refuse(source, "do_center_crop", True, f"{kind} does not crop")
        rule, config["crop_size"] = _size(merged, "crop_size", source, True)
        if rule != "squash":
            refuse(source, "crop_size", merged["crop_size"], "height and width expected")
    for name, neutral in (("mean", 0.0), ("std", 1.0)):
        key = f"image_{name}"
        values = triple(merged[key], key, source)
        config[name] = values if merged["do_normalize"] else (neutral,) * 3
    return validated(config, source)


def _processor(settings: Settings, model_type: str | None, source: str) -> str:
    named = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    if named is None and model_type is not None:
        named = _PROCESSOR_OF_MODEL.get(model_type)
    if named is None:
        raise VitcliError(
            f"{source}: no image_processor_type, and model_type {model_type!r} stands for none",
            f"name one of {', '.join(_PROCESSORS)}",
        )
    kind = str(named).removesuffix("Fast").removesuffix("Pil")
    kind = kind.replace("FeatureExtractor", "ImageProcessor").replace("Qwen2_5_VL", "Qwen2VL")
    if kind not in _PROCESSORS:
        refuse(source, "image_processor_type", named, f"known: {', '.join(_PROCESSORS)}")
    return kind


def _require_unit_scale(merged: Settings, source: str) -> None:
    factor = merged["rescale_factor"]
    if not merged["do_rescale"]:
        refuse(source, "do_rescale", False, "levels are always divided by 255 here")
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        refuse(source, "rescale_factor", factor, "only 1/255 is handled")


def _smart(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    edges = merged["size"] if isinstance(merged["size"], Mapping) else {}
    smallest = given.get("min_pixels", edges.get("shortest_edge", edges.get("min_pixels")))
    largest = given.get("max_pixels", edges.get("longest_edge", edges.get("max_pixels")))
    if smallest is None or largest is None:
        refuse(source, "size", merged["size"], "shortest_edge and longest_edge expected")
    unit = [whole(merged[key], key, source) for key in ("patch_size", "merge_size")]
    return {
        "resize": "smart",
        "resize_size": None,
        "multiple": unit[0] * unit[1],
        "min_pixels": whole(smallest, "min_pixels", source),
        "max_pixels": whole(largest, "max_pixels", source),
    }


def _size(settings: Settings, key: str, source: str, square: bool) -> tuple[str, Pair]:
    """(resize rule, (height, width)) of the forms that transformers accepts."""
    value = settings[key]
    if isinstance(value, Mapping):
        edges = {name: edge for name, edge in value.items() if edge is not None}
        if edges.keys() == {"height", "width"}:
            return "squash", pair([edges["height"], edges["width"]], key, source)
        if edges.keys() == {"shortest_edge"}:
            return "shortest", pair(edges["shortest_edge"], key, source)
        refuse(source, key, value, "height and width, or shortest_edge, expected")
    if isinstance(value, list | tuple):
        return "squash", pair(value, key, source)
    return ("squash" if square else "shortest"), pair(value, key, source)


def _resample(value: Any, source: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or value not in range(len(FILTERS)):
        refuse(source, "resample", value, "Pillow's filters are 0 to 5")
    return FILTERS[value]
