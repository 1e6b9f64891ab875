"""Checkpoints on the command line: convert, families, and the shared --weights."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from tests.checkpoints.parity.compare import randomized
from tests.checkpoints.parity.hf import CASES
from tests.checkpoints.sources import reconfigured, vit_folder
from vitcli.checkpoints.families import FAMILIES
from vitcli.cli import app
from vitcli.commands.catalog.analysis import HUB, families, presets
from vitcli.commands.catalog.command import LIBRARIES

pytestmark = pytest.mark.filterwarnings("ignore")
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

KNOWN = {"resize": "squash", "resize_size": 32, "filter": "bicubic", "resize_dtype": "uint8"}
KNOWN |= {"crop_size": "null", "mean": "[0.0, 0.0, 0.0]", "std": "[1.0, 1.0, 1.0]"}
PIXELS = [word for k, v in KNOWN.items() for word in ("--set", f"preprocess.{k}={v}")]


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vit_folder(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return tmp_path / "vit"


def test_encode_reports_how_the_checkpoint_was_read(folder: Path) -> None:
    result = run("encode", "--weights", folder, "--json")
    told = json.loads(result.stdout)["model"]["checkpoint"]
    assert told["family"] == "hf-vit" and told["library"] == "transformers"
    assert told["tensors_used"] == 40 and told["tensors_dropped"] == []
    assert told["preprocess_by"] == "preprocessor_config.json"
    assert told["preprocess"]["resize_size"] == 32
    assert told["tensors_resized"] == []
    assert "hf-vit (transformers), 40 tensors used" in result.stderr


def test_another_image_size_resizes_the_table(folder: Path) -> None:
    more = ("--image-size", "40x24", "--pos-resize", "bilinear_antialias", "--json")
    answer = json.loads(run("encode", "--weights", folder, *more).stdout)
    resized = answer["model"]["checkpoint"]["tensors_resized"]
    assert resized == ["position table 4x4 to 5x3 by bilinear_antialias"]
    assert answer["images"][0]["output_shape"] == [1, 1 + 15, 16]
    exact = ("--set", "encoder.position_table.resize=bicubic")
    answer = json.loads(run("encode", "--weights", folder, *more, *exact).stdout)
    resized = answer["model"]["checkpoint"]["tensors_resized"]
    assert resized == ["position table 4x4 to 5x3 by bicubic"], "the exact key wins"


def test_unknown_preprocessing_is_refused_where_pixels_are_read(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    told = run("encode", "--weights", folder, code=2).stderr
    assert "no preprocessing config found" in " ".join(told.split())
    run("params", "--weights", folder)
    run("encode", "--weights", folder, "--set", "preprocess.resize_size=32", code=2)
    run("encode", "--weights", folder, *PIXELS)


def test_a_pickle_with_code_is_one_line_on_stderr(tmp_path: Path) -> None:
    torch.save({"model": {}, "best": Fraction(1, 3)}, tmp_path / "run.pth")
    result = run("encode", "--weights", tmp_path / "run.pth", code=2)
    assert "fractions.Fraction" in result.stderr


def test_convert_then_load_is_bit_exact(folder: Path, tmp_path: Path) -> None:
    answer = json.loads(run("convert", folder, tmp_path / "own", "--json").stdout)
    assert answer["checkpoint"]["family"] == "hf-vit"
    assert answer["bytes"] == (tmp_path / "own" / "model.safetensors").stat().st_size
    first = load_file(tmp_path / "own" / "model.safetensors")
    assert answer["parameters"] == sum(t.numel() for t in first.values())
    run("convert", tmp_path / "own", tmp_path / "again")
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [(tmp_path / name / "config.yaml").read_text() for name in ("own", "again")]
    assert configs[0].splitlines()[1:] == configs[1].splitlines()[1:]
    same = [
        json.loads(run("encode", "--weights", source, "--json").stdout)["images"]
        for source in (folder, tmp_path / "own")
    ]
    assert same[0] == same[1]


def test_convert_keeps_what_is_there(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    assert "already exists" in run("convert", folder, tmp_path / "out", code=2).stderr
    assert (tmp_path / "out" / "precious").read_text() == "x"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out", "vit"]


def test_convert_refuses_what_it_would_have_to_guess(folder: Path, tmp_path: Path) -> None:
    reconfigured(folder, num_attention_heads=None)
    told = run("convert", folder, tmp_path / "out", code=2).stderr
    assert "--set encoder.heads=VALUE" in " ".join(told.split())
    assert not (tmp_path / "out").exists()


def test_families_lists_every_family_and_how_it_was_verified() -> None:
    rows = json.loads(run("families", "--json").stdout)["families"]
    assert [row["name"] for row in rows] == [family.name for family in FAMILIES]
    assert all(row["verified"] and row["library"] for row in rows)
    assert "hf-dinov2-registers" in run("families", "dinov2").stdout
    assert "hf-clip" not in run("families", "dinov2").stdout
    run("families", "resnet", code=2)


def test_a_merger_refuses_half_cells(tmp_path: Path) -> None:
    randomized(CASES["qwen2-vl"].make()).float().save_pretrained(tmp_path / "qwen")
    preset = ("--preset", "qwen2-vl-2b")
    told = run("encode", "--weights", tmp_path / "qwen", *preset, code=2).stderr
    assert "preset qwen2-vl-2b says hidden = 1280" in " ".join(told.split())
    more = ("encode", "--weights", tmp_path / "qwen", *PIXELS, "--image-size")
    told = run(*more, "40x32", code=2).stderr
    assert "5x4 patches" in told and "multiple of 16" in told
    answer = json.loads(run(*more, "32x48", "--json").stdout)
    assert answer["images"][0]["head_shape"] == [1, 6, 24]


def test_hub_ids_are_those_of_presets() -> None:
    known = {row.name: row.hub for row in presets().presets}
    assert set(HUB) <= set(known)
    assert known["dinov2-s14"] == "facebook/dinov2-small"


def test_the_words_that_complete_families_find_all_of_them() -> None:
    found = [{row.name for row in families(word).families} for word in LIBRARIES]
    assert all(found) and set.union(*found) == {family.name for family in FAMILIES}
