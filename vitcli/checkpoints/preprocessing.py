"""How images are prepared: what files say, how processors resize, and who has the last word.

A rule takes the settings of a transformers processor to keys of PreprocessConfig; which class
resizes by which rule is in `families.hf_processors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from vitcli.config.request import NAME_A_PRESET
from vitcli.config.schema import EncoderConfig, ModelConfig, PreprocessConfig, pixel_keys
from vitcli.config.settings import Layers, Setting, validate
from vitcli.config.yaml import Document, as_tuple
from vitcli.errors import VitcliError
from vitcli.stats import is_number

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""The files of transformers that say how images are prepared, best first."""


@dataclass(frozen=True)
class Preprocessing:
    """How images are prepared, and who says so."""

    config: PreprocessConfig
    by: str
    notes: tuple[str, ...] = ()
    """What differs from the library's own processing, one sentence each."""


Settings = Mapping[str, Any]
Pair = tuple[int, int]
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""In the order of Pillow's numbers, 0 to 5."""


def section(settings: Settings, key: str, source: str) -> Settings:
    value = settings.get(key) or {}
    if not isinstance(value, Mapping):
        refuse(source, key, value, "a group of keys expected")
    return value


def pair(value: Any, key: str, source: str) -> Pair:
    """(height, width) of one number or two."""
    sides = value if is_list(value, 2) else [value, value]
    height, width = (whole(side, key, source) for side in sides)
    return height, width


