"""Hugging Face `preprocessor_config.json` and `processor_config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitcli.checkpoints.family import (
    CLIP,
    FILTERS,
    HALF,
    IMAGENET,
    PROCESSORS,
    Pair,
    Preprocessing,
    Settings,
    is_list,
    pair,
    refuse,
    section,
    triple,
    validated,
    whole,
)
from vitcli.config.schema import EncoderConfig
from vitcli.errors import VitcliError


@dataclass(frozen=True)
class Processor:
    """A processor class of transformers.

    Attributes:
        defaults: what the class takes where its file leaves a key out.
        resize: who reads `size`; None for the forms that most classes share.
        neutral: keys of its own that change no pixel of the base view.
        crops: whether `do_center_crop` means anything to it.
        tiles: how many tiles it may cut besides the base view, as text; "" for none.
        note: where its pixels are not followed.
    """

    defaults: Settings
    resize: Callable[[Settings, Settings, str], dict[str, Any]] | None = None
    neutral: tuple[str, ...] = ()
    crops: bool = True
    tiles: Callable[[Settings], str] = field(default=lambda merged: "")
    resize_dtype: str = "uint8"
    note: str = ""


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _assumes(size: Any, resample: int, statistics: Settings, **more: Any) -> Settings:
    statistics = {f"image_{name}": values for name, values in statistics.items()}
    return {"size": size, "resample": resample, **statistics, **more}


def _smart(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """Qwen's: both sides to multiples, the area between two bounds."""
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


