"""vitcli encode --map: patch features as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.commands.sources import SMALL
from vitcli.cli import app
from vitcli.commands.encode import analysis
from vitcli.commands.encode.analysis import FeatureCollector
from vitcli.commands.encode.view import map_figure as figure
from vitcli.config.request import ModelRequest
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError
from vitcli.images.decode import decode
from vitcli.images.preprocess import preprocess
from vitcli.loading import load_model
from vitcli.model import Model
from vitcli.nn.encoder import hooked, layer_points

WIDE = [*SMALL, "--set=preprocess.resize=none", "--set=preprocess.resize_size=null"]
runner = CliRunner()


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    random = np.random.default_rng(0)
    paths = [tmp_path / "wide.png", tmp_path / "tall.png"]
    for path, size in zip(paths, [(40, 90, 3), (70, 30, 3)], strict=True):
        Image.fromarray(random.integers(0, 255, size, dtype=np.uint8)).save(path)
    return [str(path) for path in paths]


def model() -> Model:
    settings = tuple(parse_setting(text.removeprefix("--set=")) for text in WIDE)
    return load_model(ModelRequest(preset="vit-b16", settings=settings))


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = runner.invoke(app, ["encode", *WIDE, *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_a_picture_is_drawn_for_images_of_any_shape(photos: list[str], tmp_path: Path) -> None:
    file = tmp_path / "map.png"
    plain = run(*photos, "--json").stdout
    result = run(*photos, "--map", file, "--map-query", "2,7", "--layer", "2", "--json")
    assert result.stdout == plain, "the numbers do not change"
    with Image.open(file) as drawn:
        assert drawn.format == "PNG"
    assert str(file) in result.stderr


@pytest.mark.parametrize(("layer", "index"), [(None, 5), (-1, 4), (0, 0), (3, 3)])
def test_sheets_hold_the_tokens_of_the_layer(
    photos: list[str], layer: int | None, index: int
) -> None:
    loaded = model()
    features = FeatureCollector(layer, "2,7")
    analysis.encode(loaded, photos, around=features)
    sheets = features.sheets()
    assert [len(sheet.colors) for sheet in sheets] == [5, 8]
    assert [len(sheet.colors[0]) for sheet in sheets] == [11, 3]
    kept: list[torch.Tensor] = []
    with hooked([(layer_points(loaded.encoder)[index][1], kept.append)]):
        for photo in photos:
            pixels = preprocess(decode(photo).image, loaded.preprocessing)
            loaded.encoder(torch.from_numpy(pixels)[None])
    patches = [tokens[0, 1:].double() for tokens in kept]
    chosen = patches[0][2 * 11 + 7]
    for sheet, tokens in zip(sheets, patches, strict=True):
        expected = torch.nn.functional.cosine_similarity(tokens, chosen, dim=-1)
        assert np.abs(np.array(sheet.cosines).ravel() - expected.numpy()).max() < 1e-6
    assert sheets[0].query_box == (56.0, 16.0, 64.0, 24.0)
    assert sheets[1].query_box is None
    assert sheets[0].box == (0, 0, 88, 40)


def test_the_figure_shows_the_colors_on_the_pixels_of_their_patches(photos: list[str]) -> None:
    features = FeatureCollector(query="0,0")
    analysis.encode(model(), photos, around=features)
    sheets = features.sheets()
    axes = figure(sheets, features.pictures).axes
    drawn = axes[1].images[0].get_array()
    assert drawn.shape == (40, 90, 3)
    assert np.allclose(drawn[8 * 3 + 4, 8 * 9 + 1], sheets[0].colors[3][9])
    margin = drawn[:, 88:]
    assert (margin == margin[..., :1]).all() and (margin >= 0.7).all(), "a faint gray photo"
    assert axes[2].images[1].get_array()[1, 1] == pytest.approx(1.0)  # over the faint photo


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--map-query", "0,0"], "--map"),
        (["--layer", "2"], "--map"),
        (["--map", "x.png", "--layer", "6"], "-1 for the last"),
        (["--map", "x.png", "--map-query", "9,0"], "rows 0 to 3 and columns 0 to 3"),
        (["--map", "x.jpeg"], ".png"),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str) -> None:
    result = run(*arguments, code=2)
    assert words in result.stderr


def test_colors_are_fitted_over_more_images_than_are_drawn(
    photos: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitcli.commands.encode.analysis.MOST_SHEETS", 1)
    few = FeatureCollector()
    analysis.encode(model(), photos, around=few)
    monkeypatch.undo()
    both = FeatureCollector()
    analysis.encode(model(), photos, around=both)
    assert (len(few.sheets()), few.left_out) == (1, 1)
    assert few.sheets()[0] == both.sheets()[0]


def test_a_query_outside_the_first_image(photos: list[str]) -> None:
    with pytest.raises(VitcliError, match="rows 0 to 4 and columns 0 to 10"):
        analysis.encode(model(), photos, around=FeatureCollector(query="6,2"))
