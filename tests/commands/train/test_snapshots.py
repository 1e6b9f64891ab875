from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.train.runs import command, run, shell
from vitcli.commands.train import snapshots
from vitcli.commands.train.data import ShapesSource
from vitcli.commands.train.loop import Trainer
from vitcli.commands.train.snapshots import RunDirectory
from vitcli.commands.train.start import Stopped
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with snapshots of steps 6 and 8."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run(out)
    return out


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


DYING = """
import os, signal
from vitcli.__main__ import main
from vitcli.commands.train.loop import Trainer

update = Trainer._update

def dying(self, batch):
    if self.step == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, batch)

Trainer._update = dying
main()
"""


def test_kill_minus_nine_of_a_process(tmp_path: Path) -> None:
    """A real process, killed between its first snapshot and its second."""
    keys = {"data__train_size": 1600, "train__snapshot_every": 20, "train__ema": 0.9}
    run(tmp_path / "whole", **keys)
    words = command("--out", str(tmp_path / "killed"), **keys)
    done = shell([sys.executable, "-c", DYING, *words[words.index("train-shapes") :]])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 30
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
    again = train.run_shapes(asked, config)
    assert again.history == first.history
    assert again.result.val_loss == first.result.val_loss


def test_another_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(VitcliError) as caught:
        run(tmp_path, resume=True, train__lr=0.5, encoder__norm_placement="post")
    assert "train.lr is 0.0025 in the run, 0.5 now" in caught.value.message
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


def damaged(out: Path, change: Any) -> None:
    """A finished run whose last snapshot's trainer.pt was changed."""
    file = out / "snapshots" / "step-000000008" / "trainer.pt"
    state = torch.load(file, weights_only=True)
    change(state)
    torch.save(state, file)


