"""Reports against the same numbers computed here from the trials' files."""

from __future__ import annotations

import csv
import functools
import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.commands.sweep.conftest import Sweeper, kill, running
from vitcli.commands.sweep.report import never_found, report, spread
from vitcli.commands.sweep.trials import Results
from vitcli.commands.sweep.view import write_csv, write_parquet
from vitcli.config.yaml import lookup
from vitcli.errors import VitcliError

TEXT = """
command: train-shapes
grid: {norm: [ok], lr: [0.1, 0.3, 0.2]}
repeat: 3
metrics: {score: result.score, threads: result.threads, loss: history.-1.loss}
curve: {x: history.*.step, y: history.*.loss}
"""


@pytest.fixture
def done(sweeper: Sweeper) -> Sweeper:
    sweeper.run(TEXT, jobs=2)
    return sweeper


def test_groups_are_the_mean_and_spread_of_the_files(done: Sweeper) -> None:
    scores: dict[float, list[float]] = {}
    for place in Results(done.out).trials():
        result = json.loads(place.result_file.read_text())
        config = place.config()
        assert config
        scores.setdefault(config.params["lr"], []).append(result["result"]["score"])
    groups = done.report(TEXT).groups
    assert len(groups) == 3
    for group in groups:
        values = scores[group.params["lr"]]
        found = group.metrics["score"]
        assert found.n == 3
        assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
        assert found.std == pytest.approx(statistics.stdev(values), rel=1e-12)
        assert (found.min, found.max) == (min(values), max(values))
        assert sum(group.words["threads"].values()) == 3
        assert group.metrics["loss"].mean == pytest.approx(1 / 3)


def test_what_is_no_number_has_no_place_in_a_mean(sweeper: Sweeper) -> None:
    text = "command: train-shapes\ngrid: {norm: [nan, ok]}\nrepeat: 2\nmetrics: [result.score]"
    sweeper.run(text)
    found = sweeper.report(text, sort="score")
    assert [t.metrics["score"] for t in found.trials] == [0.5, 0.51, None, None]
    assert [len(g.metrics) for g in found.groups] == [1, 0]


