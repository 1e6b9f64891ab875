"""The image processor classes of transformers, and their files: preprocessor_config.json.

A new class is an entry in _CLASSES, with a rule in `preprocessing` if it resizes in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitcli.checkpoints import preprocessing as rules
from vitcli.checkpoints.preprocessing import CLIP, HALF, IMAGENET, Given, Preprocessing, Settings
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
        resize_dtype: what it resizes in.
        note: where its pixels are not followed.
    """

    defaults: Settings
    resize: rules.Rule | None = None
    neutral: tuple[str, ...] = ()
    crops: bool = False
    tiles: Callable[[Given], str] = field(default=lambda given: "")
    resize_dtype: str = "uint8"
    note: str = ""


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _assumes(size: Any, resample: int, statistics: Settings, /, **more: Any) -> Settings:
    """Defaults of a class; `statistics` are the mean and std."""
    statistics = {f"image_{name}": values for name, values in statistics.items()}
    return {"size": size, "resample": resample, **statistics, **more}


_BY_TORCHVISION = (
    "pixels by Pillow; the processor, which has torchvision's resize alone, differs by up to 1 "
    "level (bilinear) or 2 (bicubic)"
)
_BY_BFLOAT16 = "; it normalizes in bfloat16, which rounds values to 8 bits"

