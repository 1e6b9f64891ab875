"""Geometry, other sizes and extremes; pixel parity is in tests/parity/test_preprocess.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from vitcli.commands.encode.result import describe
from vitcli.config.request import resized_to
from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError
from vitcli.images import preprocess as module
from vitcli.images.decode import ImageError
from vitcli.images.preprocess import levels, normalize, plan, preprocess
from vitcli.images.synthetic import synthetic_image


def config(**changes: Any) -> PreprocessConfig:
    return PreprocessConfig.model_validate(changes)


CENTER = config(resize="shortest", resize_size=256, crop_size=224, filter="bicubic")
NONE = {"resize": "none", "resize_size": None}


def test_a_level_is_scaled_and_normalized() -> None:
    image = Image.new("RGB", (4, 4), (0, 128, 255))
    result = preprocess(image, config(**NONE, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0)))
    assert result.dtype == np.float32 and result.shape == (3, 4, 4)
    expected = [(0 - 0.1) / 0.5, (128 / 255 - 0.2) / 0.25, (1 - 0.3) / 2]
    np.testing.assert_allclose(result[:, 2, 2], expected, atol=1e-6)


def test_channels_come_first_and_rows_go_down() -> None:
    image = Image.new("RGB", (5, 3))
    image.putpixel((4, 1), (255, 0, 0))
    result = preprocess(image, config(**NONE))
    assert result.shape == (3, 3, 5)
    assert np.argwhere(result == 1).tolist() == [[0, 1, 4]]


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("rounding", ["floor", "round"])
def test_a_crop_larger_than_the_image_is_padded_with_black(dtype: str, rounding: str) -> None:
    """5 to 8 leaves 3: transformers puts the odd pixel first, torchvision last."""
    settings = config(**NONE, crop_size=8, crop_rounding=rounding, resize_dtype=dtype)
    result = preprocess(Image.new("RGB", (5, 5), "white"), settings)
    first = 2 if rounding == "floor" else 1
    inside = np.full((3, 8, 8), -1.0, dtype=np.float32)
    inside[:, first : first + 5, first : first + 5] = 1
    assert np.array_equal(result, inside)
    assert "black around" in describe(settings, 5, 5)


def test_description_names_every_step() -> None:
    text = describe(CENTER, 640, 427)
    assert text == (
        "shorter side to 256: 383x256 (bicubic); center 224x224 at x 79, y 16; "
        "mean 0.5 0.5 0.5, std 0.5 0.5 0.5"
    )
    assert describe(config(resize_dtype="float32"), 9, 9).startswith(
        "squashed to 224x224 (bilinear, in float32); mean"
    )
    assert describe(config(**NONE), 9, 9).startswith("not resized; mean")


@pytest.mark.parametrize(
    ("before", "size", "resize", "crop"),
    [
        ((256, 224), (518, 518), (592, 592), (518, 518)),  # 0.875
        ((248, 224), (384, 384), (426, 426), (384, 384)),  # 0.9
        ((292, 256), (512, 512), (585, 585), (512, 512)),  # 0.875, not 0.876
        ((384, 384), (512, 512), (512, 512), (512, 512)),
        ((256, 224), (384, 512), (438, 585), (384, 512)),
        ((256, 320), (640, 640), (512, 512), (640, 640)),  # a crop that pads
    ],
)
@pytest.mark.parametrize("rule", ["shortest", "squash"])
def test_another_size_keeps_the_proportion_of_resize_and_crop(
    rule: str,
    before: tuple[int, int],
    size: tuple[int, int],
    resize: tuple[int, int],
    crop: tuple[int, int],
) -> None:
    other = resized_to(config(resize=rule, resize_size=before[0], crop_size=before[1]), size)
    assert (other.resize, other.resize_size, other.crop_size) == (rule, resize, crop)


@pytest.mark.parametrize(
    "native",
    [
        CENTER,
        config(),
        config(resize="shortest", resize_size=224),
        config(resize="smart", resize_size=None),
        config(**NONE),
        config(**NONE, crop_size=224),
    ],
)
@pytest.mark.parametrize("size", [(518, 518), (384, 512), (98, 42)])
def test_another_size_is_what_comes_out(native: PreprocessConfig, size: tuple[int, int]) -> None:
    other = resized_to(native, size)
    assert other.output_size == size
    assert preprocess(synthetic_image((100, 151)), other).shape == (3, *size)
    kept = {"filter", "resize_dtype", "crop_rounding", "mean", "std"}
    assert other.model_dump(include=kept) == native.model_dump(include=kept)


@pytest.mark.parametrize("native", [CENTER, config(), config(resize_size=(160, 224))])
def test_the_native_size_changes_nothing(native: PreprocessConfig) -> None:
    assert native.output_size is not None
    assert resized_to(native, native.output_size) == native


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1), (1, 1), (3, 2), (1, 40_000)])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_extreme_shapes(size: tuple[int, int], dtype: str) -> None:
    settings = CENTER.model_copy(update={"resize_dtype": dtype})
    result = preprocess(Image.new("RGB", size, (255, 0, 255)), settings)
    assert result.shape == (3, 224, 224)
    np.testing.assert_allclose(result, np.broadcast_to([[[1]], [[-1]], [[1]]], (3, 224, 224)))


@pytest.mark.parametrize("size", [(300, 200), (90, 400), (640, 64)])
@pytest.mark.parametrize("crop", [224, (100, 300), (300, 100)])
def test_the_part_under_the_crop_agrees_with_the_whole(
    size: tuple[int, int], crop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(resize="shortest", resize_size=256, crop_size=crop, filter="bicubic")
    image = synthetic_image(size)
    whole = preprocess(image, settings)
    assert max(plan(settings, *image.size).resized) > 300
    monkeypatch.setattr(module, "_MAX_RESIZED_PIXELS", 300 * 256)
    part = preprocess(image, settings)
    apart = np.abs(part - whole) * 255 / 2  # in levels; std is 0.5
    assert (apart > 1.01).mean() < 1e-3 and apart.max() < 8


def test_a_result_that_is_too_large_is_an_error() -> None:
    endless = config(resize="shortest", resize_size=256)
    with pytest.raises(ImageError) as caught:
        preprocess(Image.new("RGB", (1, 5000)), endless, name="thin.png")
    assert caught.value.code == "too_large" and "crop_size" in caught.value.hint
    assert caught.value.message.startswith("thin.png: 1x5000 px")


def test_smart_refuses_an_aspect_ratio_above_200() -> None:
    smart = config(resize="smart", resize_size=None)
    assert preprocess(Image.new("RGB", (200, 1)), smart).shape[1] >= 28
    with pytest.raises(ImageError) as caught:
        preprocess(Image.new("RGB", (201, 1)), smart)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("size", [(30, 5000), (1000, 1000), (20, 20), (3000, 17), (27, 29)])
def test_smart_sizes_are_multiples_within_the_budget(size: tuple[int, int]) -> None:
    smart = config(resize="smart", resize_size=None, multiple=28)
    height, width = plan(smart, *size).output
    assert height % 28 == 0 and width % 28 == 0
    assert 56 * 56 <= height * width <= smart.max_pixels


def test_workers_start_without_torch() -> None:
    code = "import sys, vitcli.images.workers\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("resize_dtype", ["uint8", "float32"])
def test_levels_and_normalize_are_preprocess_in_two_steps(resize_dtype: str) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 30, 3), dtype=np.uint8))
    config = PreprocessConfig(
        resize_size=(16, 16),
        resize_dtype=resize_dtype,  # type: ignore[arg-type]
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    pixels = levels(image, config)
    assert pixels.dtype == resize_dtype
    np.testing.assert_array_equal(normalize(pixels, config), preprocess(image, config))


RULES = {
    "squash": config(resize_size=(48, 64), filter="bicubic"),
    "crop": config(resize="shortest", resize_size=80, crop_size=64),
    "wide crop": config(resize="shortest", resize_size=(48, 64), crop_size=(48, 64)),
    "crop of what follows": config(**NONE, crop_size=(64, 48)),
    "tile": config(resize="tile", resize_size=64, longest_edge=128, filter="lanczos"),
    "smart at a size": resized_to(config(resize="smart", resize_size=None), (56, 84)),
}
MEAN = (0.485, 0.456, 0.406)


def by_pillow(image: Image.Image, fit: str, settings: PreprocessConfig, fill: Any) -> Image.Image:
    assert settings.output_size is not None
    size, resampling = settings.output_size[::-1], module._FILTERS[settings.filter]
    if fit == "squash":
        return image.resize(size, resampling)
    if fit == "crop":
        return ImageOps.fit(image, size, resampling)
    return ImageOps.pad(image, size, resampling, color=fill)


@pytest.mark.parametrize("size", [(90, 31), (31, 90), (64, 64), (200, 3), (128, 96), (7, 8)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fit", ["crop", "whole", "squash"])
def test_fit_is_pillows_own_operation(fit: str, rule: str, size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    settings = config(**{**RULES[rule].model_dump(), "fit": fit, "mean": MEAN})
    expected = by_pillow(image, fit, settings, (124, 116, 104))  # the levels nearest to the mean
    assert np.array_equal(levels(image, settings), np.asarray(expected))
    in_float = config(**{**settings.model_dump(), "resize_dtype": "float32"})
    channels = [
        np.asarray(by_pillow(channel.convert("F"), fit, settings, 255 * mean)) / 255
        for channel, mean in zip(image.split(), MEAN, strict=True)
    ]
    np.testing.assert_allclose(levels(image, in_float), channels, rtol=0, atol=1e-6)


def test_what_fits_without_a_margin_is_zero_around() -> None:
    """The margin of `fit: whole` is what normalization makes nothing of, up to half a level."""
    settings = config(resize_size=64, fit="whole", mean=MEAN, std=(1, 1, 1))
    pixels = preprocess(Image.new("RGB", (64, 16), "white"), settings)
    assert abs(pixels[:, :24]).max() <= 0.5 / 255 + 1e-6
    assert (pixels[:, 24:40] > 0.4).all()
    exact = config(**{**settings.model_dump(), "resize_dtype": "float32"})
    assert abs(preprocess(Image.new("RGB", (64, 16), "white"), exact)[:, 40:]).max() < 1e-6


@pytest.mark.parametrize("resize", ["none", "smart", "patches", "bounded", "within", "shortest"])
def test_fit_is_refused_where_the_image_decides_the_size(resize: str) -> None:
    shortest = resize == "shortest"
    settings = config(resize=resize, resize_size=224 if shortest else None, fit="crop")
    with pytest.raises(VitcliError, match=f"keeps each image's own.*resize: {resize}"):
        plan(settings, 10, 10)
    assert plan(resized_to(settings, (32, 48)), 10, 10).output == (32, 48)


@pytest.mark.parametrize(
    ("fit", "text", "box"),
    [
        ("crop", "fit crop: x 80 to 560, y 0 to 480 resized to 224x224 (bicubic)", (80, 0)),
        ("whole", "fit whole: resized to 224x168 (bicubic) in the middle of 224x224", (0, -80)),
        ("squash", "fit squash: resized to 224x224 (bicubic)", (0, 0)),
    ],
)
def test_fit_is_described_and_the_map_lies_on_what_was_read(
    fit: str, text: str, box: tuple[int, int]
) -> None:
    settings = config(**{**CENTER.model_dump(), "fit": fit})
    assert describe(settings, 640, 480).startswith(f"{text}; mean 0.5")
    left, top, right, bottom = module.grid_box(settings, (480, 640), (16, 16), 14)
    assert (left, top) == pytest.approx(box)
    assert (right, bottom) == pytest.approx((640 - box[0], 480 - box[1]))
