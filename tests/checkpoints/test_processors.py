"""What other libraries' files say, and what is refused. Pixels are in tests/parity."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from vitcli.checkpoints.families.hf_processors import SUPPORTED, from_transformers
from vitcli.checkpoints.families.open_clip import from_open_clip
from vitcli.checkpoints.families.timm import from_timm
from vitcli.errors import VitcliError

VIT = {"image_processor_type": "ViTImageProcessor"}
CLIP = {"image_processor_type": "CLIPImageProcessor"}
QWEN = {"image_processor_type": "Qwen2VLImageProcessor"}


@pytest.mark.parametrize(
    "name",
    [
        *("ViT", "DeiT", "CLIP", "Bit", "Siglip", "GotOcr2", "Qwen2VL", "DINOv3ViT"),
        "DeepseekVLHybrid",
    ],
)
def test_defaults_are_those_of_the_class(name: str) -> None:
    """An empty file and the class's own file say the same; so do null keys and older names."""
    reference = getattr(transformers, f"{name}ImageProcessor")()
    written = from_transformers(
        reference.to_dict() | {"image_processor_type": None}, kind=f"{name}ImageProcessor"
    ).config
    silent = from_transformers({"image_processor_type": f"{name}ImageProcessor"}).config
    assert silent == written
    for kind in (
        f"{name}ImageProcessorFast",
        f"{name}ImageProcessorPil",
        f"{name}FeatureExtractor",
    ):
        assert from_transformers({"feature_extractor_type": kind}).config == silent
    nulls = dict.fromkeys(("size", "resample", "do_resize", "image_mean", "crop_size"))
    with_nulls = {"image_processor_type": f"{name}ImageProcessor", **nulls}
    assert from_transformers(with_nulls).config == silent


def test_an_old_file_without_a_class_is_read_by_its_familys() -> None:
    old = {"do_normalize": True, "do_resize": True, "resample": 2, "size": 384}
    config = from_transformers(old | {"image_mean": [0.5] * 3}, kind="ViTImageProcessor").config
    assert (config.resize, config.resize_size) == ("squash", (384, 384))
    with pytest.raises(VitcliError, match="image_processor_type"):
        from_transformers(old)


def test_a_bare_size_means_a_square_or_the_shorter_side() -> None:
    assert from_transformers(VIT | {"size": 200}).config.resize == "squash"
    assert from_transformers(CLIP | {"size": 200}).config.resize == "shortest"


def test_the_file_of_a_whole_processor() -> None:
    whole = {"image_processor": CLIP | {"size": 336}, "processor_class": "CLIPProcessor"}
    assert from_transformers(whole) == from_transformers(CLIP | {"size": 336})


def test_bookkeeping_and_empty_settings_are_harmless() -> None:
    extra = {
        "processor_class": "CLIPProcessor",
        "_valid_processor_keys": ["images"],
        "do_convert_rgb": True,
        "do_pad": False,
        "pad_size": None,
        "data_format": "channels_first",
    }
    assert from_transformers(CLIP | extra) == from_transformers(CLIP)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "image_processor_type"),
        ({"image_processor_type": "SamImageProcessor"}, "image_processor_type"),
        ({"image_processor_type": "Idefics3ImageProcessor", "do_resize": False}, "do_resize"),
        ({"image_processor_type": "Siglip2ImageProcessor", "patch_size": "x"}, "patch_size"),
        (VIT | {"do_rescale": False}, "do_rescale"),
        (VIT | {"rescale_factor": 1 / 127.5}, "rescale_factor"),
        (VIT | {"do_pad": True}, "do_pad"),
        (VIT | {"crop_pct": 0.9}, "crop_pct"),
        (VIT | {"resample": 9}, "resample"),
        (VIT | {"resample": True}, "resample"),
        (VIT | {"size": {"shortest_edge": 224, "longest_edge": 500}}, "size"),
        (VIT | {"size": {"max_height": 224, "max_width": 224}}, "size"),
        (VIT | {"size": "large"}, "size"),
        (VIT | {"size": -3}, "size"),
        (VIT | {"size": [1, 2, 3]}, "size"),
        (VIT | {"do_resize": "yes"}, "do_resize"),
        (VIT | {"do_center_crop": True}, "crop_size"),
        (CLIP | {"crop_size": {"shortest_edge": 224}}, "crop_size"),
        (VIT | {"image_mean": [0.5, 0.5]}, "image_mean"),
        (VIT | {"image_std": [0.5, 0.5, None]}, "image_std"),
        (VIT | {"image_std": [0.5, 0.5, 0.0]}, "std"),
        (VIT | {"min_pixels": 3}, "min_pixels"),
        (QWEN | {"do_center_crop": True, "crop_size": 224}, "do_center_crop"),
        (QWEN | {"size": {"height": 224, "width": 224}}, "size"),
        (QWEN | {"patch_size": 0}, "patch_size"),
    ],
)
def test_what_transformers_settings_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(VitcliError) as caught:
        from_transformers(settings, source="folder/preprocessor_config.json")
    assert caught.value.message.startswith("folder/preprocessor_config.json: ")
    assert key in caught.value.message


def test_qwen_bounds_old_and_new() -> None:
    bounds = {"min_pixels": 3136, "max_pixels": 12845056}
    old = from_transformers(QWEN | bounds).config
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    new = from_transformers(QWEN | {"size": size}).config
    assert old == new and (old.multiple, old.max_pixels) == (28, 12845056)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"input_size": [1, 224, 224]}, "input_size"),
        ({"input_size": 224}, "input_size"),
        ({"crop_mode": "border"}, "crop_mode"),
        ({"interpolation": "random"}, "interpolation"),
        ({"crop_pct": -1}, "crop_pct"),
        ({"mean": [0.5]}, "mean"),
        ({"std": ["a", "b", "c"]}, "std"),
    ],
)
def test_what_timm_settings_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(VitcliError, match=key):
        from_timm({"pretrained_cfg": settings})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"resize_mode": "longest"}, "resize_mode"),
        ({"mode": "L"}, "mode"),
        ({"interpolation": "lanczos"}, "interpolation"),
        ({"size": 0}, "size"),
        ({"something_new": 1}, "something_new"),
    ],
)
def test_what_open_clip_settings_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(VitcliError, match=key):
        from_open_clip({"preprocess_cfg": settings})


def test_open_clip_takes_the_size_of_the_tower() -> None:
    tower = {"model_cfg": {"vision_cfg": {"image_size": [336, 224]}}}
    config = from_open_clip(tower | {"preprocess_cfg": {"size": 224}})
    assert config.crop_size == (336, 224)


KEYS = (
    *("size", "crop_size", "resample", "image_mean", "patch_size", "merge_size", "max_pixels"),
    *("max_image_size", "min_size", "high_res_size", "max_patches", "max_tiles", "tile_size"),
    *("image_grid_pinpoints", "do_image_splitting", "do_pad", "do_resize", "image_size"),
    *("ensure_multiple_of", "max_soft_tokens", "temporal_patch_size", "max_num_patches"),
)
ODD = (
    True,
    False,
    1,
    0,
    -3,
    7.5,
    "x",
    [1, 2],
    [[1, "x"]],
    {"height": 32},
    {"longest_edge": 64},
    {},
)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_an_odd_value_is_followed_or_refused(kind: str) -> None:
    refused = 0
    for key in KEYS:
        for value in ODD:
            try:
                from_transformers({"image_processor_type": kind, key: value})
            except VitcliError as error:
                refused += 1
                assert error.message.startswith("preprocessor_config.json: ")
    assert refused