_CENTER_224 = {"do_center_crop": True, "crop_size": _square(224)}
_SHORTEST = {"default_to_square": False}  # what a bare number means as `size`
_CLIP = Processor(_assumes({"shortest_edge": 224}, 3, CLIP, **_CENTER_224, **_SHORTEST), crops=True)
_VIT = Processor(_assumes(_square(224), 2, HALF), crops=True)
_PATCHES_OF_28 = {"patch_size": 14, "merge_size": 2}
_IDEFICS3 = Processor(
    _assumes(
        *({"longest_edge": 4 * 364}, 1, HALF),
        max_image_size={"longest_edge": 364},
        do_image_splitting=True,
    ),
    rules.global_tile,
    neutral=("do_pad", "vision_encoder_max_size", "return_row_col_info"),
    tiles=rules.split_tiles,
)
_GLM4V = Processor(
    _assumes(
        *({"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}, 3, CLIP),
        temporal_patch_size=2,
        **_PATCHES_OF_28,
        **_SHORTEST,
    ),
    rules.smart_in_time,
    note="the processor enlarges images that are under one 2x2 of patches another way",
)
_DEEPSEEK = Processor(
    _assumes(_square(384), 3, CLIP, min_size=14, do_pad=True),
    rules.in_square,
    neutral=("background_color",),  # the library takes it from image_mean
)
_HYBRID = {
    "high_res_size": _square(1024),
    "high_res_resample": 3,
    **{f"high_res_image_{name}": values for name, values in CLIP.items()},
}
_ANYRES = ("image_grid_pinpoints", "do_pad", "aspect_ratio_setting")
_DYNAMIC = ("crop_to_patches", "min_patches", "max_patches")
_DYNAMIC_TILES = rules.tiles_of("max_patches", "crop_to_patches")
_CLASSES: Mapping[str, Processor] = {
    "ViTImageProcessor": _VIT,
    "SwinImageProcessor": _VIT,
    "DeiTImageProcessor": Processor(_assumes(_square(256), 3, HALF, **_CENTER_224), crops=True),
    "BeitImageProcessor": Processor(
        _assumes(_square(224), 3, HALF, crop_size=_square(224)),
        neutral=("reduce_labels", "do_reduce_labels"),
        crops=True,
    ),
    "Tipsv2ImageProcessor": Processor(
        _assumes(_square(448), 2, HALF, do_normalize=False), crops=True
    ),
    "CLIPImageProcessor": _CLIP,
    "ChineseCLIPImageProcessor": _CLIP,
    "LlavaImageProcessor": replace(
        _CLIP, defaults={**_CLIP.defaults, "do_pad": False}, resize=rules.llava
    ),
    "VideoLlavaImageProcessor": _CLIP,
    "BitImageProcessor": _CLIP,
    "SiglipImageProcessor": Processor(_assumes(_square(224), 3, HALF, **_SHORTEST), crops=True),
    "Siglip2ImageProcessor": Processor(
        _assumes(None, 2, HALF, patch_size=16, max_num_patches=256), rules.patches
    ),
    "DINOv3ViTImageProcessor": Processor(
        _assumes(_square(224), 2, IMAGENET), crops=True, resize_dtype="float32"
    ),
    "GotOcr2ImageProcessor": Processor(
        _assumes(_square(384), 3, CLIP), neutral=_DYNAMIC, tiles=_DYNAMIC_TILES
    ),
    "Qwen2VLImageProcessor": Processor(
        _assumes(
            *({"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, 3, CLIP),
            **_PATCHES_OF_28,
        ),
        rules.smart,
        neutral=("min_pixels", "max_pixels"),
    ),
    "PerceptionLMImageProcessor": Processor(
        _assumes(_square(448), 3, HALF, tile_size=448, max_num_tiles=36),
        rules.thumbnail,
        neutral=("vision_input_type",),
        tiles=rules.tiles_of("max_num_tiles"),
    ),
    "Ovis2ImageProcessor": Processor(
        _assumes(_square(384), 3, CLIP),
        neutral=(*_DYNAMIC, "use_covering_area_grid"),
        tiles=_DYNAMIC_TILES,
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
        _assumes(None, 3, HALF, max_image_size=980, min_image_size=336, split_image=False),
        rules.aria,
        neutral=("split_resolutions",),
    ),
    "DPTImageProcessor": Processor(
        _assumes(
            *(_square(384), 3, HALF),
            ensure_multiple_of=1,
            keep_aspect_ratio=False,
            do_pad=False,
            size_divisor=None,
        ),
        rules.closest,
        neutral=("do_reduce_labels",),
    ),
    "Kimi_K25ImageProcessor": Processor(
        _assumes(
            *({"max_height": 512, "max_width": 512}, 3, HALF), max_patches=16384, **_PATCHES_OF_28
        ),
        rules.shrunk,
        note=_BY_TORCHVISION,
    ),
    "Llama4ImageProcessor": Processor(
        _assumes(_square(336), 2, HALF, max_patches=16, resize_to_max_canvas=False),
        rules.canvas,
        tiles=rules.tiles_of("max_patches"),
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
        rules.area,
    ),
    "GlmgaImageProcessor": replace(_GLM4V, neutral=("patch_expand_factor",)),
    "Glm4vImageProcessor": _GLM4V,
    "Glm46VImageProcessor": _GLM4V,
    "Cohere2VisionImageProcessor": Processor(
        _assumes(_square(512), 3, CLIP, crop_to_patches=True, max_patches=12),
        neutral=("min_patches", "patch_size"),
        tiles=_DYNAMIC_TILES,
        note=_BY_TORCHVISION,
    ),
    "Lfm2VlImageProcessor": Processor(
        _assumes(
            *(_square(512), 2, HALF),
            encoder_patch_size=16,
            downsample_factor=2,
            min_image_tokens=64,
            max_image_tokens=256,
            do_image_splitting=True,
            use_thumbnail=True,
            max_tiles=10,
        ),
        rules.smart_in_tokens,
        neutral=(
            *("min_tiles", "tile_size", "max_pixels_tolerance", "max_num_patches"),
            *("do_pad", "return_row_col_info"),
        ),
        tiles=lambda given: rules.up_to_tiles(
            given["max_tiles"], given["do_image_splitting"] and given.whole("max_tiles") > 1
        ),
        note=_BY_TORCHVISION,
    ),
    "PixtralImageProcessor": Processor(
        _assumes({"longest_edge": 1024}, 3, CLIP, patch_size=_square(16)),
        rules.within_edge,
        neutral=("do_pad",),  # the images of a batch to one size
    ),
    "LlavaNextImageProcessor": replace(
        _CLIP, resize=rules.base_view, neutral=_ANYRES, tiles=rules.anyres_tiles
    ),
    "LlavaOnevisionImageProcessor": Processor(
        _assumes(_square(384), 3, CLIP, **_SHORTEST),
        rules.base_view,
        neutral=_ANYRES,
        tiles=rules.anyres_tiles,
    ),
    "Gemma3ImageProcessor": Processor(
        _assumes(_square(224), 2, HALF),
        neutral=(
            *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
            "pan_and_scan_min_ratio_to_activate",
        ),
        tiles=rules.tiles_of("pan_and_scan_max_num_crops", "do_pan_and_scan"),
    ),
    "IdeficsImageProcessor": Processor(
        _assumes(_square(224), 3, CLIP), rules.idefics, neutral=("image_size", "image_num_channels")
    ),
    "Idefics2ImageProcessor": Processor(
        _assumes(
            *({"shortest_edge": 378, "longest_edge": 980}, 2, HALF),
            do_image_splitting=False,
            **_SHORTEST,
        ),
        rules.bounded,
        neutral=("do_pad",),
        tiles=lambda given: rules.up_to_tiles(4, given["do_image_splitting"]),
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
"""Defaults of every class."""
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
"""Keys of any class that change no pixel."""
_KIMI_VIDEO = (
    *("in_patch_limit_each_frame", "in_patch_limit_video", "sample_fps"),
    *("max_num_frames_each_video", "temporal_merge_kernel_size", "timestamp_mode", "config_type"),
)
"""Keys of Kimi's own file that are about videos."""


def _of_kimis_own(settings: Settings, source: str) -> Settings:
    """The file that Kimi's own code reads, as the library's class has it."""
    own = dict(rules.section(settings, "media_proc_cfg", source))
    if own.pop("fixed_output_tokens", None) is not None:
        rules.refuse(source, "fixed_output_tokens", settings["media_proc_cfg"], "null expected")
    side = own.pop("patch_limit_on_one_side", None)
    return {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "max_patches": own.pop("in_patch_limit", None),
        "merge_size": own.pop("merge_kernel_size", None),
        "size": {"max_height": side, "max_width": side},
        **{key: value for key, value in own.items() if key not in _KIMI_VIDEO},
    }


def processor(kind: str | None) -> rules.Reader:
    """A family's `preprocess`: the file beside the weights; `kind` is its class if it has none."""

    def read(configs: Mapping[str, Settings], encoder: EncoderConfig) -> Preprocessing | None:
        for name in rules.PROCESSORS:
            if name not in configs:
                continue
            settings = configs[name]
            if name == "processor_config.json":
                inner = settings.get("image_processor")
                if not isinstance(inner, Mapping):
                    continue  # it speaks of text or sound alone
                settings = inner
            found = from_transformers(settings, kind=kind, source=name)
            if found.config.fill == rules.ARIA_PATCH != encoder.patch_size:
                filled = found.config.model_copy(update={"fill": encoder.patch_size})
                found = replace(found, config=filled)
            return found
        return None

    return read


def from_transformers(
    settings: Settings, *, kind: str | None = None, source: str = rules.PROCESSORS[0]
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
    named, kind = _class_of(settings, kind, source)
    reads = _CLASSES[kind]
    known = {**_COMMON, **reads.defaults}
    own = {
        key: value
        for key, value in settings.items()
        if value is not None and (value is not False or key in known)
    }
    for key, value in own.items():
        neutral = key in _NEUTRAL or key in reads.neutral
        if key not in known and not neutral:
            rules.refuse(source, key, value, f"unknown for {kind}")
    given = Given(own, {**known, **own}, source)
    for key in (key for key, value in _COMMON.items() if isinstance(value, bool)):
        if not isinstance(given[key], bool):
            given.refuse(key, "true or false expected")
    if not given["do_rescale"]:
        given.refuse("do_rescale", "levels are always divided by 255 here")
    factor = given["rescale_factor"]
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        given.refuse("rescale_factor", "only 1/255 is supported")
    number = given["resample"]
    is_int = isinstance(number, int) and not isinstance(number, bool)
    if not is_int or number not in range(len(rules.FILTERS)):
        given.refuse("resample", "Pillow's filters are 0 to 5")

    config = {"resize_size": None, **_resized(reads, given, kind)}
    config |= {"crop_rounding": "floor", "resize_dtype": reads.resize_dtype}
    config["filter"] = rules.FILTERS[number]
    if config.get("square") is not None and not given["do_normalize"]:
        given.refuse("do_normalize", f"true expected for {kind}, whose margin is the mean")
    if given["do_center_crop"]:
        if not reads.crops:
            given.refuse("do_center_crop", f"{kind} does not crop")
        rule, config["crop_size"] = given.size("crop_size")
        if rule != "squash":
            given.refuse("crop_size", "height and width expected")
    for name, neutral_value in (("mean", 0.0), ("std", 1.0)):
        values = rules.triple(given[f"image_{name}"], f"image_{name}", source)
        config[name] = values if given["do_normalize"] else (neutral_value,) * 3
    notes = [reads.note] if reads.note else []
    if tiles := reads.tiles(given):
        notes.append(f"base view only; {kind} cuts {tiles} besides it")
    if named.endswith("Fast"):
        notes.append(
            f"pixels of {kind}Pil; {named} differs by up to 1 level (bilinear) or 2 (bicubic)"
        )
    return Preprocessing(rules.validated(config, source), source, tuple(notes))


def _resized(reads: Processor, given: Given, kind: str) -> dict[str, Any]:
    """The keys of PreprocessConfig that say how an image is resized."""
    if not given["do_resize"]:
        if reads.resize in rules.ALWAYS_RESIZE:
            given.refuse("do_resize", f"true expected for {kind}")
        return {"resize": "none"}
    if reads.resize is not None:
        return reads.resize(given)
    rule, size = given.size(square=given["default_to_square"])
    return {"resize": rule, "resize_size": size}


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
        rules.refuse(source, "image_processor_type", named, f"known: {', '.join(_CLASSES)}")
    return str(named), found
