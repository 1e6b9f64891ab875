"""Every file in experiments/ is one that works: sweeps, configs and scripts."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.growth import exponents
from tests.commands.probe.sources import write_idx
from tests.experiments.sources import ENVIRONMENT, ROOT
from vitcli.cli import app
from vitcli.commands.sweep.analysis import check_arguments
from vitcli.commands.sweep.space import draw, known_commands
from vitcli.commands.sweep.spec import SHIPPED, load_sweep
from vitcli.commands.sweep.trials import expand, repeats
from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.training import IMAGES_RECIPE, ImagesRun, ShapesRun
from vitcli.config.yaml import read_yaml

SWEEPS = sorted(SHIPPED.glob("*.yaml"))
CONFIGS = sorted((ROOT / "experiments").rglob("*.yaml"))
COMMANDS = known_commands()
TOY = [
    "--set=encoder.depth=1", "--set=encoder.hidden=12", "--set=encoder.mlp_hidden=12",
    "--set=data.train_size=32", "--set=data.val_size=16",
]  # fmt: skip


def test_there_are_sweeps() -> None:
    assert len(SWEEPS) >= 9


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_a_sweep_is_one_that_runs(file: Path) -> None:
    """Options and keys exist, and the command itself accepts every config of the first seed."""
    sweep = load_sweep(file, COMMANDS)
    command = COMMANDS[sweep.command]
    grid = {key: value for key, value in sweep.grid.items() if key != "weights"}
    sweep = sweep.model_copy(update={"grid": grid})  # those of an earlier run are not here
    check_arguments(sweep, command)
    assert sweep.question.endswith("?")
    if not sweep.search:
        assert len(next(iter(sweep.repeat.values()), [])) >= 3, "a claim needs three seeds"
    trials = expand(sweep) or repeats(sweep, draw(sweep.space, 1, 0)[0])
    first = [t for t in trials if all(t.params[k] == s[0] for k, s in sweep.repeat.items())]
    for trial in first:
        arguments = command.arguments(sweep.spelled_out(trial.params))
        arguments.remove("--json")
        result = CliRunner().invoke(app, [*arguments, "--print-config"])
        assert result.exit_code == 0, f"{arguments}: {result.output}"


def test_the_bases_of_lora_rank_are_made_by_the_command_in_its_file() -> None:
    """The weights that the sweep names are where the command writes them, and run.sh agrees."""
    text = (SHIPPED / "lora-rank.yaml").read_text()
    (loop,) = re.findall(r"^#   for seed in (.*?)^#   done", text, re.DOTALL | re.MULTILINE)
    seeds, _, command = re.sub(r"^#|\\\n#", "", loop, flags=re.MULTILINE).partition("; do")
    _, *words = shlex.split(command)
    out = words.pop()
    made = [out.replace("$seed", seed) for seed in seeds.split()]
    assert made == load_sweep(SHIPPED / "lora-rank.yaml", COMMANDS).grid["weights"]
    words = [word.replace("$seed", "100") for word in words[:-1]]
    result = CliRunner().invoke(app, [*words, "--print-config"])
    assert result.exit_code == 0, result.output
    script = shlex.split((ROOT / "experiments" / "run.sh").read_text().replace("\\\n", " "))
    assert {word.replace("100", "$seed") for word in words} <= set(script)


def test_the_teacher_of_distillation_is_made_by_the_command_in_its_file() -> None:
    (command,) = [how for path, how in load_sweep("distillation").needs.items() if "runs/" in path]
    program, *words = shlex.split(command)
    assert program == "vitcli" and words[words.index("--out") + 1] == "runs/fashion-cnn"
    result = CliRunner().invoke(app, [*words, "--print-config"])
    assert result.exit_code == 0, result.output
    script = shlex.split((ROOT / "experiments" / "run.sh").read_text().replace("\\\n", " "))
    assert set(words) <= set(script)


STARTS = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
from vitcli.cli import app
from vitcli.commands.sweep.analysis import opened
from vitcli.commands.sweep.spec import shipped_sweeps, sweep_path
from vitcli.commands.sweep.trials import expand

def run(*words):
    found = CliRunner().invoke(app, list(words))
    assert found.exit_code == 0, (words, found.output)
    return found.stdout

teacher, photos, *toy = sys.argv[1:]
run("train", photos, "--preset", "timm:test_efficientnet", *toy, "--out", teacher)
for name in shipped_sweeps():
    if "command: train\\n" not in sweep_path(name).read_text():
        continue  # shapes need no file
    planned = json.loads(run("sweep", name, "--dry-run", "--json"))
    sweep, _, command = opened(name, None, to_run=True)
    assert len(planned["trials"]) == len(expand(sweep))
    started = {}
    for trial in expand(sweep):
        given = {**sweep.spelled_out(trial.params), "data.path": photos, "data.train_limit": 16}
        given.pop("train.batch", None)  # it would win over --batch
        if given.get("train.teacher"):
            given["train.teacher"] = f"timm:{teacher}"
        kind = given.get("train.backbone"), given.get("train.distillation")
        if kind not in started:
            started[kind] = json.loads(run(*command.arguments(given), *toy))["result"]
    assert all(result["val_accuracy"] >= 0 for result in started.values())
    print(name, len(started))
"""


