"""Searches: Optuna draws the points, the sweep runs them."""

from __future__ import annotations

import signal
import statistics
from typing import Any

import pytest

from tests.commands.sweep.conftest import COMMAND, Sweeper, dying_when, until, wait
from vitcli.commands.sweep import storage
from vitcli.commands.sweep.queue import Search
from vitcli.commands.sweep.result import Counts
from vitcli.commands.sweep.runner import Runner
from vitcli.commands.sweep.storage import cut_torn_line
from vitcli.commands.sweep.trials import Results
from vitcli.commands.sweep.view import tables
from vitcli.errors import VitcliError

SEARCH = """
command: train-shapes
base: {{norm: {norm}}}
search:
  trials: {trials}
  metric: result.score
  direction: maximize
  seed: 1
  space: {{lr: {{low: 0.0, high: 1.0}}}}
{more}
"""


def search(trials: int = 8, norm: str = "ok", more: str = "") -> str:
    return SEARCH.format(trials=trials, norm=norm, more=more)


def test_a_search_finds_the_best_of_a_smooth_hill(sweeper: Sweeper) -> None:
    outcome = sweeper.run(search(25))
    assert outcome.counts.done == 25
    found = sweeper.report(search(25))
    scores = [t.metrics["score"] for t in found.trials]
    assert len({t.params["lr"] for t in found.trials}) == 25
    # The hill is 1 - |lr - 0.5|: 25 blind draws average 0.75.
    assert statistics.fmean(scores[-8:]) > 0.85
    assert found.objective == "maximize score"


def test_more_trials_continue_a_search(sweeper: Sweeper) -> None:
    sweeper.run(search(3))
    first = {t.id for t in sweeper.report(search(3)).trials}
    assert sweeper.run(search(5)).ran == 2
    assert sweeper.run(search(5)).ran == 0
    assert first < {t.id for t in sweeper.report(search(5)).trials}


def test_machines_that_draw_at_once_draw_different_points(sweeper: Sweeper) -> None:
    """With a seed, too: neither has seen the other's point when it draws its own."""
    url = f"sqlite:///{sweeper.folder}/shared.db"
    sweep = sweeper.load(search(4, more=f"storage: {url}"))
    drawn = []
    for name in ("one", "two"):
        results = Results(sweeper.folder / name)
        results.create(sweep.name, sweep.source)
        study = Search(sweep, results)
        study._entries = list  # type: ignore[method-assign]
        claim = study.claim()
        assert claim
        drawn.append(claim.trials[0][0].params["lr"])
    assert drawn[0] != drawn[1]


def test_every_point_is_run_with_every_seed(sweeper: Sweeper) -> None:
    text = search(3, more="repeat: 2")
    assert sweeper.run(text).ran == 6
    groups = sweeper.report(text).groups
    assert len(groups) == 3
    for group in groups:
        # The fake adds seed / 100 to its score.
        low, high = group.metrics["score"].min, group.metrics["score"].max
        assert high - low == pytest.approx(0.01)


def test_the_best_point_is_best_in_the_mean_of_its_seeds(sweeper: Sweeper) -> None:
    text = search(4, more="repeat: 2")
    sweeper.run(text)
    found = sweeper.report(text)
    scores = {t.id: t.metrics["score"] for t in found.trials}
    means = {g.trials: statistics.fmean(scores[id] for id in g.trials) for g in found.groups}
    shown = [part for part in tables(found) if isinstance(part, str)]
    (line,) = [part for part in shown if part.startswith("best")]
    best = max(means, key=lambda ids: means[ids])
    assert set(line.split(": ")[1].split()) == {id[:6] for id in best}


def test_a_killed_search_is_completed_within_its_budget(sweeper: Sweeper) -> None:
    text = search(6, norm="slow", more="jobs: 2")
    dying = dying_when(lambda event: event.counts.done >= 2)
    assert wait(sweeper.fork(lambda: sweeper.run(text, on_event=dying))) == -signal.SIGKILL
    outcome = sweeper.run(text)
    assert outcome.counts.done == 6
    assert len(sweeper.counts("start")) == 6, "the points that were cut off are run, not replaced"
    assert set(sweeper.counts("end").values()) == {1}


def test_two_processes_share_one_search(sweeper: Sweeper) -> None:
    text = search(10)
    pids = [sweeper.fork(lambda: sweeper.run(text)) for _ in range(2)]
    assert [wait(pid) for pid in pids] == [0, 0]
    assert len(sweeper.counts("end")) == 10
    assert dict(sweeper.report(text).states) == {"done": 10}


def test_trials_below_the_median_are_pruned(sweeper: Sweeper) -> None:
    """Every trial reports its final value at each step, so the poor ones are known at once."""
    text = """
command: train-shapes
base: {out: "{trial}/run", norm: prunable}
search:
  trials: 8
  metric: result.score
  direction: maximize
  seed: 3
  pruner: {value: val_accuracy, startup_trials: 3}
  space: {lr: {low: 0.0, high: 1.0}}
"""
    outcome = sweeper.run(text)
    assert outcome.counts.pruned >= 1
    assert outcome.counts.pruned + outcome.counts.done == 8
    states = {trial.params["lr"]: trial.state for trial in sweeper.report(text).trials}
    started = [words.split() for words in sweeper.counts("start")]  # one at a time, in this order
    rates = [float(words[words.index("--lr") + 1]) for words in started]
    assert len(rates) == 8
    done: list[float] = []
    for rate in rates:
        value = 1 - abs(rate - 0.5)
        poor = len(done) >= 3 and value < statistics.median(done)
        assert states[rate] == ("pruned" if poor else "done")
        done += [] if poor else [value]
    assert sweeper.run(text).ran == 0, "pruned trials are finished"
    assert len(sweeper.counts("end")) == outcome.counts.done


