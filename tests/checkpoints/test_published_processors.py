"""Every preprocessor file that is published: read, and pixels of the library's Pillow processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from vitcli.checkpoints.families.hf_processors import from_transformers, processor
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
}
IMPOSSIBLE = {
    "community-LGViT-DeiT-Cifar100": "size of two kinds, which transformers refuses too",
    "community-Andes_VL": "min_pixels of remote code in a CLIPImageProcessor",
}


def picture() -> Image.Image:
    y, x = np.mgrid[0:200, 0:300]
    grain = np.random.default_rng(0).integers(0, 60, (200, 300, 3))
    waves = np.stack([x % 97, (x + y) % 151, (2 * y) % 193], axis=-1)
    return Image.fromarray((waves + grain).clip(0, 255).astype(np.uint8))


def settings_of(file: Path) -> dict[str, Any] | None:
    content: dict[str, Any] = json.loads(file.read_text())
    if file.name.startswith("processor_config"):
        inner = content.get("image_processor")
        return inner if isinstance(inner, dict) else None
    return content


def theirs(settings: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The library's pixels (3, h, w) of the base view."""
    named = settings.get("image_processor_type") or settings["feature_extractor_type"]
    name = named.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    name = name.replace("Swin", "ViT")
    if name == "DINOv3ViTImageProcessor":
        reference = transformers.DINOv3ViTImageProcessor(**settings)
    else:
        reference = getattr(transformers, f"{name}Pil")(**settings)
    found = reference(picture(), return_tensors="np")
    if name == "IdeficsImageProcessor":
        return np.asarray(found)[0]
    pixels = found["pixel_values"][0]
    if name.startswith("Siglip2"):
        patch = settings["patch_size"]
        rows, columns = found["spatial_shapes"][0]
        pixels = pixels[: rows * columns].reshape(rows, columns, patch, patch, 3)
        return pixels.transpose(4, 0, 2, 1, 3).reshape(3, rows * patch, columns * patch)
    if name.startswith("Qwen2VL"):
        patch, merge = settings.get("patch_size", 14), settings.get("merge_size", 2)
        _, rows, columns = found["image_grid_thw"][0]
        cells = (rows // merge, columns // merge, merge, merge)
        flat = found["pixel_values"].reshape(*cells, 3, 2, patch, patch)[:, :, :, :, :, 0]
        return flat.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
    if name == "Gemma4ImageProcessor":
        columns, rows = found["image_position_ids"][0].max(axis=0) + 1
        patch = settings["patch_size"]
        pixels = pixels[: rows * columns].reshape(rows, columns, patch, patch, 3)
        return pixels.transpose(4, 0, 2, 1, 3).reshape(3, rows * patch, columns * patch)
    if name == "Idefics3ImageProcessor":
        return pixels[-1]  # the whole image stands after its tiles
    if name == "GotOcr2ImageProcessor" and pixels.ndim == 4:
        return pixels[-1]
    return pixels


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
    "LlavaNextImageProcessor": ({"crop_size": 336, "size": {"shortest_edge": 336}}, "4 tiles", 0),
    "LlavaOnevisionImageProcessor": ({}, "36 tiles", 0),
    "GotOcr2ImageProcessor": ({"crop_to_patches": True, "max_patches": 12}, "12 tiles", -1),
    "Idefics2ImageProcessor": ({"do_image_splitting": True}, "4 tiles", -1),
    "Ovis2ImageProcessor": (
        {"size": {"height": 128, "width": 128}, "crop_to_patches": True, "max_patches": 9},
        "9 tiles",
        0,
    ),
    "Idefics3ImageProcessor": ({}, "16 tiles", -1),
    "SmolVLMImageProcessor": ({"do_image_splitting": False}, "", -1),
    "Gemma3ImageProcessor": (
        {
            "do_pan_and_scan": True,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_crop_size": 100,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        "4 tiles",
        0,
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
    settings, note, at = TILING[kind]
    reference = getattr(transformers, f"{kind}Pil")(**settings)
    told = from_transformers(json.loads(reference.to_json_string()))
    views = reference(picture(), return_tensors="np")["pixel_values"]
    views = views[0] if views[0].ndim == 4 else views
    np.testing.assert_allclose(preprocess(picture(), told.config), views[at], rtol=0, atol=1e-6)
    assert [text for text in told.notes if "base view" in text] == (
        [f"base view only; {kind} cuts up to {note} besides it"] if note else []
    )
    assert note == "" or len(views) > 1


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
    reference = getattr(transformers, kind)(**settings)
    told = from_transformers(json.loads(reference.to_json_string()))
    image = picture().resize(size)
    found = reference(image, return_tensors="pt")
    base = found["pixel_values"][-1].numpy()  # the whole image stands after its tiles
    if "spatial_shapes" in found:
        (rows, columns), patch = found["spatial_shapes"][-1].tolist(), reference.encoder_patch_size
        base = base[: rows * columns].reshape(rows, columns, patch, patch, 3)
        base = base.transpose(4, 0, 2, 1, 3).reshape(3, rows * patch, columns * patch)
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
    "SamImageProcessor": {
        "size": {"longest_edge": 256},
        "pad_size": {"height": 256, "width": 256},
    },
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
    by_pillow = hasattr(transformers, f"{kind}Pil")
    reference = getattr(transformers, f"{kind}Pil" if by_pillow else kind)(**settings)
    told = from_transformers(json.loads(reference.to_json_string()) | settings).config
    image = picture().resize(size)
    found = reference(image, return_tensors="np" if by_pillow else "pt")
    pixels = np.asarray(found["pixel_values"])
    if kind.startswith("Kimi"):
        rows, columns = np.asarray(found["image_grid_thw"])[0, 1:]
        cells = pixels.reshape(rows, columns, 3, 14, 14).transpose(2, 0, 3, 1, 4)
        pixels = cells.reshape(1, 3, rows * 14, columns * 14)
    elif kind.startswith("Gemma4"):
        columns, rows = found["image_position_ids"][0].max(axis=0) + 1
        cells = pixels[0, : rows * columns].reshape(rows, columns, 16, 16, 3)
        pixels = cells.transpose(4, 0, 2, 1, 3).reshape(1, 3, rows * 16, columns * 16)
    elif kind.startswith("Llama4"):
        pixels = np.asarray(found["pixel_values"].float()).reshape(-1, 3, 336, 336)[-1:]
    elif kind.startswith("Aria"):
        height, width = np.argwhere(found["pixel_mask"][0])[-1] + 1
        end = [-(-int(side) // 14) * 14 for side in (height, width)]
        pixels = pixels[:, :, : end[0], : end[1]]
    # Without Pillow: weights of 8 bits, and Llama's bfloat16.
    levels = 2 / 255 / min(told.std) + 2**-7 if not by_pillow else 0
    ours = preprocess(image, told)
    np.testing.assert_allclose(ours, pixels[0], rtol=0, atol=levels + 1e-6)
    assert told.output_size in (None, ours.shape[1:])


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("DeepseekVLImageProcessor", {"do_pad": False}, "do_pad"),
        ("DeepseekVLImageProcessor", {"size": {"height": 64, "width": 96}}, "size"),
        ("DeepseekVLHybridImageProcessor", {"high_res_image_mean": [0.1] * 3}, "high_res_image"),
        ("LlavaImageProcessor", {"do_pad": True, "do_resize": False}, "do_resize"),
        ("SamImageProcessor", {"size": 64}, "size"),
        ("SamImageProcessor", {"do_pad": False}, "pad_size"),
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
    reference = getattr(transformers, f"{kind}ImageProcessorPil")()
    found = reference(picture(), return_tensors="np")
    _, rows, columns = found["image_grid_thw"][0] * reference.patch_size
    config = from_transformers(json.loads(reference.to_json_string())).config
    assert plan(config, 300, 200).output == (rows, columns)