def moments(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["optimiser"]["state"][0]
    return found


CRAFTED = {
    "a short moment": lambda s: moments(s).update(exp_avg=torch.zeros(1)),
    "a moment of integers": lambda s: moments(s).update(
        exp_avg=torch.zeros_like(moments(s)["exp_avg"], dtype=torch.int64)
    ),
    "a sparse moment": lambda s: moments(s).update(exp_avg_sq=moments(s)["exp_avg_sq"].to_sparse()),
    "no tensor": lambda s: moments(s).update(exp_avg="x"),
    "a long step": lambda s: moments(s).update(step=torch.zeros(5)),
    "a step of NaN": lambda s: moments(s).update(step=torch.tensor(float("nan"))),
    "a moment too many": lambda s: moments(s).update(max_exp_avg_sq=torch.zeros(3)),
    "a moment too few": lambda s: moments(s).pop("exp_avg"),
    "a parameter too many": lambda s: s["optimiser"]["state"].update({999: moments(s)}),
    "a parameter by name": lambda s: s["optimiser"]["state"].update(x=moments(s)),
    "a list of states": lambda s: s["optimiser"].update(state=[1, 2]),
    "no states": lambda s: s["optimiser"].update(state={}),
    "no optimizer": lambda s: s.pop("optimiser"),
    "another step": lambda s: s.update(step=7),
    "a step of True": lambda s: s.update(step=True),
    "a negative length": lambda s: s.update(metrics_bytes=-1),
    "a huge length": lambda s: s.update(metrics_bytes=10**400),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_snapshot_never_reaches_the_optimizer(
    tmp_path: Path, kind: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    damaged(out, CRAFTED[kind])

    def reached(*_: Any) -> None:
        raise AssertionError("the optimizer was given a crafted state")

    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", reached)
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(VitcliError, match="step-000000008") as caught:
        run(out, resume=True)
    assert caught.value.exit_code == 1 and "remove this snapshot" in caught.value.hint
    assert (out / "metrics.jsonl").read_bytes() == before


def test_what_the_groups_say_comes_from_the_config(tmp_path: Path, finished: Path) -> None:
    """A file cannot choose betas, rates or kernels: the run goes on as if they were untouched."""
    out = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(out / "snapshots" / "step-000000008")
    file = out / "snapshots" / "step-000000006" / "trainer.pt"
    state = torch.load(file, weights_only=True)
    for group in state["optimiser"]["param_groups"]:
        group.update(betas=(0.0, 0.0), eps=1e3, amsgrad=True, fused=False, weight_decay=9.0)
    torch.save(state, file)
    run(out, resume=True)
    same_files(finished, out)


@pytest.mark.parametrize("damage", ["cut", "a flipped bit", "compressed", "a pickle", "empty"])
def test_a_damaged_snapshot_is_an_error(tmp_path: Path, finished: Path, damage: str) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    file = out / "snapshots" / "step-000000008" / "trainer.pt"
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "a flipped bit":
        with zipfile.ZipFile(file) as archive:
            member = next(m for m in archive.infolist() if m.filename.endswith("/data/3"))
        sizes = struct.unpack_from("<HH", whole, member.header_offset + 26)
        place = member.header_offset + 30 + sum(sizes) + member.file_size // 2
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
    elif damage == "compressed":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"0" * 100_000)
    elif damage == "a pickle":
        file.write_bytes(pickle.dumps({"step": 8}))
    else:
        file.write_bytes(b"")
    with pytest.raises(VitcliError, match="cannot be read"):
        run(out, resume=True)


def test_a_flipped_bit_in_the_weights_is_damage(tmp_path: Path, finished: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    file = out / "snapshots" / "step-000000008" / "weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
    with pytest.raises(VitcliError, match=r"weights\.safetensors is damaged"):
        run(out, resume=True)


def test_mutated_files_of_a_run_are_read_or_refused(tmp_path: Path, finished: Path) -> None:
    """Whatever the bytes are: no other exception, and no signal."""
    draw = random.Random(0)
    names = ["trainer.pt", "weights.safetensors", "metrics.jsonl", "config.yaml"]
    refused = 0
    for number in range(60):
        out = shutil.copytree(finished, tmp_path / str(number))
        (file,) = (f for f in out.rglob(names[number % 4]) if "step-000000006" not in f.parts)
        content = bytearray(file.read_bytes())
        for _ in range(draw.choice([1, 3, 20])):
            place = draw.randrange(len(content))
            cut = draw.choice([0, 1, 40])
            content[place : place + cut] = draw.randbytes(draw.choice([0, 1, 9]))
        file.write_bytes(content)
        try:
            run(out, resume=True)
        except VitcliError:
            refused += 1
    assert refused > 40


def test_metrics_are_never_reached_through_a_link(tmp_path: Path, finished: Path) -> None:
    out, precious = shutil.copytree(finished, tmp_path / "run"), tmp_path / "precious"
    precious.write_text("not yours")
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").symlink_to(precious)
    with pytest.raises(VitcliError, match="is a link"):
        run(out, resume=True)
    new = tmp_path / "new"
    new.mkdir()
    (new / "metrics.jsonl").symlink_to(precious)
    with pytest.raises(VitcliError, match="is a link"):
        run(new)
    assert precious.read_text() == "not yours"


@pytest.mark.parametrize(
    "text", ["", "diary\n" * 1000, '{"step": 1e400}\n' * 200, "[" * 9000, '{"step": 1}' * 2000]
)
def test_metrics_of_something_else_are_left_as_they_are(
    tmp_path: Path, finished: Path, text: str
) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    (out / "metrics.jsonl").write_text(text)
    with pytest.raises(VitcliError, match="is not what the run wrote"):
        run(out, resume=True)
    assert (out / "metrics.jsonl").read_text() == text


def test_a_new_run_does_not_empty_a_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("of another tool\n")
    with pytest.raises(VitcliError, match=r"metrics\.jsonl"):
        run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "of another tool\n"


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    with RunDirectory(tmp_path).held():
        for resume in (False, True):
            with pytest.raises(VitcliError, match="another process is training"):
                run(tmp_path, resume=resume)
    run(tmp_path)


def same_metrics(one: Path, other: Path) -> None:
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_snapshot_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    keys = {**RICH, "train__snapshot_every": 100}
    run(tmp_path / "whole", **keys)
    log = RunDirectory.log

    def signaled(self: RunDirectory, entry: dict[str, Any]) -> None:
        log(self, entry)
        if entry["step"] == 5:
            os.kill(os.getpid(), number)

    def end(number: int, frame: Any) -> None:
        raise Killed

    before = signal.signal(number, end)
    try:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RunDirectory, "log", signaled)
            run(tmp_path / "ended", **keys)
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
    (only,) = (tmp_path / "ended" / "snapshots").iterdir()
    assert only.name == "step-000000005"
    run(tmp_path / "ended", resume=True, **keys)
    same_metrics(tmp_path / "whole", tmp_path / "ended")


def test_a_run_stopped_in_its_validation_validates_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**RICH, "train__snapshot_every": 100}
    run(tmp_path / "whole", **keys)

    def stopping(self: Trainer) -> None:
        if self.step == 8:
            raise Stopped

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_stop_or_save", stopping)
        run(tmp_path / "ended", **keys)
    run(tmp_path / "ended", resume=True, **keys)
    same_metrics(tmp_path / "whole", tmp_path / "ended")


@pytest.mark.parametrize(("call", "step"), [(6, 5), (9, 8)])
def test_an_error_in_the_data_leaves_a_snapshot(
    call: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, and in the validation at the end of the epoch of eight steps."""
    keys = {**RICH, "train__snapshot_every": 100}
    run(tmp_path / "whole", **keys)
    batch = ShapesSource._batch

    def broken(self: ShapesSource, indices: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise OSError("the disk is gone")
        return batch(self, indices)

    calls: list[int] = []
    with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is gone"):
        patch.setattr(ShapesSource, "_batch", broken)
        run(tmp_path / "ended", **keys)
    (snapshot,) = (tmp_path / "ended" / "snapshots").iterdir()
    assert snapshot.name == f"step-{step:09d}"
    run(tmp_path / "ended", resume=True, **keys)
    same_metrics(tmp_path / "whole", tmp_path / "ended")


def test_a_snapshot_is_due_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of 20 s per look: at a limit of 45 s no three steps pass without a snapshot."""
    now = itertools.count(0.0, 20.0)
    saved: list[int] = []
    save = RunDirectory.save

    def noted(self: RunDirectory, step: int, *rest: Any) -> None:
        saved.append(step)
        save(self, step, *rest)

    monkeypatch.setattr("vitcli.commands.train.loop.time.monotonic", lambda: next(now))
    monkeypatch.setattr(RunDirectory, "save", noted)
    run(tmp_path, train__snapshot_every=100, train__snapshot_seconds=45.0)
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert saved[-1] == 8 and 0 < max(gaps) <= 3 and len(saved) > 2


def test_metrics_have_a_line_a_step_and_one_a_validation(tmp_path: Path) -> None:
    result = run(tmp_path, train__epochs=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 17))
    assert [line["step"] for line in lines if "val_loss" in line] == [8, 16]
    assert lines[-1]["val_accuracy"] == result.result.val_accuracy
