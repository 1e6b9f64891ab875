"""What a checkpoint's families say about preprocessing, and reading single settings of a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError

from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError

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


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
