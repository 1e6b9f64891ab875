from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.commands.sources import SMALL
from vitcli.cli import app
from vitcli.config.request import split_source
from vitcli.config.settings import parse_counts
from vitcli.errors import VitcliError
from vitcli.ui.options import EncodersOptions

runner = CliRunner()


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    random = np.random.default_rng(0)
    paths = [tmp_path / "wide.png", tmp_path / "tall.png"]
    for path, size in zip(paths, [(40, 90, 3), (70, 30, 3)], strict=True):
        Image.fromarray(random.integers(0, 255, size, dtype=np.uint8)).save(path)
    return [str(path) for path in paths]


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = runner.invoke(app, ["attn-entropy", *SMALL, *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_json_has_the_promised_shape(photos: list[str]) -> None:
    answer = json.loads(run(*photos, "--registers", "0,2", "--json").stdout)
    assert answer["schema_version"] == 1
    assert [model["registers"] for model in answer["models"]] == [0, 2]
    model = answer["models"][1]
    assert model["name"] == "vit-b16" and model["weights"] == "random (seed 0)"
    assert model["tokens"] == 19
    assert [layer["layer"] for layer in model["layers"]] == [1, 2, 3, 4]
    for layer in model["layers"]:
        heads = layer["heads"]
        assert [head["head"] for head in heads] == [1, 2, 3]
        for field in ("entropy", "entropy_normalised", "entropy_cls", "attention_distance_px"):
            assert layer[field] == pytest.approx(sum(h[field] for h in heads) / 3, abs=1e-12)
        assert layer["entropy_normalised"] == pytest.approx(layer["entropy"] / math.log(19))
        assert 0 <= layer["entropy"] <= math.log(19)
        assert sum(layer["cls_mass"].values()) == pytest.approx(1, abs=1e-12)
        assert layer["cls_mass"]["registers"] > 0
        assert 0 <= layer["outlier_share"] <= 1
        spread = np.std([h["entropy_normalised"] for h in heads], ddof=1)
        assert layer["head_spread"] == pytest.approx(spread, abs=1e-12)
    assert model["row_sum_error"] < 1e-6
    assert (model["device"], model["dtype"]) == ("cpu", "float32")
    assert answer["models"][0]["layers"][0]["cls_mass"]["registers"] == 0
    assert answer["models"][0]["layers"][0]["entropy_registers"] is None


def test_the_table_shows_the_numbers_of_the_json(photos: list[str]) -> None:
    answer = json.loads(run(*photos, "--json").stdout)
    text = run(*photos, "--every", "3").stdout
    layers = answer["models"][0]["layers"]
    for layer in (layers[2], layers[3]):
        assert f"{layer['entropy']:.3f}  {layer['entropy_normalised']:.4f}" in text
    rows = [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert rows == ["3", "4", "1", "2", "3"], "every third block and the last, then the heads"
    assert answer["verdict"] in text


def test_layers_choose_blocks_and_keep_the_verdict(photos: list[str]) -> None:
    whole = json.loads(run(*photos, "--json").stdout)
    some = json.loads(run(*photos, "--layers", "-1,2", "--json").stdout)
    assert some["models"][0]["layers"] == [whole["models"][0]["layers"][i] for i in (1, 3)]
    assert some["verdict"] == whole["verdict"]


def test_two_presets_side_by_side(photos: list[str]) -> None:
    both = ("--preset", "vit-ti16", "--preset", "siglip-b16-224")
    result = run(*photos, *both, "--json")
    answer = json.loads(result.stdout)
    first, second = answer["models"]
    assert (first["name"], second["name"]) == ("vit-ti16", "siglip-b16-224")
    assert second["layers"][0]["cls_mass"] is None and second["layers"][0]["entropy_cls"] is None
    assert answer["verdict_code"] == "one seed"  # no winner among draws of random weights
    assert (
        "one seed of random weights cannot show whether they differ; --seeds 5" in answer["verdict"]
    )
    assert "describe the architecture" in answer["verdict"]


def test_several_seeds_on_the_command_line(photos: list[str], tmp_path: Path) -> None:
    plot = ("--plot", tmp_path / "seeds.svg", "--overlay", tmp_path / "maps.svg")
    text = run(*photos, "--registers", "0,2", "--seeds", "3", *plot).stdout
    assert "± seeds" in text and "paired over 3 seeds on 2 images" in " ".join(text.split())
    assert "and 3 seeds" in (tmp_path / "seeds.svg").read_text()
    answer = json.loads(run(*photos, "--registers", "0,2", "--seeds", "3", "--json").stdout)
    assert [model["seeds"] for model in answer["models"]] == [[0, 1, 2]] * 2
    assert all(len(layer["by_seed"]) == 3 for layer in answer["models"][0]["layers"])


def test_pictures_are_drawn(photos: list[str], tmp_path: Path) -> None:
    maps, curves = tmp_path / "maps.png", tmp_path / "curves.svg"
    run(*photos, "--overlay", maps, "--rollout", "--fuse", "max", "--plot", curves)
    with Image.open(maps) as drawn:
        assert drawn.format == "PNG" and min(drawn.size) > 300
    assert b"<svg" in curves.read_bytes()


def test_images_of_different_sizes_in_one_call(photos: list[str]) -> None:
    resize = ("--set=preprocess.resize=none", "--set=preprocess.resize_size=null")
    answer = json.loads(run(*photos, *resize, "--json").stdout)
    model = answer["models"][0]
    assert model["tokens"] is None
    assert [image["grid"] for image in model["images"]] == [[5, 11], [8, 3]]
    assert [image["tokens"] for image in model["images"]] == [56, 25]


def test_an_unreadable_image_leaves_the_others_answered(photos: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    answer = json.loads(run(photos[0], broken, "--registers", "0,1", "--json", code=1).stdout)
    assert [len(model["images"]) for model in answer["models"]] == [1, 1]
    assert [failure["path"] for failure in answer["failed"]] == [str(broken)]
    run(broken, code=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rollout"], "--overlay"),
        (["--fuse", "max"], "--overlay"),
        (["--scale", "panel"], "--overlay"),
        (["--scale", "log", "--overlay", "x.png"], "shared"),
        (["--fuse", "median", "--overlay", "x.png"], "mean, max or min"),
        (["--layers", "5"], "expected 1 to 4"),
        (["--layers", "0"], "expected 1 to 4"),
        (["--layers", "last"], "whole numbers"),
        (["--query", "9,9"], "rows 0 to 3 and columns 0 to 3"),
        (["--query", "dog"], "ROW,COL"),
        (["--outlier-cut", "high"], "3x"),
        (["--registers", "two"], "whole numbers"),
        (["--preset", "vit-b61"], "vit-b16"),
        (["--weights", "x.pt", "--registers", "4"], "trained with"),
        (["--seeds", "3", "--weights", "x.pt"], "repeats random weights"),
        (["--seeds", "0"], "--seeds"),
        (["--plot", "curve.txt"], ".png"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], words: str) -> None:
    result = run(*arguments, code=2)
    assert words in result.stderr
    assert result.stdout == ""


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from vitcli.cli import app;"
        "r = CliRunner().invoke(app, ['attn-entropy', '--help']); assert r.exit_code == 0;"
        "assert not {'torch', 'numpy', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_as_a_process(photos: list[str]) -> None:
    command = [sys.executable, "-m", "vitcli", "attn-entropy", *SMALL, *photos, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["models"][0]["depth"] == 4


def test_registers_and_sources_become_requests() -> None:
    options = EncodersOptions(preset=["vit-ti16", "vit-s16"], registers="0,4")
    requests = options.to_requests()
    assert [(r.preset, r.settings[0].value) for r in requests] == [
        ("vit-ti16", 0),
        ("vit-ti16", 4),
        ("vit-s16", 0),
        ("vit-s16", 4),
    ]
    assert parse_counts("4,0,4") == [4, 0]
    assert split_source("clip-b16=a=b.pt") == {"preset": "clip-b16", "weights": "a=b.pt"}
    assert split_source("folder/a=b.pt") == {"weights": "folder/a=b.pt"}
    with pytest.raises(VitcliError):
        parse_counts("-1")


def test_json_is_there_where_no_image_could_be_read(tmp_path: Path) -> None:
    answer = json.loads(run(tmp_path / "none.png", "--json", code=1).stdout)
    assert answer["models"] == [] and len(answer["failed"]) == 1
