"""Where two encoders part, and what is called equal."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands.sources import tiny_model
from vitcli.commands.compare import analysis as module
from vitcli.commands.compare.analysis import compare, config_differences
from vitcli.commands.compare.similarity import MinibatchCka, Pairing, centered_gram
from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError
from vitcli.images.decode import decode
from vitcli.images.preprocess import preprocess
from vitcli.model import Model
from vitcli.nn.encoder import hooked, layer_points


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for i in range(23):
        pixels = random.integers(0, 255, (40 + i, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
    return sorted(str(path) for path in folder.iterdir())


def test_two_loads_of_one_encoder_are_equal_bit_for_bit(photos: list[str]) -> None:
    result = compare(tiny_model(), tiny_model(), photos[:2])
    assert result.verdict_code == "identical"
    assert result.first_unequal is None and result.first_parted is None
    assert [row.layer for row in result.differences] == [
        "pixels",
        "input",
        "block 1",
        "block 2",
        "norm",
        "pooled",
    ]
    assert all((r.max_abs, r.cosine, r.cosine_min) == (0, 1, 1) for r in result.differences)
    assert (
        result.verdict == "identical: all 6 layers agree bit for bit on 2 images" == result.summary
    )
    diagonal = [result.cka.values[i][i] for i in range(4)]
    assert diagonal == pytest.approx([1.0] * 4, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_eps_names_the_first_block_and_the_size(
    dtype: torch.dtype, photos: list[str]
) -> None:
    a, b = tiny_model(dtype), tiny_model(dtype, norm_eps=1e-5)
    result = compare(a, b, photos[:1])
    assert result.first_unequal == "block 1"
    assert result.verdict_code == "different"
    pixels = torch.from_numpy(preprocess(decode(photos[0]).image, a.preprocessing))[None].to(dtype)
    outputs: list[torch.Tensor] = []
    for model in (a, b):
        with hooked([(model.encoder.vit.blocks[0], outputs.append)]):
            model.encoder(pixels)
    expected = float((outputs[0] - outputs[1]).abs().max())
    row = {row.layer: row for row in result.differences}["block 1"]
    assert row.max_abs == expected > 0
    assert f"block 1: {expected:.2e}" in result.summary
    assert [(d.key, d.a, d.b) for d in result.config_differences] == [
        ("encoder.norm_eps", "1e-06", "1e-05")
    ]


def test_other_preprocessing_parts_at_the_pixels(photos: list[str]) -> None:
    b = tiny_model()
    b = Model(
        **{**vars(b), "known_preprocessing": PreprocessConfig(resize_size=(24, 32), std=(0.2,) * 3)}
    )
    result = compare(tiny_model(), b, photos[:1])
    assert result.first_parted == "pixels"
    assert config_differences(tiny_model(), b)[0].key == "preprocess.std"


def test_a_change_below_the_tolerance_is_called_rounding(photos: list[str]) -> None:
    b = tiny_model(torch.float64)
    with torch.no_grad():
        b.encoder.vit.blocks[1].feed_forward.fc2.bias[0] += 1e-14
    result = compare(tiny_model(torch.float64), b, photos[:1])
    assert (result.verdict_code, result.first_unequal) == ("rounding", "block 2")
    assert result.first_parted is None


def test_other_widths_are_compared_by_cka_alone(photos: list[str]) -> None:
    result = compare(tiny_model(), tiny_model(hidden=36, depth=3, registers=2), photos[:2])
    assert result.verdict_code == "incomparable"
    assert [row.layer for row in result.differences] == ["pixels"]
    assert (len(result.cka.values), len(result.cka.values[0])) == (4, 5)
    assert result.cka.examples == "patches" and result.cka.count == 2 * 12
    assert "CKA" in result.summary


def test_cka_across_images_is_that_of_the_flattened_tokens(
    photos: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IMAGES_AT_ONCE", 8)
    a, b = tiny_model(torch.float64), tiny_model(torch.float64, seed=1, hidden=36, patch_size=4)
    result = compare(a, b, photos[:18])
    # A rest of two could not be estimated from: it joins the part before.
    assert (result.cka.examples, result.cka.count, result.cka.minibatches) == ("images", 18, 2)
    pixels = torch.stack(
        [torch.from_numpy(preprocess(decode(p).image, a.preprocessing)) for p in photos[:18]]
    ).double()
    total = MinibatchCka()
    for part in (pixels[:8], pixels[8:]):
        grams: list[list[torch.Tensor]] = [[], []]
        for model, kept in zip((a, b), grams, strict=True):

            def keep(tokens: torch.Tensor, kept: list[torch.Tensor] = kept) -> None:
                kept.append(centered_gram(tokens.flatten(1)))

            with hooked((point, keep) for _, point in layer_points(model.encoder)):
                model.encoder(part)
        total.add(*grams)
    assert np.abs(np.array(result.cka.values) - total.value().numpy()).max() < 1e-9


def test_other_grids_have_no_common_patches(photos: list[str]) -> None:
    with pytest.raises(VitcliError, match="3x4 patches for A, 6x8 for B"):
        compare(tiny_model(), tiny_model(patch_size=4), photos[:2])
    compare(tiny_model(), tiny_model(patch_size=4), photos[:4], examples="images")
    with pytest.raises(VitcliError, match="got 3, expected at least"):
        compare(tiny_model(), tiny_model(patch_size=4), photos[:3], examples="images")


def test_other_examples_are_refused_from_python_too(photos: list[str]) -> None:
    with pytest.raises(VitcliError, match=r"image: unknown \(expected auto, images or patches\)"):
        compare(tiny_model(), tiny_model(), photos, examples="image")


def test_an_unreadable_image_is_left_out(photos: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    result = compare(tiny_model(), tiny_model(), [str(broken), photos[0]])
    assert result.images == 1
    assert [failure.path for failure in result.failed] == [str(broken)]
    with pytest.raises(VitcliError):
        compare(tiny_model(), tiny_model(), [str(broken)])


def broken(place: str) -> Model:
    model = tiny_model()
    block = model.encoder.vit.blocks[1]
    parameter = {
        "pixels": None,
        "input": model.encoder.front_end.projection.bias,
        "block 2": block.feed_forward.fc2.bias,
        "norm": model.encoder.vit.norm.weight,
    }[place]
    if parameter is None:
        config = PreprocessConfig(resize_size=(24, 32))
        preprocessing = config.model_copy(update={"std": (math.nan, 0.5, 0.5)})  # unchecked
        return Model(**{**vars(model), "known_preprocessing": preprocessing})
    with torch.no_grad():
        parameter.view(-1)[3] = float("nan")
    return model


@pytest.mark.parametrize("place", ["pixels", "input", "block 2", "norm"])
@pytest.mark.parametrize("sides", ["A", "B", "AB"])
def test_a_layer_that_is_not_finite_is_said_first(
    place: str, sides: str, photos: list[str]
) -> None:
    a, b = (broken(place) if side in sides else tiny_model() for side in "AB")
    result = compare(a, b, photos[:2])
    assert result.verdict_code == "not finite"
    assert [(hole.side, hole.layer) for hole in result.holes] == [(side, place) for side in sides]
    assert result.verdict.startswith("NaN or infinity: ")
    assert f"{sides[0]} is not finite from {place} on" in result.verdict
    rows = {row.layer: row for row in result.differences}
    assert math.isnan(rows[place].max_abs) and math.isnan(rows[place].cosine)
    assert result.first_unequal == result.first_parted == place
    assert result.best_pair is None


def cropped(model: Model, **changes: Any) -> Model:
    preprocessing = PreprocessConfig(**changes)
    return Model(**{**vars(model), "known_preprocessing": preprocessing})


def smooth(path: Path, size: tuple[int, int], seed: int) -> str:
    """A picture whose neighboring pixels are similar, as in a photograph."""
    small = np.random.default_rng(seed).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path)
    return str(path)


def test_patches_of_other_crops_are_paired_by_place(tmp_path: Path) -> None:
    paths = [smooth(tmp_path / f"{i}.png", (256, 192), i) for i in range(4)]
    grid = {"patch_size": 4, "image_size": (48, 48), "position": "none"}
    whole = cropped(tiny_model(**grid), resize="squash", resize_size=(48, 48))
    middle = cropped(
        tiny_model(**grid), resize="shortest", resize_size=(64, 64), crop_size=(48, 48)
    )
    result = compare(whole, middle, paths)
    # The crop holds 144 of 192 rows and 144 of 256 columns: 9 of 12 rows of patches have their
    # centers in it, and 6 of 12 columns.
    words = "pairs the 216 of 576 patches in the common region"
    assert result.cka.count == 4 * 9 * 6 and words in result.verdict
    by_place = result.cka.values[0][0]
    by_index = MinibatchCka()
    features = [
        torch.cat([m.encoder.front_end(pixels)[0, 1:] for pixels in _pixels(m, paths)])
        for m in (whole, middle)
    ]
    by_index.add(*([centered_gram(x)] for x in features))
    assert by_place is not None and by_place > 0.8 > 0.5 > float(by_index.value().detach())
    same = compare(whole, whole, paths)
    assert same.cka.pairing == "" and same.cka.count == 4 * 144


def _pixels(model: Model, paths: list[str]) -> list[torch.Tensor]:
    return [
        torch.from_numpy(preprocess(decode(path).image, model.preprocessing))[None]
        for path in paths
    ]


def test_places_are_those_of_the_common_region() -> None:
    pairing = Pairing()
    # B saw the right half of what A saw: A's two right columns lie in B's columns 0, 1 and 2, 3.
    first, second = pairing.add((0, 0, 40, 20), (20, 0, 40, 20), (2, 4))
    assert first.tolist() == [2, 3, 6, 7] and second.tolist() == [1, 3, 5, 7]
    assert "4 of 8 patches" in pairing.in_words()
    first, second = pairing.add((0, 0, 40, 20), (0, 0, 40, 20), (2, 4))
    assert first.tolist() == second.tolist() == list(range(8))


def test_the_most_similar_layers_are_named_only_where_images_tell_them_apart(
    photos: list[str],
) -> None:
    """Layers of random tokens are similar to none: some pair has the largest CKA, no one wins."""
    a, b = tiny_model(hidden=36), tiny_model(seed=5)
    few = compare(a, b, photos[:2]).best_pair
    assert few is not None and few.low is None and few.ties is None
    result = compare(a, b, photos[:12])
    best, errors = result.best_pair, result.cka.standard_errors
    assert best is not None and errors is not None
    assert best.low < best.cka < best.high
    assert best.ties > 0 and "does not differ significantly" in result.verdict
    assert result.verdict.endswith("95% interval over images (jackknife)")
    assert compare(dataclasses.replace(a, fresh=True), b, photos[:12]).verdict.endswith(
        "over images (jackknife), not over seeds: random weights are one seed's"
    )


def test_subtracting_is_left_out_where_patches_differ_in_size(photos: list[str]) -> None:
    small = cropped(
        tiny_model(patch_size=4, image_size=(12, 16)), resize="squash", resize_size=(12, 16)
    )
    result = compare(tiny_model(), small, photos[:2])
    assert result.verdict_code == "incomparable" and result.differences == ()
    with pytest.raises(VitcliError) as caught:
        compare(tiny_model(), tiny_model(patch_size=4), photos[:2])
    assert "--set-b encoder.image_size=12x16" in caught.value.hint
