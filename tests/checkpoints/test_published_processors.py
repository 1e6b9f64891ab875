"""Every preprocessor file that is published: read, and pixels of the library's Pillow processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from tests.checkpoints.processors import Pixels, base_view, picture, reference
from tests.checkpoints.sources import changed
from vitcli.checkpoints.families.hf_processors import SUPPORTED, from_transformers, processor
from vitcli.config.schema import EncoderConfig
from vitcli.errors import VitcliError
from vitcli.images.preprocess import plan, preprocess

PUBLISHED = Path(__file__).parents[3] / "shared" / "published"
FILES = sorted(PUBLISHED.glob("*/pr*processor_config.json")) + sorted(
    PUBLISHED.glob("*/processor_config.json")
)
REFUSED = {
    "LocateAnythingImageProcessor": "remote code",
    "MiniCPMVImageProcessor": "remote code",
    "MolmoImageProcessor": "remote code",
    "BailingMMImageProcessor": "remote code",
    "Eagle3_VLImageProcessorFast": "remote code",
    "SamImageProcessor": "a margin of zeros after normalizing, which no 8-bit level is",
}
IMPOSSIBLE = {
    "community-LGViT-DeiT-Cifar100": "size of two kinds, which transformers refuses too",
    "community-Andes_VL": "min_pixels of remote code in a CLIPImageProcessor",
}


def settings_of(file: Path) -> dict[str, Any] | None:
    content: dict[str, Any] = json.loads(file.read_text())
    if file.name.startswith("processor_config"):
        inner = content.get("image_processor")
        return inner if isinstance(inner, dict) else None
    return content


def theirs(settings: dict[str, Any]) -> Pixels:
    """The library's pixels (3, h, w) of the base view."""
    named = settings.get("image_processor_type") or settings["feature_extractor_type"]
    name = named.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    return base_view(reference(name.replace("Swin", "ViT"), settings), picture())


@pytest.mark.skipif(not FILES, reason="the published configs are not beside the project")
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_pixels_of_every_published_file(file: Path) -> None:
    settings = settings_of(file)
    if settings is None:  # about text, or for remote code alone: nothing is guessed from it
        configs = {file.name: json.loads(file.read_text())}
        assert processor("ViTImageProcessor")(configs, EncoderConfig()) is None
        return
    named = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    if named in REFUSED or file.parent.name in IMPOSSIBLE:
        with pytest.raises(VitcliError):
            from_transformers(settings)
        return
    ours = preprocess(picture(), from_transformers(settings).config)
    tolerance = 1e-4 if named.startswith("DINOv3") else 1e-6  # its weights are float32
    np.testing.assert_allclose(ours, theirs(settings), rtol=0, atol=tolerance)