def _smart_in_tokens(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """LFM2-VL's: as Qwen's, its bounds in tokens; the view of the whole image, unsplit."""
    sides = [whole(merged[key], key, source) for key in ("encoder_patch_size", "downsample_factor")]
    unit = sides[0] * sides[1]
    least, most = (whole(merged[f"{end}_image_tokens"], end, source) for end in ("min", "max"))
    if merged["do_image_splitting"] and not merged["use_thumbnail"]:
        refuse(source, "use_thumbnail", False, "a large image is in tiles alone")
    area = {"min_pixels": least * unit**2, "max_pixels": most * unit**2}
    return {"resize": "smart", "resize_size": None, "multiple": unit, **area}


def _smart_in_time(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """GLM-4V's: as Qwen's, but an image counts as often as it is repeated in time."""
    found = _smart(merged, given, source)
    times = whole(merged["temporal_patch_size"], "temporal_patch_size", source)
    bounds = {key: divmod(found[key], times) for key in ("min_pixels", "max_pixels")}
    if any(rest for _, rest in bounds.values()):
        refuse(source, "size", merged["size"], f"multiples of temporal_patch_size = {times}")
    return found | {key: pixels for key, (pixels, _) in bounds.items()}


def _patches(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """SigLIP 2 NaFlex: the aspect kept, as many patches as allowed."""
    return {
        "resize": "patches",
        "resize_size": None,
        "multiple": whole(merged["patch_size"], "patch_size", source),
        "max_patches": whole(merged["max_num_patches"], "max_num_patches", source),
    }


def _within_edge(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """Pixtral: at most a longest edge, then up to whole patches."""
    edges, patch = merged["size"], merged["patch_size"]
    longest = edges.get("longest_edge") if isinstance(edges, Mapping) else None
    sides = set(_sides(patch))
    if len(sides) != 1:
        refuse(source, "patch_size", patch, "height and width that are equal expected")
    return {
        "resize": "within",
        "resize_size": None,
        "longest_edge": whole(longest, "size.longest_edge", source),
        "multiple": whole(sides.pop(), "patch_size", source),
    }


def _global_tile(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """Idefics 3: the whole image goes through two sizes before it is squashed to one tile."""
    edges = merged["size"], merged["max_image_size"]
    longest, tile = (e.get("longest_edge") if isinstance(e, Mapping) else None for e in edges)
    side = whole(tile, "max_image_size.longest_edge", source)
    return {
        "resize": "tile",
        "resize_size": (side, side),
        "longest_edge": whole(longest, "size.longest_edge", source),
        "split": bool(merged["do_image_splitting"]),
    }


def _base_view(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """LLaVA-NeXT and LLaVA-OneVision: the first view is squashed, whatever `size` says."""
    return {"resize": "squash", "resize_size": _size(merged, "size", source, False)[1]}


def _bounded(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """Idefics 2: both edges of `size`; height and width squash."""
    edges = merged["size"]
    if not isinstance(edges, Mapping) or not {"shortest_edge", "longest_edge"} <= set(edges):
        return {"resize": "squash", "resize_size": _size(merged, "size", source, True)[1]}
    return {
        "resize": "bounded",
        "resize_size": None,
        **{key: whole(edges[key], key, source) for key in ("shortest_edge", "longest_edge")},
    }


def _thumbnail(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """Perception LM: the first view is squashed to a tile, whatever `size` says."""
    side = whole(merged["tile_size"], "tile_size", source)
    return {"resize": "squash", "resize_size": (side, side)}


def _equal_sides(merged: Settings, key: str, source: str) -> int:
    rule, (height, width) = _size(merged, key, source, True)
    if rule != "squash" or height != width:
        refuse(source, key, merged[key], "height and width that are equal expected")
    return height


def _edge(merged: Settings, key: str, edge: str, source: str) -> int:
    edges = merged[key] if isinstance(merged[key], Mapping) else {}
    return whole(edges.get(edge), f"{key}.{edge}", source)


def _in_square(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """DeepSeek-VL and Janus: in the middle of a square; the hybrid's by way of a larger one."""
    if not merged["do_pad"]:
        refuse(source, "do_pad", False, "true expected: the encoder reads squares")
    side, hybrid = _equal_sides(merged, "size", source), "high_res_size" in merged
    for key in ("resample", "image_mean") if hybrid else ():
        if merged[f"high_res_{key}"] != merged[key]:
            refuse(source, f"high_res_{key}", merged[f"high_res_{key}"], f"that of {key} expected")
    return {
        "resize": "squash" if hybrid else "none",
        "resize_size": (side, side) if hybrid else None,
        "square": _equal_sides(merged, "high_res_size", source) if hybrid else side,
        "shortest_edge": whole(merged["min_size"], "min_size", source),
    }


def _llava(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """CLIP's; with `do_pad` after the image is put in the middle of a square."""
    rule, size = _size(merged, "size", source, merged["default_to_square"])
    return {"resize": rule, "resize_size": size, "square": 0 if merged["do_pad"] else None}


def _aria(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """The longer side to a number, then black up to whole patches; what is beyond is masked."""
    longest = whole(merged["max_image_size"], "max_image_size", source)
    least = whole(merged["min_image_size"], "min_image_size", source)
    if merged["split_image"]:
        refuse(source, "split_image", True, "false expected: there are tiles alone")
    found = {"resize": "longest", "resize_size": None, "longest_edge": longest}
    return {**found, "shortest_edge": least, "fill": _ARIA_PATCH}


def _shrunk(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """Kimi: never enlarged, then black up to whole cells of patches."""
    patch, merge = (whole(merged[key], key, source) for key in ("patch_size", "merge_size"))
    edges = {_edge(merged, "size", edge, source) for edge in ("max_height", "max_width")}
    if len(edges) != 1:
        refuse(source, "size", merged["size"], "max_height and max_width that are equal expected")
    return {
        "resize": "shrink",
        "resize_size": None,
        "multiple": patch,
        "fill": patch * merge,
        "max_patches": whole(merged["max_patches"], "max_patches", source),
        "longest_edge": patch * edges.pop(),
    }


def _of_kimis_own(settings: Settings, source: str) -> Settings:
    """The file that Kimi's own code reads, as the library's class has it."""
    own = dict(section(settings, "media_proc_cfg", source))
    if own.pop("fixed_output_tokens", None) is not None:
        refuse(source, "fixed_output_tokens", settings["media_proc_cfg"], "null expected")
    side = own.pop("patch_limit_on_one_side", None)
    return {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "max_patches": own.pop("in_patch_limit", None),
        "merge_size": own.pop("merge_kernel_size", None),
        "size": {"max_height": side, "max_width": side},
        **{key: value for key, value in own.items() if key not in _KIMI_VIDEO},
    }


def _closest(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """DPT: multiples of a number, at the same aspect ratio or not."""
    rule, (height, width) = _size(merged, "size", source, True)
    unit = whole(merged["ensure_multiple_of"], "ensure_multiple_of", source)
    if rule != "squash":
        refuse(source, "size", merged["size"], "height and width expected")
    if merged["do_pad"] and merged["size_divisor"]:
        refuse(source, "do_pad", True, "a margin up to multiples of size_divisor is not supported")
    if merged["keep_aspect_ratio"]:
        return {"resize": "closest", "resize_size": (height, width), "multiple": unit}
    return {
        "resize": "squash",
        "resize_size": (round(height / unit) * unit, round(width / unit) * unit),
    }


def _canvas(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """Llama 4: a small image in one tile; the squashed view of a larger one."""
    if merged["resize_to_max_canvas"]:
        refuse(source, "resize_to_max_canvas", True, "false expected")
    if whole(merged["max_patches"], "max_patches", source) == 1:
        refuse(source, "max_patches", 1, "2 or more expected")
    side = _equal_sides(merged, "size", source)
    return {"resize": "canvas", "resize_size": (side, side)}


def _area(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    """Gemma 4: as many patches as make the most soft tokens."""
    keys = ("patch_size", "pooling_kernel_size", "max_soft_tokens")
    patch, pool, tokens = (whole(merged[key], key, source) for key in keys)
    found = {"resize": "area", "resize_size": None, "multiple": patch * pool}
    return {**found, "max_pixels": tokens * (patch * pool) ** 2}


def _idefics(merged: Settings, given: Settings, source: str) -> dict[str, Any]:
    side = given.get("image_size")
    size = merged["size"] if side is None else _square(whole(side, "image_size", source))
    return {"resize": "squash", "resize_size": _size({"size": size}, "size", source, True)[1]}


def _anyres_tiles(merged: Settings) -> str:
    side = max(_sides(merged.get("crop_size")) or _sides(merged["size"]) or [0])
    points = [p for p in merged.get("image_grid_pinpoints") or () if is_list(p, 2)]
    counts = [math.prod(-(-edge // side) for edge in p) for p in points if side]
    most = max(counts, default=0)
    return f"up to {most} tiles" if most else ""


def _sides(size: Any) -> list[int]:
    found = size.values() if isinstance(size, Mapping) else [size]
    return [edge for edge in found if isinstance(edge, int)]


def _dynamic_tiles(merged: Settings) -> str:
    most = merged.get("max_patches")
    return f"up to {most} tiles" if merged.get("crop_to_patches") and most else ""


def _split_tiles(merged: Settings) -> str:
    if not merged["do_image_splitting"]:
        return ""
    longest, tile = (_sides(merged[key])[0] for key in ("size", "max_image_size"))
    return f"up to {(-(-longest // tile)) ** 2} tiles"


def _pan_and_scan(merged: Settings) -> str:
    most = merged.get("pan_and_scan_max_num_crops")
    return f"up to {most} tiles" if merged.get("do_pan_and_scan") and most else ""


def _lfm2_tiles(merged: Settings) -> str:
    most = merged["max_tiles"]
    return f"up to {most} tiles" if merged["do_image_splitting"] and most > 1 else ""


_BY_TORCHVISION = (
    "pixels by Pillow; the processor, which has torchvision's resize alone, differs by up to 1 "
    "level (bilinear) or 2 (bicubic)"
)
_BY_BFLOAT16 = "; it normalizes in bfloat16, which rounds values to 8 bits"
_ARIA_PATCH = 14
_KIMI_VIDEO = (
    *(
        "in_patch_limit_each_frame",
        "in_patch_limit_video",
        "sample_fps",
        "max_num_frames_each_video",
    ),
    *("temporal_merge_kernel_size", "timestamp_mode", "config_type"),
)
"""Keys of Kimi's own file that are about videos."""
_ALWAYS_RESIZES = (*(_global_tile, _base_view, _in_square, _llava, _aria, _shrunk, _canvas, _area),)
_CENTER_224 = {"do_center_crop": True, "crop_size": _square(224)}
_SHORTEST = {"default_to_square": False}  # what a bare number means as `size`
_CLIP = Processor(_assumes({"shortest_edge": 224}, 3, CLIP, **_CENTER_224, **_SHORTEST))
_VIT = Processor(_assumes(_square(224), 2, HALF))
_IDEFICS3 = Processor(
    _assumes(
        {"longest_edge": 4 * 364},
        1,
        HALF,
        max_image_size={"longest_edge": 364},
        do_image_splitting=True,
    ),
    _global_tile,
    neutral=("do_pad", "vision_encoder_max_size", "return_row_col_info"),
    crops=False,
    tiles=_split_tiles,
)
_GLM4V = Processor(
    _assumes(
        {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
        3,
        CLIP,
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        **_SHORTEST,
    ),
    _smart_in_time,
    crops=False,
    note="the processor enlarges images that are under one 2x2 of patches another way",
)
_DEEPSEEK = Processor(
    _assumes(_square(384), 3, CLIP, min_size=14, do_pad=True),
    _in_square,
    neutral=("background_color",),  # the library takes it from image_mean
    crops=False,
)
_HYBRID = {
    "high_res_size": _square(1024),
    "high_res_resample": 3,
    **{f"high_res_image_{name}": values for name, values in CLIP.items()},
}
_ANYRES = ("image_grid_pinpoints", "do_pad", "aspect_ratio_setting")
_CLASSES: Mapping[str, Processor] = {
    "ViTImageProcessor": _VIT,
    "SwinImageProcessor": _VIT,
    "DeiTImageProcessor": Processor(_assumes(_square(256), 3, HALF, **_CENTER_224)),
    "BeitImageProcessor": Processor(
        _assumes(_square(224), 3, HALF, crop_size=_square(224)),
        neutral=("reduce_labels", "do_reduce_labels"),
    ),
    "Tipsv2ImageProcessor": Processor(_assumes(_square(448), 2, HALF, do_normalize=False)),
    "CLIPImageProcessor": _CLIP,
    "ChineseCLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": replace(
        _CLIP, defaults={**_CLIP.defaults, "do_pad": False}, resize=_llava
    ),
    "VideoLlavaImageProcessor": _CLIP,
    "BitImageProcessor": _CLIP,
    "SiglipImageProcessor": Processor(_assumes(_square(224), 3, HALF, **_SHORTEST)),
    "Siglip2ImageProcessor": Processor(
        _assumes(None, 2, HALF, patch_size=16, max_num_patches=256), _patches, crops=False
    ),
    "DINOv3ViTImageProcessor": Processor(
        _assumes(_square(224), 2, IMAGENET), resize_dtype="float32"
    ),
    "GotOcr2ImageProcessor": Processor(
        _assumes(_square(384), 3, CLIP),
        neutral=("crop_to_patches", "min_patches", "max_patches"),
        crops=False,
        tiles=_dynamic_tiles,
    ),
    "Qwen2VLImageProcessor": Processor(
        _assumes(
            {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
            3,
            CLIP,
            patch_size=14,
            merge_size=2,
        ),
        _smart,
        neutral=("min_pixels", "max_pixels", "temporal_patch_size"),
        crops=False,
    ),
    "PerceptionLMImageProcessor": Processor(
        _assumes(_square(448), 3, HALF, tile_size=448, max_num_tiles=36),
        _thumbnail,
        neutral=("vision_input_type",),
        crops=False,
        tiles=lambda merged: f"up to {merged['max_num_tiles']} tiles",
    ),
    "Ovis2ImageProcessor": Processor(
        _assumes(_square(384), 3, CLIP),
        neutral=("crop_to_patches", "min_patches", "max_patches", "use_covering_area_grid"),
        crops=False,
        tiles=_dynamic_tiles,
    ),
    "DeepseekVLImageProcessor": _DEEPSEEK,
    "JanusImageProcessor": _DEEPSEEK,
    "DeepseekVLHybridImageProcessor": replace(
        _DEEPSEEK,
        defaults={**_DEEPSEEK.defaults, **_HYBRID},
        neutral=(*_DEEPSEEK.neutral, "high_res_background_color"),
        note="the low-resolution view, which SigLIP reads; SAM's is not prepared",
    ),
    "AriaImageProcessor": Processor(
        _assumes(
            *(None, 3, HALF),
            max_image_size=980,
            min_image_size=336,
            split_image=False,
        ),
        _aria,
        neutral=("split_resolutions",),
        crops=False,
    ),
    "DPTImageProcessor": Processor(
        _assumes(
            *(_square(384), 3, HALF),
            ensure_multiple_of=1,
            keep_aspect_ratio=False,
            do_pad=False,
            size_divisor=None,
        ),
        _closest,
        neutral=("do_reduce_labels",),
        crops=False,
    ),
    "Kimi_K25ImageProcessor": Processor(
        _assumes(
            *({"max_height": 512, "max_width": 512}, 3, HALF),
            max_patches=16384,
            patch_size=14,
            merge_size=2,
        ),
        _shrunk,
        crops=False,
        note=_BY_TORCHVISION,
    ),
    "Llama4ImageProcessor": Processor(
        _assumes(_square(336), 2, HALF, max_patches=16, resize_to_max_canvas=False),
        _canvas,
        crops=False,
        tiles=lambda merged: f"up to {merged['max_patches']} tiles",
        note=_BY_TORCHVISION + _BY_BFLOAT16,
    ),
    "Gemma4ImageProcessor": Processor(
        _assumes(
            *(None, 3, {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
            patch_size=16,
            max_soft_tokens=280,
            pooling_kernel_size=3,
            do_normalize=False,
        ),
        _area,
        crops=False,
    ),
    "GlmgaImageProcessor": replace(_GLM4V, neutral=("patch_expand_factor",)),
    "Glm4vImageProcessor": _GLM4V,
    "Glm46VImageProcessor": _GLM4V,
    "Cohere2VisionImageProcessor": Processor(
        _assumes(_square(512), 3, CLIP, crop_to_patches=True, max_patches=12),
        neutral=("min_patches", "patch_size"),
        crops=False,
        tiles=_dynamic_tiles,
        note=_BY_TORCHVISION,
    ),
    "Lfm2VlImageProcessor": Processor(
        _assumes(
            _square(512),
            2,
            HALF,
            encoder_patch_size=16,
            downsample_factor=2,
            min_image_tokens=64,
            max_image_tokens=256,
            do_image_splitting=True,
            use_thumbnail=True,
            max_tiles=10,
        ),
        _smart_in_tokens,
        neutral=(
            *("min_tiles", "tile_size", "max_pixels_tolerance", "max_num_patches"),
            *("do_pad", "return_row_col_info"),
        ),
        crops=False,
        tiles=_lfm2_tiles,
        note=_BY_TORCHVISION,
    ),
    "PixtralImageProcessor": Processor(
        _assumes({"longest_edge": 1024}, 3, CLIP, patch_size=_square(16)),
        _within_edge,
        neutral=("do_pad",),  # the images of a batch to one size
        crops=False,
    ),
    "LlavaNextImageProcessor": Processor(
        _assumes({"shortest_edge": 224}, 3, CLIP, **_CENTER_224, **_SHORTEST),
        _base_view,
        neutral=_ANYRES,
        tiles=_anyres_tiles,
    ),
    "LlavaOnevisionImageProcessor": Processor(
        _assumes(_square(384), 3, CLIP, **_SHORTEST),
        _base_view,
        neutral=_ANYRES,
        crops=False,
        tiles=_anyres_tiles,
    ),
    "Gemma3ImageProcessor": Processor(
        _assumes(_square(224), 2, HALF),
        neutral=(
            "do_pan_and_scan",
            "pan_and_scan_min_crop_size",
            "pan_and_scan_max_num_crops",
            "pan_and_scan_min_ratio_to_activate",
        ),
        crops=False,
        tiles=_pan_and_scan,
    ),
    "IdeficsImageProcessor": Processor(
        _assumes(_square(224), 3, CLIP),
        _idefics,
        neutral=("image_size", "image_num_channels"),
        crops=False,
    ),
    "Idefics2ImageProcessor": Processor(
        _assumes(
            {"shortest_edge": 378, "longest_edge": 980},
            2,
            HALF,
            do_image_splitting=False,
            default_to_square=False,
        ),
        _bounded,
        neutral=("do_pad",),
        crops=False,
        tiles=lambda merged: "up to 4 tiles" if merged["do_image_splitting"] else "",
    ),
    "Idefics3ImageProcessor": _IDEFICS3,
    "SmolVLMImageProcessor": _IDEFICS3,
}
SUPPORTED = tuple(_CLASSES)
_COMMON = {
    "do_resize": True,
    "do_center_crop": False,
    "crop_size": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "default_to_square": True,
}
_NEUTRAL = frozenset(
    [
        # names and bookkeeping
        *("image_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
        *("_name_or_path", "transformers_version", "_valid_processor_keys"),
        # how arrays come in and go out; pixels are RGB before this begins
        *("do_convert_rgb", "data_format", "input_data_format", "return_tensors", "device"),
        "disable_grouping",
        # counts text tokens
        *("image_seq_length", "num_additional_image_tokens"),
        # repeats a still image in time
        "temporal_patch_size",
    ]
)


def processor(kind: str | None) -> Callable[..., Preprocessing | None]:
    """A family's `preprocess`: the file beside the weights; `kind` is its class if it has none."""

    def read(configs: Mapping[str, Settings], encoder: EncoderConfig) -> Preprocessing | None:
        for name in PROCESSORS:
            if name not in configs:
                continue
            settings = configs[name]
            if name == "processor_config.json":
                inner = settings.get("image_processor")
                if not isinstance(inner, Mapping):
                    continue  # it speaks of text or sound alone
                settings = inner
            found = from_transformers(settings, kind=kind, source=name)
            if found.config.fill == _ARIA_PATCH != encoder.patch_size:
                filled = found.config.model_copy(update={"fill": encoder.patch_size})
                found = replace(found, config=filled)
            return found
        return None

    return read


def from_transformers(
    settings: Settings, *, kind: str | None = None, source: str = PROCESSORS[0]
) -> Preprocessing:
    """The preprocessing of a Hugging Face `preprocessor_config.json`.

    Missing and null keys take the processor class's defaults. A file without a class, as old ones
    are, is read as `kind`. The pixels are those of the Pillow processors, whose crops floor half
    the margin; for a class that tiles they are the base view's.

    Raises:
        VitcliError: an unknown class, or a setting that cannot be followed.
    """
    if isinstance(settings.get("image_processor"), Mapping):  # processor_config.json
        settings = settings["image_processor"]
    if "media_proc_cfg" in settings:
        settings = _of_kimis_own(settings, source)
    named, found = _class_of(settings, kind, source)
    reads = _CLASSES[found]
    given = {key: value for key, value in settings.items() if value is not None}
    known = {**_COMMON, **reads.defaults}
    for key, value in given.items():
        neutral = key in _NEUTRAL or key in reads.neutral
        if not (key in known or neutral or value is False):
            refuse(source, key, value, f"unknown for {found}")
    merged = {**known, **given}
    for key in ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "default_to_square"):
        if not isinstance(merged[key], bool):
            refuse(source, key, merged[key], "true or false expected")
    _require_unit_scale(merged, source)

    config: dict[str, Any] = {"crop_rounding": "floor", "resize_dtype": reads.resize_dtype}
    config["filter"] = _resample(merged["resample"], source)
    if not merged["do_resize"]:
        if reads.resize in _ALWAYS_RESIZES:
            refuse(source, "do_resize", False, f"true expected for {found}")
        config |= {"resize": "none", "resize_size": None}
    elif reads.resize is not None:
        config |= reads.resize(merged, given, source)
    else:
        rule, size = _size(merged, "size", source, merged["default_to_square"])
        config |= {"resize": rule, "resize_size": size}
    if config.get("square") is not None and not merged["do_normalize"]:
        refuse(
            source, "do_normalize", False, f"true expected for {found}, whose margin is the mean"
        )
    if merged["do_center_crop"]:
        if not reads.crops:
            refuse(source, "do_center_crop", True, f"{found} does not crop")
        rule, config["crop_size"] = _size(merged, "crop_size", source, True)
        if rule != "squash":
            refuse(source, "crop_size", merged["crop_size"], "height and width expected")
    for name, neutral_value in (("mean", 0.0), ("std", 1.0)):
        key = f"image_{name}"
        values = triple(merged[key], key, source)
        config[name] = values if merged["do_normalize"] else (neutral_value,) * 3
    notes = [reads.note] if reads.note else []
    if tiles := reads.tiles(merged):
        notes.append(f"base view only; {found} cuts {tiles} besides it")
    if named.endswith("Fast"):
        notes.append(
            f"pixels of {found}Pil; {named} differs by up to 1 level (bilinear) or 2 (bicubic)"
        )
    return Preprocessing(validated(config, source), source, tuple(notes))


def _class_of(settings: Settings, kind: str | None, source: str) -> tuple[str, str]:
    """(the class that the file names, the one that it is read as)."""
    named = settings.get("image_processor_type") or settings.get("feature_extractor_type") or kind
    if named is None:
        raise VitcliError(
            f"{source}: image_processor_type is missing",
            f"write one of {', '.join(_CLASSES)} into a copy of it",
        )
    found = str(named).removesuffix("Fast").removesuffix("Pil").removesuffix("Torchvision")
    found = found.replace("FeatureExtractor", "ImageProcessor")
    found = found.replace("Qwen2_5_VL", "Qwen2VL").replace("Qwen3VL", "Qwen2VL")
    if found not in _CLASSES:
        refuse(source, "image_processor_type", named, f"known: {', '.join(_CLASSES)}")
    return str(named), found


def _require_unit_scale(merged: Settings, source: str) -> None:
    factor = merged["rescale_factor"]
    if not merged["do_rescale"]:
        refuse(source, "do_rescale", False, "levels are always divided by 255 here")
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        refuse(source, "rescale_factor", factor, "only 1/255 is supported")


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