def test_shipped_sweeps_on_photos_start_where_there_is_no_checkout(tmp_path: Path) -> None:
    """As from a wheel: the package alone, each of its kinds of trials at toy size."""
    shutil.copytree(ROOT / "vitcli", tmp_path / "site" / "vitcli")
    photos, teacher = tmp_path / "photos", tmp_path / "teacher"
    photos.mkdir()
    random = np.random.default_rng(0)
    for part, count in (("train", 64), ("t10k", 20)):
        write_idx(photos / f"{part}-images-idx3-ubyte.gz", random.integers(0, 256, (count, 28, 28)))
        write_idx(photos / f"{part}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    toy = (
        *("--epochs", "1", "--batch", "8", "--set", "data.kind=fashion-mnist"),
        *("--set", "data.workers=0", "--set", "encoder.image_size=28"),
        *("--set", "preprocess.resize_size=28"),
    )
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(teacher), str(photos), *toy],
        env=ENVIRONMENT | {"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kinds = {"cnn-or-vit": 2, "distillation": 2, "fashion-seeds": 1}
    kinds |= {"patch-few-images": 1, "warmup-photos": 1}
    assert done.stdout.split() == [str(word) for pair in kinds.items() for word in pair]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_is_one_that_loads(file: Path) -> None:
    data = read_yaml(file).data
    if "data" not in data and "train" not in data:
        assert load_config(ModelConfig, file=file)
    elif "train_size" in data.get("data", {}):
        assert load_config(ShapesRun, file=file)
    else:
        assert IMAGES_RECIPE and load_config(ImagesRun, file=file)


def test_the_shell_loop_prints_a_line_a_run() -> None:
    done = subprocess.run(
        [str(ROOT / "experiments" / "norm-loop.sh"), *TOY],
        env={**ENVIRONMENT, "NORMS": "post"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    head, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert head == ["norm", "warmup", "val_accuracy", "verdict"]
    assert [row[:2] for row in rows] == [["post", "0"], ["post", "0.25"]]
    assert all(0 <= float(row[2]) <= 1 and row[3] for row in rows)


def test_the_python_example_compares_images(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    Image.new("RGB", (20, 20), "red").save(tmp_path / "also-red.png")
    Image.radial_gradient("L").resize((16, 16)).save(tmp_path / "ring.png")
    small = ["encoder.depth=1", "encoder.hidden=12", "encoder.heads=3", "encoder.mlp_hidden=12"]
    pairs = [word for item in small for word in ("--set", *item.split("="))]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "similar.py"),
         "red.png", "ring.png", "also-red.png", *pairs],
        env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 3
    assert rows[0] == ["1.0000", "red.png", "also-red.png"], "the same picture at two sizes"
    alone = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "similar.py"), "red.png", "no.png", *pairs],
        env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert alone.returncode == 1 and alone.stderr == "two images or more can be compared\n"


def test_the_check_of_an_accelerator_runs_on_a_processor() -> None:
    """All but compiling and training, which have tests of their own, on a few tiny images."""
    words = ["--device", "cpu", "--toy", "--skip", "compile", "--skip", "train"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "gpu-check.py"), *words],
        env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    title, *rows = done.stdout.splitlines()
    assert title.startswith("vitcli ") and title.endswith("; cpu")
    names = ["encode float32", "encode bfloat16", "embed", "profile"]
    assert [row[:26].strip() for row in rows] == names
    assert all("s  ok: " in row for row in rows)


def test_growth_is_measured_and_its_exponents_are_slopes() -> None:
    words = ["--rounds", "1", "--sides", "32", "64", "--batches", "1", "2", "--depths", "1"]
    words += ["--listed", "1000", "2000", "--encoded", "20"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "growth.py"), *words],
        env=ENVIRONMENT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    sizes = [(row[0], row[1]) for row in rows]
    assert sizes == [
        ("tokens", "5"), ("tokens", "17"), ("batch", "1"), ("batch", "2"), ("depth", "1"),
        ("images listed", "1,000"), ("images listed", "2,000"), ("images encoded", "20"),
    ]  # fmt: skip
    assert exponents([(10, 3.0), (100, 300.0), (1000, None)]) == [None, pytest.approx(2.0), None]


def test_the_report_writes_tables_and_figures_of_what_was_run(tmp_path: Path) -> None:
    """A toy sweep of two trials, reported into a copy of experiments/."""
    place = tmp_path / "experiments"
    place.mkdir()
    shutil.copy(ROOT / "experiments" / "report.py", place)
    begin = "# Title\n<!-- begin toy -->\nold\n<!-- end toy -->\n"
    (place / "README.md").write_text(begin + "<!-- begin other -->\nkept\n<!-- end other -->\n")
    shipped = tmp_path / SHIPPED.relative_to(ROOT)
    shipped.mkdir(parents=True)
    (shipped / "toy.yaml").write_text(
        "question: Does it work?\ncommand: params\nbase: {preset: vit-ti16}\n"
        "grid: {encoder.depth: [1, 2]}\nmetrics: {total: models.0.total}\n"
    )
    for command in (
        [sys.executable, "-m", "vitcli", "sweep", str(shipped / "toy.yaml"), "--jobs", "2"],
        [sys.executable, str(place / "report.py"), "runs"],
    ):
        subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, check=True, capture_output=True)
    text = (place / "README.md").read_text()
    assert "old" not in text and "kept" in text
    assert "| depth | total | n |" in text and "2 done" in text
    totals = [
        int(line.split("|")[2].replace(",", ""))
        for line in text.splitlines()
        if line.startswith(("| 1 |", "| 2 |"))
    ]
    # A block has 4 D^2 + 4 D parameters in attention, 8 D^2 + 5 D in the FFN and 4 D in its norms.
    assert totals[1] - totals[0] == 12 * 192**2 + 13 * 192
    assert (place / "figures" / "toy.png").read_bytes().startswith(b"\x89PNG")
