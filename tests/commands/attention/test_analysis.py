"""From samples of attention to the numbers of the table."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

import vitcli
from tests.commands.sources import tiny_model
from vitcli.commands.attention.analysis import OutlierCut, attn_entropy
from vitcli.commands.attention.reducers import (
    FIELDS,
    AttentionSamples,
    observe_attention,
    parse_blocks,
)
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
    return Model(**{**vars(tiny_model(**changes)), "known_preprocessing": AS_IS})


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
    assert parse_blocks(None, 3) == (1, 2, 3)
    assert parse_blocks("-1", 12) == (12,)
    assert parse_blocks("11,3,3,-2", 12) == (3, 11)
    assert parse_blocks(-1, 12) == (12,) and parse_blocks([11, 3], 12) == (3, 11)
    for wrong in ("0", "13", "-13", "a", ""):
        with pytest.raises(VitcliError):
            parse_blocks(wrong, 12)


@pytest.mark.parametrize("text", ["", "x", "0", "-1x", "nan", "inf", "3y"])
def test_a_cut_that_is_none(text: str) -> None:
    with pytest.raises(VitcliError, match="3x or 150"):
        OutlierCut.parse(text)


def scaled_queries(factor: float, **changes: int) -> Model:
    """The same encoder with sharper or smoother attention in its last block."""
    encoder = model(**changes)
    attention = encoder.encoder.vit.blocks[-1].attention
    with torch.no_grad():
        attention.qkv.weight[: attention.qkv.in_features] *= factor
        attention.qkv.bias[: attention.qkv.in_features] *= factor
    return encoder


def test_the_smoother_one_is_named_with_its_paired_interval(photos: list[str]) -> None:
    sharp, smooth = scaled_queries(8.0), scaled_queries(0.01)
    result = attn_entropy([sharp, smooth], photos)
    assert result.verdict_code == "distinguished"
    values = [m.layers[-1].by_image for m in result.models]
    gaps = np.array(values[1]) - np.array(values[0])
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert low > 0
    assert f"{gaps.mean():.4f} [{low:.4f}, {high:.4f}] above custom" in result.verdict
    assert result.verdict.startswith("smoothest in its last layer: custom")
    for layer in result.models[0].layers:
        assert np.mean(layer.by_image) == pytest.approx(layer.entropy_normalised, abs=1e-12)


def test_no_winner_within_what_the_images_spread(photos: list[str]) -> None:
    """Two draws of the same architecture differ, and not by more than images do."""
    a, b = model(), model()
    torch.manual_seed(0)
    with torch.no_grad():
        for block in b.encoder.vit.blocks:
            block.attention.qkv.bias.add_(torch.randn_like(block.attention.qkv.bias) * 1e-3)
    result = attn_entropy([a, b], photos)
    assert result.verdict_code == "cannot be distinguished"
    assert "do not differ significantly" in result.verdict and "smoothest" not in result.verdict


def test_identical_encoders_are_called_identical(photos: list[str]) -> None:
    result = attn_entropy([model(), model(), model()], photos)
    assert result.verdict_code == "identical"
    assert result.verdict == (
        "identical: 3 encoders with the same attention in every layer and head"
    )


def test_one_image_names_no_winner(photos: list[str]) -> None:
    result = attn_entropy([scaled_queries(8.0), scaled_queries(0.01)], photos[0])
    assert result.verdict_code == "one image" and "smoothest" not in result.verdict


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("attention.qkv", "the attention of block 2"),
        ("feed_forward.fc2", "the output of block 2"),
    ],
)
def test_what_is_not_finite_names_the_encoder_and_the_block(
    place: str, words: str, photos: list[str]
) -> None:
    broken = model()
    with torch.no_grad():
        broken.encoder.vit.blocks[1].get_submodule(place).bias.fill_(math.nan)
    with pytest.raises(VitcliError, match=rf"custom \(random\): {words} is not finite") as caught:
        attn_entropy([model(), broken], photos)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("mask", [{"mask": "window", "window": 2}, {"mask": "causal"}])
def test_uniform_attention_under_a_mask_is_smooth(
    mask: dict[str, object], photos: list[str]
) -> None:
    """Every query spreads evenly over what it can see: the share is 1, entropy is below log N."""
    encoder = scaled_queries(0.0, depth=1, attention=mask)  # type: ignore[arg-type]
    result = attn_entropy(encoder, photos[0])
    (layer,) = result.models[0].layers
    assert layer.entropy_normalised == pytest.approx(1.0, abs=1e-12)
    assert layer.entropy < 0.95 * math.log(13)
    if mask["mask"] == "causal":
        assert [
            math.isnan(x)
            for x in (attn_entropy(encoder, photos[0], query="cls").models[0].layers[0].by_image)
        ] == [True]
        assert attn_entropy(encoder, photos[0], query="cls").verdict_code == "undefined"


def fresh(seed: int = 0, **settings: float) -> Model:
    keys = {"hidden": 24, "depth": 2, "heads": 3, "mlp_hidden": 48, "patch_size": 8, **settings}
    chosen = {f"encoder.{key}": value for key, value in keys.items()}
    return vitcli.load(set=chosen, seed=seed, image_size=16, device="cpu")


def test_random_weights_are_compared_seed_by_seed(photos: list[str]) -> None:
    """The means, and the interval of the paired differences, are those of single runs by hand."""
    sizes = (0, 12)
    both = [fresh(seed=3, registers=count, init_std=0.3) for count in sizes]
    result = attn_entropy(both, photos, seeds=4)
    single = {
        (count, seed): attn_entropy(fresh(seed, registers=count, init_std=0.3), photos)
        .models[0]
        .layers
        for count in sizes
        for seed in range(3, 7)
    }
    for count, encoder in zip(sizes, result.models, strict=True):
        assert encoder.weights == "random (seeds 3 to 6)" and encoder.seeds == (3, 4, 5, 6)
        for place, layer in enumerate(encoder.layers):
            alone = [single[count, seed][place] for seed in encoder.seeds]
            values = [one.entropy_normalised for one in alone]
            assert layer.by_seed == pytest.approx(values, abs=1e-12)
            assert layer.entropy_normalised == pytest.approx(np.mean(values), abs=1e-12)
            assert layer.seed_spread == pytest.approx(np.std(values, ddof=1), abs=1e-12)
            by_image = np.mean([one.by_image for one in alone], axis=0)
            assert layer.by_image == pytest.approx(by_image, abs=1e-12)
            assert layer.image_spread == pytest.approx(np.std(by_image, ddof=1), abs=1e-12)
            spreads = [one.head_spread for one in alone]
            assert layer.head_spread == pytest.approx(np.mean(spreads), abs=1e-12)
    last = [encoder.layers[-1].by_seed for encoder in result.models]
    gaps = np.subtract(*last) * (1 if np.mean(last[0]) > np.mean(last[1]) else -1)
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert high - low > 1e-3, "four digits say something"
    assert f"{gaps.mean():.4f} [{low:.4f}, {high:.4f}] above" in result.verdict
    assert "paired over 4 seeds on 3 images, 95% confidence" in result.verdict
    assert result.verdict_code == ("distinguished" if low > 0 else "cannot be distinguished")


def test_seeds_that_agree_name_a_winner_and_one_seed_never_does(photos: list[str]) -> None:
    """With a tenth of the queries' and keys' scale attention is nearly uniform, for every seed."""
    flat, sharp = ({"set": {"encoder.init_std": std}} for std in (0.002, 0.5))
    encoders = [
        vitcli.load(
            set={"encoder.hidden": 24, "encoder.heads": 3, "encoder.depth": 1, **how["set"]},
            image_size=32,
            device="cpu",
        )
        for how in (sharp, flat)
    ]
    result = attn_entropy(encoders, photos, seeds=3)
    assert result.verdict_code == "distinguished"
    tiny = [fresh(registers=count) for count in (0, 12)]  # each is uniform to a thousandth
    assert "e-0" in attn_entropy(tiny, photos, seeds=3).verdict
    once = attn_entropy(encoders, photos)
    assert once.verdict_code == "one seed" and "--seeds 5 repeats them" in once.verdict
    assert attn_entropy([encoders[0], encoders[0]], photos, seeds=3).verdict_code == "identical"


def test_weights_that_are_not_random_have_no_seed_to_repeat(photos: list[str]) -> None:
    with pytest.raises(VitcliError, match="has no seed to repeat"):
        attn_entropy(model(), photos, seeds=2)
