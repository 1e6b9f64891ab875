"""What the trackers' own readers find in a run directory is what metrics.jsonl holds."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands.train.runs import run
from vitcli.commands.train.run import TAGS, TRACKERS
from vitcli.errors import VitcliError

Points = dict[str, list[tuple[int, float]]]
"""(step, value) of each tag, in their order."""


def tensorboard(folder: Path) -> Points:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def mlflow(folder: Path) -> Points:
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(tracking_uri=folder.as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "vitcli"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["encoder.hidden"] == "16" and found.info.status == "FINISHED"
    return {
        tag: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, tag)]
        for tag in found.data.metrics
    }


def wandb(folder: Path) -> Points:
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("offline-run-*/*.wandb")
    points: Points = {}
    for body in records(file.read_bytes()):
        record = proto.Record.FromString(body)
        if record.WhichOneof("record_type") == "history":
            items = [(i.key or ".".join(i.nested_key), i.value_json) for i in record.history.item]
            row = {key: json.loads(value) for key, value in items}
            for tag in row.keys() & set(TAGS.values()):
                points.setdefault(tag, []).append((row["_step"], row[tag]))
    return points


def records(data: bytes) -> Iterator[bytes]:
    """Those of a log in LevelDB's format: blocks of 32 KiB, records that may be cut in pieces."""
    at, whole = 7, b""  # the file's own header comes first
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


READERS: dict[str, Callable[[Path], Points]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}


def test_every_tracker_has_a_reader_here() -> None:
    assert set(READERS) == set(TRACKERS)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_holds_what_the_metrics_hold_and_once_after_a_resume(
    name: str, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    keys = {f"train__{name}": True, "train__schedule": "constant"}
    run(place, **keys)
    run(place, resume=True, train__epochs=2, **keys)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    expected = {
        tag: [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        for key, tag in TAGS.items()
    }
    found = READERS[name](place / name)
    assert found.keys() == {tag for tag, points in expected.items() if points}
    for tag, points in found.items():
        assert [step for step, _ in points] == [step for step, _ in expected[tag]]
        # TensorBoard keeps 32 bits.
        assert [v for _, v in points] == pytest.approx([v for _, v in expected[tag]], rel=1e-6)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.entities", None)
    with pytest.raises(VitcliError, match=rf"train\.{name}: ") as error:
        run(tmp_path, **{f"train__{name}": True})
    assert f"[{name}]" in error.value.hint


def test_a_link_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path / "mine")
    with pytest.raises(VitcliError, match="is a link"):
        run(tmp_path / "run", train__tensorboard=True)
    assert (tmp_path / "mine" / "file").exists()


def test_a_tracker_needs_a_run_directory() -> None:
    with pytest.raises(VitcliError, match=r"train.mlflow writes into the run directory"):
        run(train__mlflow=True)
