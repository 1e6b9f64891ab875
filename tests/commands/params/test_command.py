from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from vitcli.cli import app
from vitcli.commands.params.analysis import params
from vitcli.commands.params.view import figure, tables
from vitcli.config.request import preset_names

runner = CliRunner()
MODELS = ["--preset", "vit-b16", "--preset", "clip-l14"]


def shown(names: Sequence[str], width: int, dtype: str = "float32") -> str:
    result = params(*names, dtype=dtype)
    console = Console(width=width, record=True, file=io.StringIO())
    for part in tables(result, width):
        console.print(part)
    return console.export_text()


def run(*arguments: str | Path, command: str = "params", code: int = 0) -> Any:
    result = runner.invoke(app, [command, *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def numbers(table: str, label: str) -> list[int]:
    """The whole numbers of a piped table's row, shares and sizes left out."""
    (line,) = [line for line in table.splitlines() if line.strip().startswith(label)]
    words = line.strip().removeprefix(label).replace(",", "").split()
    return [int(word) for word in words if word.isdecimal()]


def test_json_has_the_promised_shape() -> None:
    answer = json.loads(run(*MODELS, "--json").stdout)
    assert answer["schema_version"] == 1
    assert [model["name"] for model in answer["models"]] == ["vit-b16", "clip-l14"]
    assert [model["total"] for model in answer["models"]] == [85_798_656, 303_966_208]
    for model in answer["models"]:
        parts = model["components"]
        assert {"name", "parameters", "share", "macs"} <= set(parts[0])
        assert sum(part["parameters"] for part in parts) == model["total"]
        assert sum(part["macs"] for part in parts) == model["macs_per_image"]


def test_the_table_adds_up_to_its_total_and_to_the_json() -> None:
    table = run().stdout
    answer = json.loads(run("--json").stdout)["models"][0]
    weights, with_biases, in_all, size, macs = numbers(table, "total")
    assert (with_biases, in_all) == (answer["total"], answer["total"])
    assert (size, macs) == (4 * answer["total"], answer["macs_per_image"])
    assert weights == answer["total"] - answer["biases"]
    rows = {
        part["name"]: numbers(table, part["name"])
        for part in answer["components"]
        if part["parameters"] and part["macs"]
    }
    for part in answer["components"]:
        if part["name"] in rows:
            each = part["parameters_per_copy"]
            assert rows[part["name"]] == [
                each - part["biases_per_copy"],
                each,
                part["parameters"],
                part["bytes"],
                part["macs"],
            ]
    assert rows["qkv"][:2] == [1_769_472, 1_771_776]
    assert numbers(table, "one block")[:3] == [7_079_424, 7_087_872, 12 * 7_087_872]


def test_models_side_by_side_tell_the_same_as_the_json() -> None:
    table = run(*MODELS).stdout
    models = json.loads(run(*MODELS, "--json").stdout)["models"]
    assert numbers(table, "parameters") == [model["total"] for model in models]
    assert numbers(table, "MACs per image") == [model["macs_per_image"] for model in models]
    assert numbers(table, "tokens") == [197, 257]
    assert numbers(table, "without biases") == [m["total"] - m["biases"] for m in models]


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("names", [["vit-b16"], ["dinov3-7b16"], preset_names()[:7]])
def test_tables_fit_the_terminal_without_an_ellipsis(width: int, names: list[str]) -> None:
    text = shown(names, width, "bfloat16")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(name in text for name in names)


def test_at_80_columns_the_lessons_numbers_can_be_read() -> None:
    lines = {line[:18].strip(): line.split() for line in shown(["vit-b16"], 80).splitlines()}
    assert lines["qkv"][2] == "1.77M"
    assert lines["output projection"][3:5] == ["590K", "591K"]
    assert lines["FFN"][2] == "4.72M"
    assert lines["one block"][3:6] == ["7.08M", "7.09M", "85.1M"]
    assert lines["total"][1:3] == ["85.7M", "85.8M"]


def test_settings_shorthands_and_registers_apply_to_each_model() -> None:
    answer = json.loads(
        run(*MODELS, "--set", "encoder.depth=3", "--registers=0,4", "--json").stdout
    )
    assert [(m["name"], m["depth"], m["registers"]) for m in answer["models"]] == [
        ("vit-b16", 3, 0),
        ("vit-b16", 3, 4),
        ("clip-l14", 3, 0),
        ("clip-l14", 3, 4),
    ]


def test_image_size_keeps_the_table_and_moves_the_operations() -> None:
    native = json.loads(run("--json").stdout)["models"][0]
    larger = json.loads(run("--image-size", "384x512", "--json").stdout)["models"][0]
    assert larger["total"] == native["total"]
    assert (larger["tokens"], larger["image_size"]) == (769, [384, 512])
    remade = json.loads(run("--set", "encoder.image_size=384", "--json").stdout)["models"][0]
    assert remade["total"] == 86_090_496


def test_a_printed_config_reads_back_to_the_same_costs(tmp_path: Path) -> None:
    printed = run("--preset", "dinov2-s14-reg", "--print-config").stdout
    assert yaml.safe_load(printed)["encoder"]["registers"] == 4
    file = tmp_path / "mine.yaml"
    file.write_text(printed)
    (model,) = json.loads(run("--config", file, "--json").stdout)["models"]
    assert model["total"] == 22_057_728


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--preset", "vit-b61"], "'vit-b61' is not a preset", "vit-b16"),
        (["--dtype", "int4"], "--dtype int4: unknown", "bfloat16"),
        (["--image-size", "8"], "8x8 px is smaller than a patch of 16 px", "--image-size"),
        (
            [*MODELS, "--print-config"],
            "--print-config: prints one config (got 2 encoders)",
            "name one",
        ),
        (["--plot", "costs.jpeg"], "cannot draw this format", ".png"),
    ],
)
def test_refusals(arguments: list[str], message: str, hint: str) -> None:
    refused = run(*arguments, code=2)
    assert message in refused.stderr
    assert hint in refused.stderr
    assert refused.stdout == ""