TILING = {
    "LlavaNextImageProcessor": ({"crop_size": 336, "size": {"shortest_edge": 336}}, "4 tiles"),
    "LlavaOnevisionImageProcessor": ({}, "36 tiles"),
    "GotOcr2ImageProcessor": ({"crop_to_patches": True, "max_patches": 12}, "12 tiles"),
    "Idefics2ImageProcessor": ({"do_image_splitting": True}, "4 tiles"),
    "Ovis2ImageProcessor": (
        {"size": {"height": 128, "width": 128}, "crop_to_patches": True, "max_patches": 9},
        "9 tiles",
    ),
    "Idefics3ImageProcessor": ({}, "16 tiles"),
    "SmolVLMImageProcessor": ({"do_image_splitting": False}, ""),
    "Gemma3ImageProcessor": (
        {
            "do_pan_and_scan": True,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_crop_size": 100,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        "4 tiles",
    ),
}


@pytest.mark.parametrize("size", [(1200, 800), (300, 200), (500, 2000), (3000, 100), (600, 400)])
def test_idefics_2_bounds_both_sides(size: tuple[int, int]) -> None:
    config = from_transformers({"image_processor_type": "Idefics2ImageProcessor"}).config
    reference = transformers.Idefics2ImageProcessorPil()
    wide, high = size
    found = reference(Image.new("RGB", size), return_tensors="np")["pixel_values"]
    assert plan(config, wide, high).output == found.shape[-2:]


@pytest.mark.parametrize("kind", TILING)
def test_the_base_view_of_what_tiles(kind: str) -> None:
    settings, note = TILING[kind]
    processor = reference(kind, settings)
    told = from_transformers(json.loads(processor.to_json_string()))
    base = base_view(processor, picture())
    np.testing.assert_allclose(preprocess(picture(), told.config), base, rtol=0, atol=1e-6)
    assert [text for text in told.notes if "base view" in text] == (
        [f"base view only; {kind} cuts up to {note} besides it"] if note else []
    )
    views = processor(picture(), return_tensors="np")["pixel_values"]
    assert note == "" or views.reshape(-1, *views.shape[-3:]).shape[0] > 1


WITHOUT_PILLOW = {
    "Cohere2VisionImageProcessor": ({}, "12 tiles"),
    "Cohere2VisionImageProcessor, one": ({"crop_to_patches": False}, ""),
    "Lfm2VlImageProcessor": ({}, "10 tiles"),
    "Lfm2VlImageProcessor, one": ({"do_image_splitting": False, "max_image_tokens": 100}, ""),
}


@pytest.mark.parametrize("size", [(1200, 900), (300, 200), (90, 700)])
@pytest.mark.parametrize("name", WITHOUT_PILLOW)
def test_the_base_view_of_what_torchvision_alone_resizes(name: str, size: tuple[int, int]) -> None:
    kind, (settings, note) = name.split(",")[0], WITHOUT_PILLOW[name]
    processor = reference(kind, settings)
    told = from_transformers(json.loads(processor.to_json_string()))
    image = picture().resize(size)
    base = base_view(processor, image)
    levels = 2 / 255 / min(told.config.std)  # rounded weights of 8 bits, as the notes say
    np.testing.assert_allclose(preprocess(image, told.config), base, rtol=0, atol=levels + 1e-6)
    assert any("torchvision" in text for text in told.notes)
    tiles = [text for text in told.notes if "base view" in text]
    assert tiles == ([f"base view only; {kind} cuts up to {note} besides it"] if note else [])


GRAY = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
DEPTH = {"size": {"height": 518, "width": 518}, "ensure_multiple_of": 14, "keep_aspect_ratio": True}
IN_SQUARES_AND_BLACK: dict[str, dict[str, Any]] = {
    "DeepseekVLImageProcessor": {"background_color": [127] * 3, "min_size": 14, **GRAY},
    "DeepseekVLImageProcessor, narrow": {"min_size": 100},
    "DeepseekVLHybridImageProcessor": {
        **GRAY,
        "high_res_image_mean": [0.5] * 3,
        "size": {"height": 96, "width": 96},
        "high_res_size": {"height": 256, "width": 256},
    },
    "JanusImageProcessor": {"size": {"height": 96, "width": 96}},
    "LlavaImageProcessor": {"do_pad": True},
    "LlavaImageProcessor, as CLIP": {"do_pad": False, "size": {"shortest_edge": 96}},
    "AriaImageProcessor": {"max_image_size": 490},
    "DPTImageProcessor": DEPTH,
    "DPTImageProcessor, squashed": {"ensure_multiple_of": 32},
    "Gemma4ImageProcessor": {"max_soft_tokens": 70},
    "Kimi_K25ImageProcessor": {"max_patches": 400},
    "Kimi_K25ImageProcessor, short": {"size": {"max_height": 20, "max_width": 20}},
    "Llama4ImageProcessor": {"size": {"height": 336, "width": 336}, "max_patches": 16},
}


@pytest.mark.parametrize("size", [(300, 200), (333, 1000), (97, 131), (640, 64), (336, 336)])
@pytest.mark.parametrize("name", IN_SQUARES_AND_BLACK)
def test_images_in_squares_and_with_black_at_their_ends(name: str, size: tuple[int, int]) -> None:
    kind, settings = name.split(",")[0], IN_SQUARES_AND_BLACK[name]
    processor = reference(kind, settings)
    told = from_transformers(json.loads(processor.to_json_string()) | settings).config
    image = picture().resize(size)
    base = base_view(processor, image)
    by_pillow = hasattr(transformers, f"{kind}Pil")
    # Without Pillow: weights of 8 bits, and Llama's bfloat16.
    levels = 2 / 255 / min(told.std) + 2**-7 if not by_pillow else 0
    ours = preprocess(image, told)
    np.testing.assert_allclose(ours, base, rtol=0, atol=levels + 1e-6)
    assert told.output_size in (None, ours.shape[1:])


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("DeepseekVLImageProcessor", {"do_pad": False}, "do_pad"),
        ("DeepseekVLImageProcessor", {"size": {"height": 64, "width": 96}}, "size"),
        ("DeepseekVLHybridImageProcessor", {"high_res_image_mean": [0.1] * 3}, "high_res_image"),
        ("LlavaImageProcessor", {"do_pad": True, "do_resize": False}, "do_resize"),
        ("DPTImageProcessor", {"do_pad": True, "size_divisor": 14}, "do_pad"),
        ("Kimi_K25ImageProcessor", {"size": {"max_height": 8, "max_width": 9}}, "size"),
        ("Llama4ImageProcessor", {"resize_to_max_canvas": True}, "resize_to_max_canvas"),
        ("Llama4ImageProcessor", {"max_patches": 1}, "max_patches"),
    ],
)
def test_what_of_these_is_refused(kind: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(VitcliError, match=key):
        from_transformers(settings | {"image_processor_type": kind})


@pytest.mark.parametrize("kind", ["Glm46V", "Glmga"])
def test_glms_prepare_as_glm4v(kind: str) -> None:
    """Their classes are copies of the other's."""
    processor = reference(f"{kind}ImageProcessor", {})
    config = from_transformers(json.loads(processor.to_json_string())).config
    ours = preprocess(picture(), config)
    np.testing.assert_allclose(ours, base_view(processor, picture()), rtol=0, atol=1e-6)


SMALL: dict[str, dict[str, Any]] = {
    "Siglip2ImageProcessor": {"max_num_patches": 64},
    "Idefics3ImageProcessor": {
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 64},
    },
    "SmolVLMImageProcessor": {
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 64},
    },
    "LlavaOnevisionImageProcessor": {"size": {"height": 64, "width": 64}},
    "AriaImageProcessor": {"max_image_size": 490},
    "Gemma4ImageProcessor": {"max_soft_tokens": 70},
}
"""Where the default is slow."""


@pytest.mark.parametrize("kind", [k for k in SUPPORTED if hasattr(transformers, f"{k}Pil")])
def test_one_changed_key_is_followed_or_refused(kind: str) -> None:
    """Each key of each class is changed to other values of its kind."""
    given = json.loads(reference(kind, SMALL.get(kind, {})).to_json_string())
    wrong, compared = {}, 0
    for key in [k for k in given if not k.startswith(("image_processor", "_"))]:
        for other in changed(given[key]):
            settings = {**given, key: other}
            try:
                ours = preprocess(picture(), from_transformers(settings).config)
            except VitcliError:
                continue
            try:
                base = base_view(reference(kind, settings), picture())
            except Exception:  # whatever the library raises, there are no pixels to equal
                continue
            compared += 1
            if ours.shape != base.shape or np.abs(ours - base).max() > 1e-5:
                wrong[f"{key} = {other}"] = f"{ours.shape}, not {base.shape}"
    assert wrong == {} and compared
