from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.checkpoints.sources import SQUASH, vit_folder
from tests.commands.sources import SMALL
from vitcli.cli import app

runner = CliRunner()
SQUASHED = [part for setting in SQUASH for part in ("--set", setting)]


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = runner.invoke(app, ["compare", *SMALL, *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_the_same_preset_twice_is_equal() -> None:
    answer = json.loads(run("vit-b16", "vit-b16", "--json").stdout)
    assert answer["schema_version"] == 1
    assert answer["verdict_code"] == "identical"
    assert answer["cka"]["layers_a"] == ["input", *(f"block {i}" for i in range(1, 5)), "norm"]


def test_another_eps_parts_in_the_first_block(tmp_path: Path) -> None:
    plot = tmp_path / "cka.png"
    eps = "encoder.norm_eps=1e-3"
    arguments = ("vit-b16", "vit-b16", "--set-b", eps)
    answer = json.loads(run(*arguments, "--json", "--plot", plot).stdout)
    assert answer["first_parted"] == "block 1"
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = run(*arguments, "--every", "2").stdout
    row = {row["layer"]: row for row in answer["differences"]}["block 4"]
    assert f"block 4 {row['max_abs']:.2e}" in " ".join(text.split())
    assert "block 3" not in text
    assert "encoder.norm_eps" in text
    assert answer["summary"] in text


@pytest.mark.parametrize(
    ("arguments", "a", "b"),
    [
        (("vit-b16", "vit-b32"), "vit-b16", "vit-b32"),
        (("vit-b16", "vit-b16"), "vit-b16", "vit-b16"),
        (
            ("vit-b16", "vit-b16", "--set-b", "encoder.registers=4"),
            "vit-b16, registers 0",
            "vit-b16, registers 4",
        ),
    ],
)
def test_encoders_of_one_name_are_named_by_what_differs(
    arguments: tuple[str, ...], a: str, b: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("vitcli.ui.figures.draw", lambda make, *_: drawn.append(make()))
    run(*arguments, "--plot", "cka.png")
    (drawing,) = drawn
    heat = drawing.axes[0]
    assert heat.get_xlabel() == f"layer of B: {b}" and heat.get_ylabel() == f"layer of A: {a}"


def test_a_yaml_file_is_a_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: vit-b16\nencoder:\n  norm_eps: 1e-3\n")
    answer = json.loads(run(file, "vit-b16", "--json").stdout)
    assert answer["a"]["name"] == "mine"
    assert [row["key"] for row in answer["config_differences"]] == ["encoder.norm_eps"]


def test_two_copies_of_the_weights_of_one_file(tmp_path: Path) -> None:
    file = vit_folder(tmp_path) / "model.safetensors"
    average = load_file(file)
    raw = {f"module.{name}": t * 2 for name, t in average.items()}
    torch.save({"state_dict": raw, "state_dict_ema": average}, tmp_path / "pytorch_model.bin")
    file.unlink()
    line = ["compare", str(tmp_path), str(tmp_path), "--json", *SQUASHED]

    def verdict(*options: str) -> str:
        done = runner.invoke(app, [*line, *options])
        assert done.exit_code == 0, done.stderr
        code: str = json.loads(done.stdout)["verdict_code"]
        return code

    assert verdict() == verdict("--which", "raw") == "identical"
    assert verdict("--which", "ema", "--which", "raw") != "identical"
    assert runner.invoke(app, [*line, *["--which", "raw"] * 3]).exit_code == 2
    assert "no supported family" in runner.invoke(app, [*line, "--prefix", "tower"]).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["vit-b16"], "Missing argument"),
        (["vit-b16", "vit-b16", "--examples", "few"], "auto, images or patches"),
        (["vit-b16", "vit-b16", "--set-a", "encoder.hiden=3"], "hidden"),
        (["vit-b16", "no-such-place.safetensors"], "no-such-place"),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str) -> None:
    result = run(*arguments, code=2)
    assert words in result.stderr
    assert result.stdout == ""


def test_a_misspelled_preset_is_told_with_its_nearest() -> None:
    told = run("vit-b16", "vit-b61", code=2).stderr
    assert "vit-b61: is not a preset, a YAML file or a checkpoint" in told
    assert "did you mean vit-b16?" in told


def test_both_sides_say_where_and_in_what_they_ran() -> None:
    answer = json.loads(run("vit-b16", "vit-b16", "--dtype", "float64", "--json").stdout)
    for side in ("a", "b"):
        assert (answer[side]["device"], answer[side]["dtype"]) == ("cpu", "float64")


def test_the_hint_for_equal_grids_works_when_typed(tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.new("RGB", (50, 40), "teal").save(photo)
    pair = ("vit-b16", "vit-b16", photo, "--set-b", "encoder.patch_size=4")
    hint = run(*pair, code=2).stderr
    (size,) = re.findall(r"--set-b (encoder\.image_size=\S+),", hint)
    answer = json.loads(run(*pair, "--set-b", size, "--json").stdout)
    assert answer["verdict_code"] == "incomparable" and answer["differences"] == []
    assert answer["cka"]["count"] == 16


def test_a_hole_ends_with_one_and_is_the_first_line(tmp_path: Path) -> None:
    whole, broken = (vit_folder(tmp_path / side) for side in "ab")
    tensors = load_file(broken / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("layer.1.output.dense.bias")]
    tensors[name][0] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    line = ["compare", str(whole), str(broken), *SQUASHED]
    shown = runner.invoke(app, line)
    assert shown.exit_code == 1
    assert shown.stdout.startswith("NaN or infinity: B is not finite from block 2 on")
    found = runner.invoke(app, [*line, "--json"])
    answer = json.loads(found.stdout)
    assert found.exit_code == 1 and answer["verdict_code"] == "not finite"
    assert answer["holes"][0]["side"] == "B"
    largest = {row["layer"]: row["max_abs"] for row in answer["differences"]}
    assert largest["block 1"] == 0 and largest["block 2"] is None
