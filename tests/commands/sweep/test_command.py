from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vitcli.cli import app
from vitcli.commands.sweep.command import PROGRAM_VARIABLE
from vitcli.commands.sweep.space import SHORTHANDS, known_commands
from vitcli.commands.sweep.trials import TrialDir

FAKE = Path(__file__).with_name("fake.py")
TOY = """
question: Does the fake mind its learning rate?
command: train-shapes
base: {encoder: {depth: 2}}
grid: {name: [ok, crash], lr: [0.1, 0.2]}
repeat: 2
metrics: [result.score]
"""
runner = CliRunner()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = [sys.executable, "-S", "-E", str(FAKE), str(tmp_path / "log")]
    monkeypatch.setenv(PROGRAM_VARIABLE, shlex.join(program))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(TOY)
    return tmp_path / "toy.yaml"


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = runner.invoke(app, ["sweep", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_what_a_sweep_needs_is_there_before_a_trial_runs(toy: Path) -> None:
    toy.write_text(TOY.replace("[ok, crash]", "[ok]") + "needs: {base: vitcli train --out base}\n")
    assert len(json.loads(run(toy, "--dry-run", "--json").stdout)["trials"]) == 4
    refused = run(toy, code=2)
    assert "toy: base: is missing" in refused.stderr and "vitcli train --out base" in refused.stderr
    assert not Path("runs").exists()
    Path("base").mkdir()
    assert json.loads(run(toy, "--json").stdout)["states"] == {"done": 4}


def test_a_sweep_answers_with_its_report_and_exits_1_after_failures(toy: Path) -> None:
    answer = json.loads(run(toy, "--json", code=1).stdout)
    assert answer["schema_version"] == 1
    assert answer["states"] == {"done": 4, "failed": 4}
    assert answer["directory"] == "runs/toy"
    assert {group["params"]["name"] for group in answer["groups"]} == {"ok", "crash"}
    (best,) = [g for g in answer["groups"] if g["params"] == {"name": "ok", "lr": 0.2}]
    assert best["metrics"]["score"]["mean"] == pytest.approx((0.7 + 0.71) / 2)
    assert len(best["trials"]) == 2
    again = run("--report", "runs/toy", "--json")
    assert json.loads(again.stdout) == answer
    assert json.loads(run("--report", toy, "--json").stdout) == answer


def test_tables_read_at_80_columns_and_name_what_failed(toy: Path) -> None:
    result = run(toy, code=1)
    assert "Does the fake mind" in result.stdout
    assert "0.7050 ± 0.0071" in result.stdout
    assert "4 of 8 trials done, 4 failed" in result.stdout
    assert "error: it broke" in result.stdout
    assert "8/8" in result.stderr or "4/8 done, 0 running, 4 failed" in result.stderr
    each = run("--report", "runs/toy", "--each", "--where", "state=done", "--sort", "-score")
    rows = [line.split() for line in each.stdout.splitlines() if " done " in line and "ok" in line]
    assert [row[-3] for row in rows] == ["0.71", "0.7", "0.61", "0.6"]


def test_one_trial_is_shown_with_the_command_that_reproduces_it(toy: Path) -> None:
    trial = json.loads(run(toy, "--json", code=1).stdout)["trials"][0]
    shown = run("--report", "runs/toy", "--show", trial["id"][:5]).stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("run:")]
    printed = line.removeprefix("run:").strip()
    assert trial["command"] in printed
    typed = subprocess.run(printed, shell=True, cwd="/", capture_output=True, check=True,
                           env={**os.environ, "OMP_NUM_THREADS": "64"})  # fmt: skip
    place = Path("runs/toy/trials") / trial["id"]
    assert json.loads(typed.stdout) == json.loads((place / "result.json").read_text())
    again = subprocess.run(shlex.split(trial["command"]), capture_output=True, check=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert json.loads(again.stdout)["result"]["score"] == trial["metrics"]["score"]
    assert "no trial begins" in run("--report", "runs/toy", "--show", "zz", code=2).stderr


def test_a_dry_run_lists_the_commands_and_runs_none(toy: Path) -> None:
    answer = json.loads(run(toy, "--dry-run", "--json").stdout)
    assert answer["to_run"] == 8 and not Path("runs").exists()
    words = answer["trials"][0]["command"].split()
    assert words[-10:] == [
        "train-shapes", "--lr", "0.1", "--seed", "0", "--set", "encoder.depth=2",
        "--set", "name=ok", "--json",
    ]  # fmt: skip
    assert "8 trials, 8 to run" in run(toy, "--dry-run").stdout
    run(toy, code=1)
    assert "8 trials, 0 to run" in run(toy, "--dry-run").stdout
    assert "8 trials, 4 to run" in run(toy, "--dry-run", "--retry-failed").stdout


def test_files_of_a_report(toy: Path) -> None:
    run(toy, "--csv", "a.csv", "--parquet", "a.parquet", "--plot", "a.png", code=1)
    with Path("a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and {row["state"] for row in rows} == {"done", "failed"}
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert Path("a.parquet").read_bytes().startswith(b"PAR1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either"),
        (["toy.yaml", "--report", "runs"], "expected either"),
        (["--report", "."], "is not a sweep directory"),
        (["--report", "toy.yaml"], "holds no trials"),
        (["."], "--report ."),
        (["none.yaml"], "cannot read none.yaml"),
        (["toy.yaml", "--plot", "a.gif"], "cannot draw"),
        (["toy.yaml", "--plot", "a.png", "--plot-kind", "pie"], "--plot-kind pie"),
        (["toy.yaml", "--csv", "no/a.csv"], "the folder is missing"),
        (["--report", "runs", "--jobs", "2"], "--jobs: has no effect (--report runs no trials"),
        (["--report", "runs", "--retry-failed"], "--retry-failed: has no effect"),
        (["toy.yaml", "--dry-run", "--sort", "lr"], "--sort: has no effect (--dry-run"),
        (["toy.yaml", "--storage", "sqlite:///a.db"], "--storage: is for a search"),
        (["toy.yaml", "--metric", "scroe"], "--metric scroe: unknown"),
        (["toy.yaml", "--plot-kind", "bars"], "--plot-kind: has no effect (--plot is missing"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(toy: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments, code=2)
    assert message in result.stderr


def test_a_value_that_the_command_refuses_is_told_before_anything_runs(toy: Path) -> None:
    toy.write_text("command: train-shapes\ngrid: {lr: [0.1, fast]}")
    result = run(toy, code=2)
    assert "--lr fast" in result.stderr and "for '--lr'" in result.stderr
    toy.write_text("command: train-shapes\nbase: {norm: ''}")
    assert "`vitcli train-shapes --norm '' --json`" in run(toy, code=2).stderr
    assert not Path("runs").exists()


def test_ctrl_c_is_130_and_what_was_done_stays_done(toy: Path) -> None:
    toy.write_text("command: train-shapes\ngrid: {name: [ok, hang]}\nmetrics: [result.score]")
    command = [sys.executable, "-m", "vitcli", "sweep", str(toy)]
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 300
    while not (toy.parent / "log").exists() or (toy.parent / "log").read_text().count("start") < 2:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130
    assert process.stderr and "Traceback" not in process.stderr.read()
    states = json.loads(run("--report", "runs/toy", "--json").stdout)["states"]
    assert states == {"done": 1, "interrupted": 1}


def test_failures_are_told_where_there_is_nothing_to_draw(toy: Path) -> None:
    toy.write_text("command: train-shapes\ngrid: {name: [crash]}\nmetrics: [result.score]")
    result = run(toy, "--plot", "a.png", code=1)
    assert "error: it broke" in result.stdout and "no trial has finished yet" in result.stderr


def test_a_sweep_that_could_not_run_everything_is_no_success(toy: Path) -> None:
    toy.write_text("command: train-shapes\n")
    (trial,) = json.loads(run(toy, "--dry-run", "--json").stdout)["trials"]
    lock = TrialDir(Path("runs/toy/trials") / trial["id"]).try_lock()
    assert lock is not None
    assert "1 trial left" in run(toy, code=1).stderr
    lock.close()
    run(toy)


def test_a_storage_given_once_is_known_to_the_report(toy: Path) -> None:
    """What another machine did is in the storage alone."""
    toy.write_text(
        "command: train-shapes\nsearch: {trials: 2, metric: result.score, direction: maximize, "
        "space: {lr: {low: 0.1, high: 0.2}}}"
    )
    url = "sqlite:///shared.db"
    run(toy, "--storage", url, "--out", "one")
    run(toy, "--storage", url, "--out", "two")
    for place in ("one", "two"):
        assert json.loads(run("--report", place, "--json").stdout)["states"] == {"done": 2}


def test_commands_are_known_by_their_own_parsers() -> None:
    commands = known_commands()
    assert {"encode", "train-shapes", "profile"} <= commands.keys()
    assert "sweep" not in commands
    shapes = commands["train-shapes"]
    assert {"norm", "lr", "seed", "out", "resume", "lora", "image_size"} <= shapes.options.keys()
    assert shapes.options["resume"].is_flag and shapes.options["lora"].multiple
    assert {"encoder.depth", "data.train_size", "train.weight_decay"} <= shapes.keys
    assert "train.lr" not in commands["encode"].keys
    assert commands["encode"].arguments({"images": ["a.png"]})[-1] == "a.png"


@pytest.mark.parametrize(("option", "key"), SHORTHANDS.items())
def test_a_shorthand_stands_for_its_key(option: str, key: str) -> None:
    values = {"norm": "post", "position": "none", "pool": "mean", "image_size": "48", "lr": "0.5",
              "init": "trunc_normal", "difficulty": "0.5", "dtype": "bfloat16",
              "pos_resize": "bilinear_antialias", "fit": "whole"}  # fmt: skip
    value = values.get(option, "3")
    flag = "--" + option.replace("_", "-")
    more = ["--lora", "2:1"] if "lora" in option else []
    command = "encode" if option == "fit" else "train-shapes"  # which draws its own images
    plain, short, long = (
        runner.invoke(app, [command, "--print-config", *more, *words]).stdout
        for words in ([], [flag, value], ["--set", f"{key}={value}"])
    )
    assert plain != short == long != ""


def test_an_axis_is_not_overruled_by_its_own_key(toy: Path) -> None:
    toy.write_text(
        "command: train-shapes\nbase: {encoder.norm_placement: pre}\ngrid: {norm: [pre, post]}"
    )
    assert "grid.norm: is also encoder.norm_placement in base" in run(toy, code=2).stderr


def test_importing_the_command_line_imports_no_optuna_or_torch() -> None:
    code = (
        "import sys, vitcli.cli; "
        "sys.exit(any(m in sys.modules for m in ('optuna', 'torch', 'matplotlib')))"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == 0


def test_a_report_says_what_differs_and_how_many_seeds_would_settle(toy: Path) -> None:
    """The fake's score is 1 - |lr - 0.5| + seed / 100; one of the six is raised by 0.004."""
    toy.write_text(
        "command: train-shapes\ngrid: {lr: [0.1, 0.2]}\nrepeat: 3\n"
        "metrics: {accuracy: result.score}\n"
    )
    run(toy)
    for place in Path("runs/toy/trials").iterdir():
        result = json.loads((place / "result.json").read_text())
        result["result"]["score"] += 0.004 * (round(result["result"]["score"], 2) == 0.71)
        (place / "result.json").write_text(json.dumps(result))
    shown = run("--report", "runs/toy", "--power", "0.02").stdout
    assert "lr 0.2 is better than lr 0.1 by 0.1" in shown and "3 pairs" in shown
    answer = json.loads(run("--report", "runs/toy", "--power", "0.02", "--json").stdout)
    (pair,) = answer["comparisons"]
    assert pair["difference"] == pytest.approx(-0.1 - 0.004 / 3) and answer["power_for"] == 0.02
    csv_rows = run("--report", "runs/toy", "--format", "csv").stdout.splitlines()
    assert len(csv_rows) == 7
