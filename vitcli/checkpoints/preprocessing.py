"""The preprocessing that comes with a checkpoint, from the file beside it that tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.family import Family
from vitcli.checkpoints.processors import from_open_clip, from_timm, from_transformers
from vitcli.config.schema import EncoderConfig, PreprocessConfig

PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def preprocess_of(
    configs: Mapping[str, dict[str, Any]], family: Family, encoder: EncoderConfig
) -> tuple[PreprocessConfig, str] | None:
    """(the preprocessing, who tells it); None where nothing does.

    Raises:
        VitcliError: a setting that cannot be honored.
    """
    config = configs.get(family.config_file, {})
    if family.config_file == "open_clip_config.json" and config:
        return from_open_clip(config), family.config_file
    if "architecture" in config:
        return from_timm(config, source=family.config_file), family.config_file
    for name in PROCESSORS:
        if name in configs:
            kind = config.get("model_type")
            return from_transformers(configs[name], model_type=kind, source=name), name
    if family.preprocess is not None:
        return family.preprocess(encoder), f"family {family.name}"
    return None