def whole(value: Any, key: str, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        refuse(source, key, value, "whole numbers above zero expected")
    return value


def triple(value: Any, key: str, source: str) -> tuple[float, float, float]:
    values = value if is_list(value, 3) else [value] * 3
    if not all(is_number(item) for item in values):
        refuse(source, key, value, "three numbers expected")
    red, green, blue = (float(item) for item in values)
    return red, green, blue


def is_list(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def validated(config: dict[str, Any], source: str) -> PreprocessConfig:
    try:
        return PreprocessConfig.model_validate(config)
    except ValidationError as error:
        raise VitcliError(f"{source}: {error.errors()[0]['msg']}") from error


def refuse(source: str, key: str, value: Any, why: str) -> NoReturn:
    raise VitcliError(
        f"{source}: {key}: {value!r}: {why}",
        "give the preprocessing yourself: --set preprocess.resize=… (see --print-config)",
    )


@dataclass(frozen=True)
class Given:
    """The settings of one file: its own, and over the defaults of its class."""

    own: Settings
    merged: Settings
    source: str

    def __getitem__(self, key: str) -> Any:
        return self.merged[key]

    def refuse(self, key: str, why: str) -> NoReturn:
        refuse(self.source, key, self.merged[key], why)

    def whole(self, key: str) -> int:
        return whole(self.merged[key], key, self.source)

    def edge(self, key: str, edge: str) -> int:
        """A whole number in a group such as `size`."""
        edges = self.merged[key] if isinstance(self.merged[key], Mapping) else {}
        return whole(edges.get(edge), f"{key}.{edge}", self.source)

    def size(self, key: str = "size", square: bool = True) -> tuple[str, Pair]:
        """(resize rule, (height, width)) of the forms that transformers accepts.

        Args:
            square: whether a bare number is a square or the shorter side.
        """
        value = self.merged[key]
        if isinstance(value, Mapping):
            edges = {name: edge for name, edge in value.items() if edge is not None}
            if edges.keys() == {"height", "width"}:
                return "squash", pair([edges["height"], edges["width"]], key, self.source)
            if edges.keys() == {"shortest_edge"}:
                return "shortest", pair(edges["shortest_edge"], key, self.source)
            self.refuse(key, "height and width, or shortest_edge, expected")
        squash = square or isinstance(value, list | tuple)
        return "squash" if squash else "shortest", pair(value, key, self.source)

    def side(self, key: str = "size") -> int:
        """The side of a square."""
        rule, (height, width) = self.size(key)
        if rule != "squash" or height != width:
            self.refuse(key, "height and width that are equal expected")
        return height


Rule = Callable[[Given], dict[str, Any]]
"""From a file to keys of PreprocessConfig."""


def smart(given: Given) -> dict[str, Any]:
    """Qwen's: both sides to multiples, the area between two bounds."""
    edges = given["size"] if isinstance(given["size"], Mapping) else {}
    unit = given.whole("patch_size") * given.whole("merge_size")
    found: dict[str, Any] = {"resize": "smart", "multiple": unit}
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        pixels = given.own.get(key, edges.get(edge, edges.get(key)))
        if pixels is None:
            given.refuse("size", "shortest_edge and longest_edge expected")
        found[key] = whole(pixels, key, given.source)
    return found


def smart_in_tokens(given: Given) -> dict[str, Any]:
    """LFM2-VL's: as Qwen's, its bounds in tokens; the view of the whole image, unsplit."""
    unit = given.whole("encoder_patch_size") * given.whole("downsample_factor")
    if given["do_image_splitting"] and not given["use_thumbnail"]:
        given.refuse("use_thumbnail", "a large image is in tiles alone")
    area = {f"{end}_pixels": given.whole(f"{end}_image_tokens") * unit**2 for end in ("min", "max")}
    return {"resize": "smart", "multiple": unit, **area}


def smart_in_time(given: Given) -> dict[str, Any]:
    """GLM-4V's: as Qwen's, but an image counts as often as it is repeated in time."""
    found, times = smart(given), given.whole("temporal_patch_size")
    for key in ("min_pixels", "max_pixels"):
        found[key], rest = divmod(found[key], times)
        if rest:
            given.refuse("size", f"multiples of temporal_patch_size = {times}")
    return found


def patches(given: Given) -> dict[str, Any]:
    """SigLIP 2 NaFlex: the aspect kept, as many patches as allowed."""
    most = given.whole("max_num_patches")
    return {"resize": "patches", "multiple": given.whole("patch_size"), "max_patches": most}


def within_edge(given: Given) -> dict[str, Any]:
    """Pixtral: at most a longest edge, then up to whole patches."""
    sides = set(_sides(given["patch_size"]))
    if len(sides) != 1:
        given.refuse("patch_size", "height and width that are equal expected")
    return {
        "resize": "within",
        "longest_edge": given.edge("size", "longest_edge"),
        "multiple": whole(sides.pop(), "patch_size", given.source),
    }


def global_tile(given: Given) -> dict[str, Any]:
    """Idefics 3: the whole image goes through two sizes before it is squashed to one tile."""
    side = given.edge("max_image_size", "longest_edge")
    return {
        "resize": "tile",
        "resize_size": (side, side),
        "longest_edge": given.edge("size", "longest_edge"),
        "split": bool(given["do_image_splitting"]),
    }


def base_view(given: Given) -> dict[str, Any]:
    """LLaVA-NeXT and LLaVA-OneVision: the first view is squashed, whatever `size` says."""
    return {"resize": "squash", "resize_size": given.size(square=False)[1]}


def bounded(given: Given) -> dict[str, Any]:
    """Idefics 2: both edges of `size`; height and width squash."""
    edges = ("shortest_edge", "longest_edge")
    if not isinstance(given["size"], Mapping) or not set(edges) <= set(given["size"]):
        return {"resize": "squash", "resize_size": given.size()[1]}
    return {"resize": "bounded", **{edge: given.edge("size", edge) for edge in edges}}


def thumbnail(given: Given) -> dict[str, Any]:
    """Perception LM: the first view is squashed to a tile, whatever `size` says."""
    return {"resize": "squash", "resize_size": (given.whole("tile_size"),) * 2}


def in_square(given: Given) -> dict[str, Any]:
    """DeepSeek-VL and Janus: in the middle of a square; the hybrid's by way of a larger one."""
    if not given["do_pad"]:
        given.refuse("do_pad", "true expected: the encoder reads squares")
    side, least = given.side(), given.whole("min_size")
    if "high_res_size" not in given.merged:
        return {"resize": "none", "square": side, "shortest_edge": least}
    for key, other in (("resample", "high_res_resample"), ("image_mean", "high_res_image_mean")):
        if as_tuple(given[other]) != as_tuple(given[key]):
            given.refuse(other, f"that of {key} expected")
    squash = {"resize": "squash", "resize_size": (side, side)}
    return {**squash, "square": given.side("high_res_size"), "shortest_edge": least}


def llava(given: Given) -> dict[str, Any]:
    """CLIP's; with `do_pad` after the image is put in the middle of a square."""
    rule, size = given.size(square=given["default_to_square"])
    return {"resize": rule, "resize_size": size, "square": 0 if given["do_pad"] else None}


ARIA_PATCH = 14


def aria(given: Given) -> dict[str, Any]:
    """The longer side to a number, then black up to whole patches; what is beyond is masked."""
    if given["split_image"]:
        given.refuse("split_image", "false expected: there are tiles alone")
    longest, least = given.whole("max_image_size"), given.whole("min_image_size")
    edges = {"longest_edge": longest, "shortest_edge": least}
    return {"resize": "longest", **edges, "fill": ARIA_PATCH}


def shrunk(given: Given) -> dict[str, Any]:
    """Kimi: never enlarged, then black up to whole cells of patches."""
    patch = given.whole("patch_size")
    edges = {given.edge("size", edge) for edge in ("max_height", "max_width")}
    if len(edges) != 1:
        given.refuse("size", "max_height and max_width that are equal expected")
    return {
        "resize": "shrink",
        "multiple": patch,
        "fill": patch * given.whole("merge_size"),
        "max_patches": given.whole("max_patches"),
        "longest_edge": patch * edges.pop(),
    }


def closest(given: Given) -> dict[str, Any]:
    """DPT: multiples of a number, at the same aspect ratio or not."""
    rule, (height, width) = given.size()
    unit = given.whole("ensure_multiple_of")
    if rule != "squash":
        given.refuse("size", "height and width expected")
    if given["do_pad"] and given["size_divisor"]:
        given.refuse("do_pad", "a margin up to multiples of size_divisor is not supported")
    if given["keep_aspect_ratio"]:
        return {"resize": "closest", "resize_size": (height, width), "multiple": unit}
    multiples = (round(height / unit) * unit, round(width / unit) * unit)
    return {"resize": "squash", "resize_size": multiples}


def canvas(given: Given) -> dict[str, Any]:
    """Llama 4: a small image in one tile; the squashed view of a larger one."""
    if given["resize_to_max_canvas"]:
        given.refuse("resize_to_max_canvas", "false expected")
    if given.whole("max_patches") == 1:
        given.refuse("max_patches", "2 or more expected")
    return {"resize": "canvas", "resize_size": (given.side(),) * 2}


def area(given: Given) -> dict[str, Any]:
    """Gemma 4: as many patches as make the most soft tokens."""
    unit = given.whole("patch_size") * given.whole("pooling_kernel_size")
    most = given.whole("max_soft_tokens") * unit**2
    return {"resize": "area", "multiple": unit, "max_pixels": most}


def idefics(given: Given) -> dict[str, Any]:
    side = given.own.get("image_size")
    size = given.size()[1] if side is None else (whole(side, "image_size", given.source),) * 2
    return {"resize": "squash", "resize_size": size}


ALWAYS_RESIZE = (global_tile, base_view, in_square, llava, aria, shrunk, canvas, area)
"""Rules of classes to which `do_resize` means nothing."""


def anyres_tiles(given: Given) -> str:
    side = max(_sides(given.merged.get("crop_size")) or _sides(given["size"]) or [0])
    listed = given.merged.get("image_grid_pinpoints")
    points = [_sides(p) for p in listed if is_list(p, 2)] if isinstance(listed, list) else []
    counts = [math.prod(-(-edge // side) for edge in p) for p in points if side]
    return up_to_tiles(max(counts, default=0))


def _sides(size: Any) -> list[int]:
    found = size.values() if isinstance(size, Mapping) else size if is_list(size, 2) else [size]
    return [edge for edge in found if isinstance(edge, int)]


def split_tiles(given: Given) -> str:
    longest, tile = (given.edge(key, "longest_edge") for key in ("size", "max_image_size"))
    return up_to_tiles((-(-longest // tile)) ** 2, given["do_image_splitting"])


def tiles_of(key: str, where: str = "") -> Callable[[Given], str]:
    """Up to `key` tiles, if `where` is set."""
    return lambda given: up_to_tiles(given.merged.get(key), not where or given.merged.get(where))


def up_to_tiles(most: Any, cuts: Any = True) -> str:
    return f"up to {most} tiles" if most and cuts else ""


Reader = Callable[[Mapping[str, Settings], EncoderConfig], Preprocessing | None]
"""A family's: from the JSON files beside the weights, by name; None where none says it."""


def with_preprocess(
    config: ModelConfig,
    read: Reader | None,
    files: Mapping[str, Settings],
    source: str,
    preset: ModelConfig | None,
    overrides: Sequence[Setting],
) -> tuple[ModelConfig, str | None, tuple[str, ...]]:
    """The config with the preprocessing of the source, else of the preset, then the user's.

    Also who said it, None where nobody did, and the source's notes on it.

    Raises:
        VitcliError: a file that cannot be followed, or settings of the user that leave others open.
    """
    chosen = [s for s in overrides if s.path[0] == "preprocess"]
    by = f"preset {preset.name}" if preset else None
    prepared: Preprocessing | None = None
    refused: VitcliError | None = None
    try:
        prepared = read(files, config.encoder) if read else None
    except VitcliError as error:
        if not chosen and not preset:
            raise
        refused = error  # the user says it in place of a file that cannot be followed
    layers = Layers()
    layers.add(Document(by or "config", config.model_dump(mode="python")))
    if prepared:
        by = prepared.by
        layers.set(Setting(("preprocess",), prepared.config.model_dump(mode="python"), by))
    layers.set(Setting(("name",), Path(source).name or source, "the source"))
    for setting in overrides:
        if setting.path[0] == "preprocess" or setting.path in (("name",), ("classes",)):
            layers.set(setting)
    whole = validate(ModelConfig, layers)
    if chosen and by is None:
        _require_all(whole.preprocess, chosen, source, refused)
    by = ", ".join([*([by] if by else []), *(s.source for s in chosen)]) or None
    return whole, by, prepared.notes if prepared else ()


def _require_all(
    config: PreprocessConfig,
    chosen: Sequence[Setting],
    source: str,
    refused: VitcliError | None,
) -> None:
    """Every setting that decides pixels was given, where nothing but the user gives any."""
    given = {s.path[1] for s in chosen if len(s.path) > 1}
    given |= {key for s in chosen if len(s.path) == 1 for key in s.value}
    if open_keys := [key for key in pixel_keys(config) if key not in given]:
        why = f" ({refused.message})" if refused else ""
        keys = " ".join(f"--set preprocess.{key}=VALUE" for key in open_keys)
        raise VitcliError(
            f"{source}: preprocessing settings still unknown: {', '.join(open_keys)}{why}",
            f"{NAME_A_PRESET}, or {keys}",
        )
