from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.train.runs import command, run
from vitcli.commands.train import snapshots
from vitcli.commands.train.snapshots import RunDirectory
from vitcli.errors import VitcliError

RICH: dict[str, Any] = {
    "encoder__dropout": 0.1,
    "encoder__drop_path": 0.2,
    "train__mixup": 0.8,
    "train__cutmix": 1.0,
    "train__ema": 0.9,
    "train__clip_grad": 1.0,
    "train__epochs": 2,
}
"""Everything that draws random numbers or keeps state, over 16 steps."""


class Killed(BaseException):
    """Stands for the end of the process."""


def killed_at(step: int, out: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
    """A run whose process ends while it logs `step`, half a line written."""
    log = RunDirectory.log

    def dying(self: RunDirectory, entry: dict[str, Any]) -> None:
        if entry["step"] == step and "loss" in entry:
            with self.metrics_file.open("a") as file:
                file.write('{"step": ')
            raise Killed
        log(self, entry)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunDirectory, "log", dying)
        run(out, **keys)


def same_files(one: Path, other: Path) -> None:
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    names = sorted(str(f.relative_to(one)) for f in one.rglob("*.safetensors"))
    assert names == sorted(str(f.relative_to(other)) for f in other.rglob("*.safetensors"))
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("step", [1, 3, 4, 9, 16])
def test_a_killed_run_ends_like_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    whole = run(tmp_path / "whole", **RICH)
    killed_at(step, tmp_path / "killed", monkeypatch, **RICH)
    resumed = run(tmp_path / "killed", resume=True, **RICH)
    same_files(tmp_path / "whole", tmp_path / "killed")
    assert resumed.history == whole.history
    assert resumed.result.val_loss == whole.result.val_loss


def test_killed_while_the_last_model_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole", **RICH)
    export, calls = RunDirectory._export, []

    def dying(self: RunDirectory, name: str, tensors: Any) -> None:
        calls.append(name)
        if len(calls) == 6:  # steps 3, 6, 9, 12, 15 and the last, 16
            raise Killed
        export(self, name, tensors)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunDirectory, "_export", dying)
        run(tmp_path / "killed", **RICH)
    run(tmp_path / "killed", resume=True, **RICH)
    same_files(tmp_path / "whole", tmp_path / "killed")


def test_kill_minus_nine_of_a_process(tmp_path: Path) -> None:
    """A real process, killed a moment after its first snapshot shows."""
    keys = {"data__train_size": 1600, "train__snapshot_every": 20, "train__ema": 0.9}
    run(tmp_path / "whole", **keys)
    words = command("--out", str(tmp_path / "killed"), **keys)
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    )
    until = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("snapshots/step-*")) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()
    assert 20 <= len(lines) < 201
    run(tmp_path / "killed", resume=True, **keys)
    same_files(tmp_path / "whole", tmp_path / "killed")


def test_resuming_needs_no_option_but_the_directory(tmp_path: Path) -> None:
    """Here the recipe's defaults differ from the run's config, which counts."""
    from vitcli.commands.train import analysis as train
    from vitcli.config.training import TrainRequest

    first = run(tmp_path, train__lr=0.01)
    asked = TrainRequest(device="cpu", out=tmp_path, resume=True)
    config = train.shapes_config(asked)
    assert config.train.lr == 0.01 and config.encoder.hidden == 16
    again = train.train_shapes(asked, config)
    assert again.history == first.history
    assert again.result.val_loss == first.result.val_loss


def test_another_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(VitcliError) as caught:
        run(tmp_path, resume=True, train__lr=0.5, encoder__norm_placement="post")
    assert "train.lr is 0.001 in the run, 0.5 now" in caught.value.message
    assert "encoder.norm_placement is pre in the run, post now" in caught.value.message
    assert "hidden" not in caught.value.message
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(VitcliError, match="there is a run in this directory") as caught:
        run(tmp_path)
    assert "--resume" in caught.value.hint


def test_a_full_disk_leaves_the_last_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole")
    save, room = snapshots.save_file, [3]

    def full(tensors: Any, path: Path, metadata: Any = None) -> None:
        room[0] -= 1
        if room[0] < 0:
            Path(path).write_bytes(b"half")
            raise snapshots.SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, path, metadata)

    with monkeypatch.context() as patch, pytest.raises(VitcliError) as caught:
        patch.setattr(snapshots, "save_file", full)
        run(tmp_path / "full")
    assert caught.value.exit_code == 1
    assert "No space left" in caught.value.message
    assert "snapshot of step 3 is whole" in caught.value.message
    assert not list((tmp_path / "full").rglob("*.part"))
    assert run(tmp_path / "full", resume=True).history == whole.history
    same_files(tmp_path / "whole", tmp_path / "full")


def test_snapshots_are_weights_only_and_the_newest_two_stay(tmp_path: Path) -> None:
    run(tmp_path)
    folders = sorted(path.name for path in (tmp_path / "snapshots").iterdir())
    assert folders == ["step-000000006", "step-000000008"]
    state = torch.load(tmp_path / "snapshots" / folders[1] / "trainer.pt", weights_only=True)
    assert state["step"] == 8
    assert state["metrics_bytes"] == (tmp_path / "metrics.jsonl").stat().st_size
    weights = load_file(tmp_path / "snapshots" / folders[1] / "weights.safetensors")
    model = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weights[name], model[name]) for name in weights)


def test_metrics_have_a_line_a_step_and_one_a_validation(tmp_path: Path) -> None:
    result = run(tmp_path, train__epochs=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 17))
    assert [line["step"] for line in lines if "val_loss" in line] == [8, 16]
    assert lines[-1]["val_accuracy"] == result.result.val_accuracy