def test_a_report_needs_no_right_to_write(done: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(path)
        return real(path, flags, *rest, **more)

    place = next(Results(done.out).trials())
    status = json.loads((place.path / "status").read_text())
    (place.path / "status").write_text(json.dumps({**status, "state": "running"}))
    sweep = done.load(TEXT)
    monkeypatch.setattr(os, "open", read_only)
    assert dict(report(sweep, Results(done.out)).states) == {"done": 8, "interrupted": 1}


def test_a_heading_names_its_key(sweeper: Sweeper) -> None:
    text = "command: train-shapes\ngrid: {encoder.depth: [1, 2]}\nmetrics: [result.score]"
    sweeper.run(text)
    found = sweeper.report(text, where=("depth=2",), sort="depth", group=("depth",))
    assert found.grouped_by == ("encoder.depth",)
    assert [t.params for t in found.trials] == [{"encoder.depth": 2}]


def test_a_spread_needs_two_numbers() -> None:
    assert spread([1.0, None, "x", True]) == spread([1.0])
    assert spread([1.0]).std is None  # type: ignore[union-attr]
    assert spread([]) is None


def test_sorted_filtered_and_grouped(done: Sweeper) -> None:
    trials = done.report(TEXT, sort="-score").trials
    scores = [t.metrics["score"] for t in trials]
    assert scores == sorted(scores, reverse=True)
    some = done.report(TEXT, where=("lr>=0.2", "seed!=0"))
    assert {(t.params["lr"], t.params["seed"]) for t in some.trials} == {
        (0.2, 1), (0.2, 2), (0.3, 1), (0.3, 2),
    }  # fmt: skip
    assert dict(some.states) == {"done": 9}
    by_seed = done.report(TEXT, group=("seed",)).groups
    assert [g.params for g in by_seed] == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert {g.metrics["score"].n for g in by_seed} == {3}
    best_first = done.report(TEXT, sort="-score").groups
    assert [g.params["lr"] for g in best_first] == [0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    "view", [{"sort": "scroe"}, {"where": ("scroe>1",)}, {"group": ("scroe",)}]
)
def test_an_unknown_name_is_told_with_the_nearest(done: Sweeper, view: dict[str, object]) -> None:
    with pytest.raises(VitcliError) as caught:
        done.report(TEXT, **view)
    assert "score" in caught.value.hint


def test_it_works_while_the_sweep_runs(sweeper: Sweeper) -> None:
    text = "command: train-shapes\ngrid: {norm: [hang, ok]}\nmetrics: [result.score]"
    pid = sweeper.fork(lambda: sweeper.run(text))
    running(sweeper)
    assert dict(sweeper.report(text).states) == {"running": 1, "pending": 1}
    kill(pid)


def test_every_row_leads_back_to_its_command(done: Sweeper) -> None:
    for trial in done.report(TEXT).trials:
        assert f"--lr {trial.params['lr']} --norm ok --seed {trial.params['seed']}" in trial.command
        assert Path(trial.directory).is_dir() and trial.cwd == str(Path.cwd())


def test_tables_on_disk_hold_what_the_report_holds(done: Sweeper) -> None:
    from pyarrow import parquet

    found = done.report(TEXT)
    write_csv(found, done.folder / "a.csv")
    write_parquet(found, done.folder / "a.parquet")
    with (done.folder / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = parquet.read_table(done.folder / "a.parquet")
    assert len(rows) == table.num_rows == 9
    assert [float(row["score"]) for row in rows] == [t.metrics["score"] for t in found.trials]
    assert table["score"].to_pylist() == [t.metrics["score"] for t in found.trials]
    assert str(table.schema.field("lr").type) == "double"
    assert str(table.schema.field("seed").type) == "int64"
    assert [row["command"] for row in rows] == [t.command for t in found.trials]


def test_curves_come_from_lists_of_the_result(done: Sweeper) -> None:
    curve = done.report(TEXT).trials[0].curve
    assert curve
    assert curve.x == (0, 1, 2) and curve.y == pytest.approx((1, 1 / 2, 1 / 3))


def test_a_metric_that_is_nowhere_is_noticed_and_can_be_corrected(done: Sweeper) -> None:
    wrong = TEXT.replace("result.score", "result.scroe")
    assert never_found(done.report(wrong)) == ["score"]
    assert never_found(done.report(TEXT)) == []


def test_dotted_paths() -> None:
    value = {"runs": [{"wall": {"median": 2}}, {"wall": {}}], "a": {"0": "zero"}}
    assert lookup(value, "runs.0.wall.median") == 2
    assert lookup(value, "runs.-1.wall.median") is None
    assert lookup(value, "runs.7.wall") is None
    assert lookup(value, "runs.*.wall.median") == [2, None]
    assert lookup(value, "runs.*") == value["runs"]
    assert lookup(value, "a.0") == "zero"
    assert lookup(value, "a.0.b") is None
    assert lookup(value, "nothing.*.x") == []
    parts = {"parts": [{"name": "FFN", "share": 0.6}, {"name": "norms", "share": 0.1}, 3]}
    assert lookup(parts, "parts.norms.share") == 0.1
    assert lookup(parts, "parts.softmax.share") is None


HOLES = """
command: train-shapes
grid: {lr: [0.2, 0.4], norm: [nan, ok, crash]}
repeat: 2
metrics: {score: result.score, loss: history.-1.loss}
"""


def test_groups_with_holes_come_last_unless_asked(sweeper: Sweeper) -> None:
    """The fake's `nan` gives no score with any seed, though its loss is a number."""
    sweeper.run(HOLES)
    for sort in ("-score", "loss", "-loss"):
        groups = sweeper.report(HOLES, sort=sort).groups
        assert [g.incomplete for g in groups] == [False, False, True, True, True, True]
    mixed = sweeper.report(HOLES, sort="loss", mix_incomplete=True).groups
    assert [g.params["norm"] for g in mixed][:4] == ["nan", "ok", "nan", "ok"]
    by_lr = sweeper.report(HOLES, group=("lr",)).groups
    assert [(g.diverged, dict(g.states)) for g in by_lr] == [(2, {"done": 4, "failed": 2})] * 2
    assert {g.metrics["score"].n for g in by_lr} == {2}


def test_random_draws_that_repeat_are_counted(sweeper: Sweeper) -> None:
    text = "command: train-shapes\nrandom: {trials: 12, space: {lr: [0.1, 0.2, 0.3]}}"
    sweeper.run(text)
    found = sweeper.report(text)
    assert (found.drawn, found.distinct, len(found.trials)) == (12, 3, 3)
    assert "3 distinct points of 12 drawn" in str(found)


def test_from_python(sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    import vitcli
    from vitcli.commands.sweep import analysis

    monkeypatch.chdir(sweeper.folder)
    fake = functools.partial(analysis.run, program=sweeper.program)
    monkeypatch.setattr(analysis, "run", fake)
    (sweeper.folder / "x.yaml").write_text(
        "command: train-shapes\ngrid: {lr: [0.1, 0.3]}\nrepeat: 2\nmetrics: [result.score]"
    )
    seen = []
    found = vitcli.sweep("x.yaml", jobs=2, sort="-score", on_event=seen.append)
    assert [g.params["lr"] for g in found.groups] == [0.3, 0.1]
    assert found.directory == "runs/x" and seen[-1].counts.done == 4
    again = vitcli.sweep("runs/x", where=["lr=0.1"])
    assert [t.params["lr"] for t in again.trials] == [0.1, 0.1]
    assert again.figure().axes and again.to_dict()["states"] == {"done": 4}
    with pytest.raises(vitcli.VitcliError, match="not a sweep directory"):
        vitcli.sweep(sweeper.folder)
