"""Pixels equal those of the libraries the weights come from, on images built here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import open_clip.transform
import pytest
import timm
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from timm.data import create_transform, resolve_data_config
from torch.nn.functional import interpolate
from torchvision.models import ViT_B_16_Weights, ViT_H_14_Weights, ViT_L_16_Weights

from vitcli.checkpoints.families.hf_processors import from_transformers
from vitcli.checkpoints.families.open_clip import from_open_clip
from vitcli.checkpoints.families.timm import from_timm
from vitcli.config.request import resized_to
from vitcli.config.schema import PreprocessConfig
from vitcli.images.preprocess import preprocess

SIZES = [  # width, height
    *[(640, 427), (427, 640), (333, 1000), (301, 257), (224, 224), (256, 256)],
    *[(97, 131), (60, 60), (7, 9), (900, 700)],
    # 224 on the shorter side leaves margins of 3, 7 and 11, where floor and round differ
    *[(227, 224), (224, 231), (235, 224)],
]


@functools.cache
def photograph(width: int, height: int) -> Image.Image:
    """Smooth color fields, hard edges and grain, in full contrast."""
    random = np.random.default_rng(width * 10_007 + height)
    coarse = Image.fromarray(random.integers(0, 256, (6, 7, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    y, x = np.mgrid[0:height, 0:width]
    pixels[(x // max(width // 9, 1) + y // max(height // 5, 1)) % 4 == 0] *= 0.3
    pixels[(x - width * 0.6) ** 2 + (y - height * 0.4) ** 2 < (min(width, height) * 0.2) ** 2] = 255
    pixels += random.normal(0, 6, pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def levels(image: Image.Image, config: PreprocessConfig) -> NDArray[np.float32]:
    """What the configured resize and crop leave, as levels 0 to 255."""
    unscaled = config.model_copy(update={"mean": (0.0,) * 3, "std": (1.0,) * 3})
    return preprocess(image, unscaled) * 255


def same(ours: NDArray[np.float32], theirs: NDArray[Any], tolerance: float = 1e-6) -> None:
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PUBLISHED = {
    "vit": ("ViTImageProcessorPil", {}),
    "mae": ("ViTImageProcessorPil", IMAGENET),
    "vit 384": ("ViTImageProcessorPil", {"size": 384}),
    "deit": ("DeiTImageProcessorPil", IMAGENET),
    "clip": ("CLIPImageProcessorPil", {}),
    "clip 336": ("CLIPImageProcessorPil", {"size": 336, "crop_size": 336}),
    "clip, crop larger": ("CLIPImageProcessorPil", {"size": 200, "crop_size": 225}),
    "siglip": ("SiglipImageProcessorPil", {}),
    "siglip 384": ("SiglipImageProcessorPil", {"size": {"height": 384, "width": 384}}),
    "siglip not square": ("SiglipImageProcessorPil", {"size": [160, 224], "resample": 2}),
    "siglip, bare size": ("SiglipImageProcessorPil", {"size": 192}),
    "dinov2": ("BitImageProcessorPil", {"size": {"shortest_edge": 256}, **IMAGENET}),
    "lanczos": ("BitImageProcessorPil", {"resample": 1, "crop_size": {"height": 90, "width": 200}}),
    "no normalization": ("ViTImageProcessorPil", {"do_normalize": False}),
    "no resize": ("CLIPImageProcessorPil", {"do_resize": False}),
    "pixtral": ("PixtralImageProcessorPil", {}),
    "mistral 3, shrunk": (
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 154}, "patch_size": {"height": 14, "width": 14}},
    ),
    "internvl": ("GotOcr2ImageProcessorPil", {"size": {"height": 448, "width": 448}, **IMAGENET}),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("size", SIZES)
def test_transformers_pillow_processors(name: str, size: tuple[int, int]) -> None:
    kind, settings = PUBLISHED[name]
    processor = getattr(transformers, kind)(**settings)
    config = from_transformers(json.loads(processor.to_json_string())).config
    image = photograph(*size)
    theirs = processor(image, return_tensors="np")["pixel_values"][0]
    same(preprocess(image, config), theirs)
    raw = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")
    assert np.array_equal(np.rint(levels(image, config)), raw["pixel_values"][0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [224, 256])
def test_dinov3_resizes_in_float(size: tuple[int, int], side: int) -> None:
    """Within 1e-6 of the processor's formula in float64; it computes its weights in float32,
    which costs itself 6e-6 on smooth images and up to 1e-4 at hard edges."""
    processor = transformers.DINOv3ViTImageProcessor(size={"height": side, "width": side})
    config = from_transformers(json.loads(processor.to_json_string())).config
    image = photograph(*size)
    unit = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].double() / 255
    exact = interpolate(unit, (side, side), mode="bilinear", antialias=True)[0].numpy()
    exact = (exact - np.reshape(config.mean, (3, 1, 1))) / np.reshape(config.std, (3, 1, 1))
    ours = preprocess(image, config)
    same(ours, exact)
    same(ours, processor(image, return_tensors="np")["pixel_values"][0], 1e-4)
    if size != (side, side):  # an 8-bit resize is told apart
        eight_bit = config.model_copy(update={"resize_dtype": "uint8"})
        assert np.abs(preprocess(image, eight_bit) - exact).max() > 5e-3


@pytest.mark.parametrize("size", [(97, 131), (301, 257), (60, 60)])
def test_dinov3_on_smooth_images(size: tuple[int, int]) -> None:
    processor = transformers.DINOv3ViTImageProcessor()
    config = from_transformers(json.loads(processor.to_json_string())).config
    image = photograph(*size).filter(ImageFilter.GaussianBlur(3))
    same(preprocess(image, config), processor(image, return_tensors="np")["pixel_values"][0], 6e-6)


@pytest.mark.parametrize("size", [*SIZES, (1000, 6), (30, 31), (1300, 1000)])
@pytest.mark.parametrize("older", [False, True])
def test_qwen2_vl_smart_resize(size: tuple[int, int], older: bool) -> None:
    bounds = {"min_pixels": 100 * 100, "max_pixels": 500 * 400} if older else {}
    processor = transformers.Qwen2VLImageProcessorPil(**bounds)
    settings = json.loads(processor.to_json_string())
    if older:
        settings = {**settings, "size": None, **bounds}
    check_in_cells(processor, settings, size)


@pytest.mark.parametrize("size", [*SIZES, (1300, 1000), (40, 61)])
@pytest.mark.parametrize("bounds", [{}, {"shortest_edge": 100 * 100, "longest_edge": 400 * 500}])
def test_glm_4vs_smart_resize(size: tuple[int, int], bounds: dict[str, int]) -> None:
    processor = transformers.Glm4vImageProcessorPil(**({"size": bounds} if bounds else {}))
    check_in_cells(processor, json.loads(processor.to_json_string()), size)


def check_in_cells(processor: Any, settings: dict[str, Any], size: tuple[int, int]) -> None:
    """Pixels of a processor that gives patches cell by cell."""
    config = from_transformers(settings).config
    image = photograph(*size)
    features = processor(image, return_tensors="np")
    _, rows, columns = features["image_grid_thw"][0]
    patches = features["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)
    theirs = patches[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6)
    same(preprocess(image, config), theirs.reshape(3, rows * 14, columns * 14))


TIMM = [
    "vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "vit_base_patch16_384.augreg_in21k_ft_in1k",
    "vit_base_patch16_clip_224.openai",
    "vit_base_patch16_siglip_224.webli",
    "vit_small_patch14_dinov2.lvd142m",
    "eva02_base_patch14_448.mim_in22k_ft_in1k",
    "deit_tiny_patch16_224.fb_in1k",
]


@pytest.mark.parametrize("tag", TIMM)
@pytest.mark.parametrize("size", SIZES)
def test_timm_eval_transforms(tag: str, size: tuple[int, int]) -> None:
    pretrained = timm.get_pretrained_cfg(tag).to_dict()
    config = from_timm({"architecture": tag, "pretrained_cfg": json.loads(json.dumps(pretrained))})
    transform = create_transform(**resolve_data_config(pretrained_cfg=pretrained))
    image = photograph(*size)
    same(preprocess(image, config), transform(image).numpy())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("shape", [(3, 224, 224), (3, 160, 224), (3, 225, 98)])
def test_timm_crop_modes_and_shapes(
    size: tuple[int, int], mode: str, shape: tuple[int, int, int]
) -> None:
    settings = {"input_size": shape, "crop_mode": mode, "interpolation": "bilinear"}
    image = photograph(*size)
    theirs = create_transform(**resolve_data_config(pretrained_cfg=settings))(image).numpy()
    same(preprocess(image, from_timm(settings)), theirs)


@pytest.mark.parametrize("size", [(640, 427), (427, 640), (97, 131)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("target", [(518, 518), (384, 512), (96, 64)])
def test_another_input_size_is_what_timm_makes_of_crop_pct(
    size: tuple[int, int], crop_pct: float, target: tuple[int, int]
) -> None:
    native = {"input_size": (3, 224, 224), "crop_pct": crop_pct}
    config = resized_to(from_timm(native), target)
    settings = resolve_data_config(pretrained_cfg={**native, "input_size": (3, *target)})
    image = photograph(*size)
    same(preprocess(image, config), create_transform(**settings)(image).numpy())


TORCHVISION = [
    (ViT_B_16_Weights.IMAGENET1K_V1, 256, 224, "bilinear"),
    (ViT_L_16_Weights.IMAGENET1K_V1, 242, 224, "bilinear"),
    (ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1, 384, 384, "bicubic"),
    (ViT_H_14_Weights.IMAGENET1K_SWAG_LINEAR_V1, 224, 224, "bicubic"),
]


@pytest.mark.parametrize(("weights", "resize", "crop", "filter"), TORCHVISION)
@pytest.mark.parametrize("size", SIZES)
def test_torchvision_presets(
    weights: Any, resize: int, crop: int, filter: str, size: tuple[int, int]
) -> None:
    config = PreprocessConfig.model_validate(
        {
            "resize": "shortest",
            "resize_size": resize,
            "crop_size": crop,
            "crop_rounding": "round",
            "filter": filter,
            "mean": IMAGENET["image_mean"],
            "std": IMAGENET["image_std"],
        }
    )
    image = photograph(*size)
    same(preprocess(image, config), weights.transforms()(image).numpy())


OPEN_CLIP = {
    "clip": {},
    "clip 336": {"size": 336},
    "siglip": {"size": 256, "resize_mode": "squash", "mean": [0.5] * 3, "std": [0.5] * 3},
    "clipa": {"resize_mode": "squash", "interpolation": "bilinear"},
    "scalars, bilinear": {"interpolation": "bilinear", "mean": 0.4, "std": 0.3},
    "not square": {"size": [160, 224], "interpolation": "bilinear"},
    "not square, squash": {"size": [160, 224], "resize_mode": "squash", "fill_color": 3},
}


@pytest.mark.parametrize("name", OPEN_CLIP)
@pytest.mark.parametrize("size", SIZES)
def test_open_clip_eval_transforms(name: str, size: tuple[int, int]) -> None:
    settings = OPEN_CLIP[name]
    reference = open_clip.transform.PreprocessCfg(**settings)
    transform = open_clip.transform.image_transform_v2(reference, is_train=False)
    image = photograph(*size)
    same(preprocess(image, from_open_clip({"preprocess_cfg": settings})), transform(image).numpy())


@pytest.mark.parametrize("margin", [3, 7, 11])
def test_libraries_crop_one_pixel_apart_at_these_margins(margin: int) -> None:
    image = photograph(224 + margin, 224)
    floors = from_transformers({"image_processor_type": "CLIPImageProcessor"}).config
    clip = preprocess(image, floors)
    open_ = preprocess(image, from_open_clip({}))
    assert not np.array_equal(clip, open_)
    assert np.array_equal(clip[:, :, 1:], open_[:, :, :-1])


Change = Callable[[PreprocessConfig], PreprocessConfig]
CHANGES: dict[str, Any] = {
    "filter": {"filter": "bilinear"},
    "rounding": {"crop_rounding": "round"},
    "rule": {"resize": "squash"},
    "size": {"resize_size": (257, 257)},
    "mean": {"mean": (0.5, 0.5, 0.5)},
    "std": {"std": (0.5, 0.5, 0.5)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_setting_matters(name: str) -> None:
    """A wrong setting is told apart by the tolerances above."""
    kind, settings = PUBLISHED["dinov2"]
    processor = getattr(transformers, kind)(**settings)
    config = from_transformers(json.loads(processor.to_json_string())).config
    image = photograph(331, 322)  # becomes 263x256; 263 - 224 = 39: round and floor differ
    theirs = processor(image, return_tensors="np")["pixel_values"][0]
    assert np.abs(preprocess(image, config) - theirs).max() <= 1e-6
    changed = config.model_copy(update=CHANGES[name])
    assert np.abs(preprocess(image, changed) - theirs).max() > 1e-3