def test_the_figure_stacks_every_component_of_every_model(tmp_path: Path) -> None:
    file = tmp_path / "costs.svg"
    run(*MODELS, "--plot", file)
    assert file.read_text().lstrip().startswith("<?xml")
    result = params("vit-b16", "clip-l14")
    parameters, macs = figure(result).axes
    for axes, field, unit in ((parameters, "total", 1e6), (macs, "macs_per_image", 1e9)):
        ends = [0.0, 0.0]
        for bar in axes.patches:
            row = round(bar.get_y() + bar.get_height() / 2)
            ends[row] = max(ends[row], bar.get_x() + bar.get_width())
        assert ends == pytest.approx([getattr(m, field) / unit for m in result.models])


def test_presets_lists_each_preset_by_family_and_size() -> None:
    rows = json.loads(run("--json", command="presets").stdout)["presets"]
    assert sorted(row["name"] for row in rows) == preset_names()
    keys = [(row["family"], row["parameters"]) for row in rows]
    assert keys == sorted(keys)
    (b16,) = [row for row in rows if row["name"] == "vit-b16"]
    assert b16 == {
        "name": "vit-b16",
        "family": "vit",
        "hidden": 768,
        "depth": 12,
        "heads": 12,
        "patch_size": 16,
        "image_size": [224, 224],
        "native_size": [224, 224],
        "parameters": 85_798_656,
        "hub": None,
    }


def test_presets_by_a_word() -> None:
    listed = run("SigLIP2", command="presets").stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()][2:]
    assert len(names) == 15
    assert all(name.startswith("siglip2-") for name in names)
    refused = run("resnet", command="presets", code=2)
    assert "no name contains 'resnet'" in refused.stderr


@pytest.mark.parametrize("command", ["params", "presets"])
def test_the_process_computes_without_torch_or_numpy(command: str) -> None:
    program = (
        "import sys; from vitcli.cli import app\n"
        f"try: app([{command!r}, '--json'])\n"
        "finally: print([m for m in ('torch', 'numpy', 'PIL', 'matplotlib') if m in sys.modules],"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["schema_version"] == 1


def test_a_real_process_answers() -> None:
    command = [sys.executable, "-m", "vitcli", "params", *MODELS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert numbers(done.stdout, "parameters") == [85_798_656, 303_966_208]