def test_a_result_without_the_metric_fails_and_says_so(sweeper: Sweeper) -> None:
    text = search(1).replace("result.score", "result.accuracy")
    assert sweeper.run(text).counts.failed == 1


def test_failed_points_of_a_search_can_be_retried(sweeper: Sweeper) -> None:
    text = search(2, norm="crash")
    assert sweeper.run(text).counts.failed == 2
    assert sweeper.run(text).ran == 0
    again = sweeper.run(text, retry_failed=True)
    assert (again.ran, again.counts.failed) == (2, 2)
    assert len(sweeper.report(text).trials) == 2, "the same points"


def test_the_half_line_of_a_killed_writer_does_not_spoil_the_journal(sweeper: Sweeper) -> None:
    sweeper.run(search(2))
    journal = sweeper.out / "study.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"worker')
    assert sweeper.run(search(3)).ran == 1
    assert sweeper.run(search(3)).ran == 0


@pytest.mark.parametrize(
    ("text", "left"),
    [(b"", b""), (b"a", b""), (b"a\n", b"a\n"), (b"a\nb", b"a\n"), (b"a\n" + b"b" * 9000, b"a\n")],
)
def test_a_torn_line_is_cut(sweeper: Sweeper, text: bytes, left: bytes) -> None:
    file = sweeper.folder / "journal"
    file.write_bytes(text)
    cut_torn_line(file)
    assert file.read_bytes() == left


def test_two_machines_share_a_database(sweeper: Sweeper) -> None:
    """Two directories stand for two machines: they share nothing but the storage."""
    text = search(4, "meet", f"storage: sqlite:///{sweeper.folder}/shared.db")
    other = sweeper.folder / "other"
    pids = [sweeper.fork(lambda out=out: sweeper.run(text, out=out)) for out in (None, other)]
    assert [wait(pid) for pid in pids] == [0, 0]
    for what in ("start", "end"):
        assert len(sweeper.counts(what)) == 4 and set(sweeper.counts(what).values()) == {1}
    found = sweeper.report(text)
    assert dict(found.states) == {"done": 4}
    assert 0 < sum(bool(trial.directory) for trial in found.trials) < 4, "each machine ran some"
    for trial in found.trials:
        assert trial.metrics["score"] == pytest.approx(1 - abs(trial.params["lr"] - 0.5))
        assert f"--lr {trial.params['lr']}" in trial.command


def test_the_trials_of_a_machine_that_dies_are_taken_over(
    sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "GRACE_S", 5)
    monkeypatch.setattr(storage, "HEARTBEAT_S", 1)
    text = search(4, "slow", f"storage: sqlite:///{sweeper.folder}/shared.db")
    dying = dying_when(lambda event: event.counts.running > 0)
    other = sweeper.folder / "other"
    pid = sweeper.fork(lambda: sweeper.run(text, out=other, on_event=dying))
    assert wait(pid) == -signal.SIGKILL
    until(lambda: sweeper.run(text).counts.done == 4)  # once the dead one is taken for dead
    # What ended just before its machine died was not entered: another machine runs it again.
    assert len(sweeper.counts("start")) == 4 and sum(sweeper.counts("end").values()) <= 5
    assert dict(sweeper.report(text).states) == {"done": 4}


def test_the_time_left_counts_the_seeds_of_each_point(sweeper: Sweeper) -> None:
    """Two of three points are left, each with four seeds of 3 s: 24 s, or 12 s for two jobs."""
    for jobs, seconds in ((1, 24), (2, 12)):
        sweep = sweeper.load(search(3, more=f"repeat: 4\njobs: {jobs}"))
        unused: Any = None
        runner = Runner(sweep, COMMAND, Results(sweeper.out), unused)
        runner._seconds = [2.0, 4.0]
        counts = Counts(done=1, running=0, failed=0, pruned=0, total=3)
        assert runner._seconds_left(counts) == pytest.approx(seconds)


def test_points_drawn_again_are_counted_and_not_run_again(
    sweeper: Sweeper, recwarn: pytest.WarningsRecorder
) -> None:
    space = "{lr: {low: 0.1, high: 1.0, step: 0.4}}"
    text = search(12).replace("{lr: {low: 0.0, high: 1.0}}", space)
    assert sweeper.run(text).counts.done == 12
    assert set(sweeper.counts("start").values()) == {1}
    found = sweeper.report(text)
    assert found.drawn == 12 and found.distinct == len(found.trials) <= 3
    assert f"{found.distinct} distinct points of 12 drawn" in str(found)
    assert not list(recwarn), "no warning of another library"


def test_a_search_names_the_extra_before_it_makes_anything(
    sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitcli.commands.sweep import analysis

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(VitcliError, match="needs Optuna") as caught:
        analysis.run(sweeper.load(search()), Results(sweeper.out), COMMAND)
    assert "[search]" in caught.value.hint and not sweeper.out.exists()
