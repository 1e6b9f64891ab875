"""From samples of attention to the numbers of the table."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands.compare.test_analysis import load
from vitcli.commands.attention.analysis import OutlierCut, attn_entropy, parse_layers
from vitcli.commands.attention.reductions import FIELDS, AttentionSamples, observe_attention
from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError
from vitcli.images.decode import decode
from vitcli.images.preprocess import preprocess
from vitcli.model import Model

AS_IS = PreprocessConfig(resize="none", resize_size=None)


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """24x32 twice, then 40x40."""
    random = np.random.default_rng(0)
    paths = []
    for index, size in enumerate([(24, 32), (24, 32), (40, 40)]):
        pixels = random.integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
        paths.append(str(tmp_path / f"{index}.png"))
    return paths


def model(**changes: int) -> Model:
    return Model(**{**vars(load(**changes)), "known_preprocessing": AS_IS})


def each(encoder: Model, photos: list[str]) -> list[AttentionSamples]:
    pixels = [torch.from_numpy(preprocess(decode(p).image, AS_IS))[None] for p in photos]
    return [observe_attention(encoder.encoder, one) for one in pixels]


def test_each_image_is_normalized_by_its_own_number_of_tokens(photos: list[str]) -> None:
    encoder = model()
    answer = attn_entropy([encoder], photos).models[0]
    assert [image.tokens for image in answer.images] == [13, 13, 26]
    shares = torch.cat(
        [s.heads[..., FIELDS.index("entropy")] / math.log(s.tokens) for s in each(encoder, photos)],
        dim=1,
    )  # (L, b, H)
    for layer, share in zip(answer.layers, shares, strict=True):
        assert layer.entropy_normalised == pytest.approx(float(share.mean()), abs=1e-9)
        assert layer.head_spread == pytest.approx(float(share.mean(0).std()), abs=1e-9)
        assert layer.image_spread == pytest.approx(float(share.mean(1).std()), abs=1e-9)


@pytest.mark.parametrize("text", ["1.1x", "9"])
def test_outliers_are_the_patches_above_the_cut(text: str, photos: list[str]) -> None:
    encoder = model()
    answer = attn_entropy([encoder], photos, outlier_cut=OutlierCut.parse(text)).models[0]
    for index, layer in enumerate(answer.layers):
        norms = torch.cat([s.patch_norms[index].flatten() for s in each(encoder, photos)])
        limit = 1.1 * float(norms.median()) if text == "1.1x" else 9.0
        assert layer.outlier_cut == pytest.approx(limit)
        assert layer.outlier_share == pytest.approx(float((norms > limit).double().mean()))
        assert layer.patch_norm_max == pytest.approx(float(norms.max()))
        assert 0 < layer.outlier_share < 0.5


def test_a_planted_outlier_is_found(photos: list[str]) -> None:
    """One patch of 12 is given a norm far above the others by its own bright pixels."""
    encoder = model()
    pixels = np.full((24, 32, 3), 127, np.uint8)
    pixels[8:16, 8:16] = 255
    Image.fromarray(pixels).save(photos[0])
    with torch.no_grad():
        encoder.encoder.front_end.projection.weight.mul_(100)
        for block in encoder.encoder.vit.blocks:
            block.attention.proj.weight.zero_()
    answer = attn_entropy([encoder], photos[:1]).models[0]
    assert all(layer.outlier_share == pytest.approx(1 / 12) for layer in answer.layers)


def test_one_encoder_in_memory_at_a_time(photos: list[str]) -> None:
    loaded: list[str] = []

    def one_after_another():
        for name in ("first", "second"):
            loaded.append(name)
            yield model()

    seen: list[list[str]] = []
    attn_entropy(one_after_another(), photos[:1], watch=lambda *_: seen.append(list(loaded)))
    assert seen == [["first"], ["first", "second"]]


def test_layers() -> None:
    assert parse_layers(None, 3) == (1, 2, 3)
    assert parse_layers("-1", 12) == (12,)
    assert parse_layers("11,3,3,-2", 12) == (3, 11)
    for wrong in ("0", "13", "-13", "a", ""):
        with pytest.raises(VitcliError):
            parse_layers(wrong, 12)


@pytest.mark.parametrize("text", ["", "x", "0", "-1x", "nan", "inf", "3y"])
def test_a_cut_that_is_none(text: str) -> None:
    with pytest.raises(VitcliError, match="3x or 150"):
        OutlierCut.parse(text)
