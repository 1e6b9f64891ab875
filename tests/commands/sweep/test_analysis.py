"""Running a sweep: what fails, what is killed, and that nothing is lost or run twice."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.sweep.conftest import Sweeper, dying_when, kill, running, until, wait
from vitcli.commands.sweep import runner
from vitcli.commands.sweep.result import Event
from vitcli.commands.sweep.spec import load_sweep
from vitcli.commands.sweep.trials import Results
from vitcli.files import is_held

HEAD = "command: train-shapes\n"
SIX = HEAD + "grid: {norm: [ok], lr: [0.1, 0.2, 0.3]}\nrepeat: 2\nmetrics: [result.score]\n"


def states(sweeper: Sweeper, text: str) -> dict[str, int]:
    return dict(sweeper.report(text).states)


def test_every_trial_runs_once_and_a_second_call_runs_none(sweeper: Sweeper) -> None:
    first = sweeper.run(SIX)
    assert (first.ran, first.counts.done, first.counts.left) == (6, 6, 0)
    assert sweeper.run(SIX).ran == 0
    assert set(sweeper.counts("end").values()) == {1} and len(sweeper.counts("end")) == 6


def test_a_trial_leaves_its_config_result_stderr_status_and_command(sweeper: Sweeper) -> None:
    text = HEAD + "base: {lr: 0.25, encoder: {depth: 3}}\nmetrics: [result.score]"
    sweeper.run(text)
    (place,) = Results(sweeper.out).trials()
    assert {p.name for p in place.path.iterdir()} >= {
        "config.yaml", "result.json", "stderr.log", "status",
    }  # fmt: skip
    assert json.loads(place.result_file.read_text())["result"]["score"] == 0.75
    config = place.config()
    assert config and config.params == {"lr": 0.25, "encoder.depth": 3}
    assert config.run.endswith("train-shapes --lr 0.25 --set encoder.depth=3 --json")
    assert config.argv == [*sweeper.program, *config.run.split()[5:]]
    assert place.status().state == "done" and place.status().attempts == 1


def test_changed_yaml_adds_what_is_new_and_keeps_what_still_applies(sweeper: Sweeper) -> None:
    sweeper.run(SIX)
    changed = SIX.replace("0.3]", "0.4]").replace("metrics:", "jobs: 2\nmetrics:")
    assert sweeper.run(changed).ran == 2
    assert states(sweeper, changed) == {"done": 6}
    assert len(sweeper.report(changed, stale=True).trials) == 8
    assert sweeper.run(SIX).ran == 0


def test_failures_are_recorded_and_do_not_stop_the_others(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [crash, garbage, silent, twice, ok]}\nmetrics: [result.score]"
    outcome = sweeper.run(text)
    assert (outcome.counts.failed, outcome.counts.done) == (4, 1)
    errors = {t.params["norm"]: t.error for t in sweeper.report(text).trials}
    assert errors["crash"] == "error: it broke"
    assert errors["garbage"] == "printed no JSON but 'epoch 1: loss 0.3'"
    assert errors["silent"] == "printed nothing"
    assert errors["twice"] == "printed more than one JSON value"
    assert errors["ok"] == ""
    assert sweeper.run(text).ran == 0, "failures are kept"
    again = sweeper.run(text, retry_failed=True)
    assert (again.ran, again.counts.failed) == (4, 4)
    assert {t.attempts for t in sweeper.report(text, where=("norm!=ok",)).trials} == {2}


def test_a_trial_that_hangs_is_ended_with_all_it_started(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [hang]}\ntimeout: 0.3"
    outcome = sweeper.run(text)
    assert (outcome.counts.failed, outcome.counts.left) == (1, 0)
    assert sweeper.report(text).trials[0].error == "timed out after 0.3 s"
    assert not any(is_held(place.path / "lock") for place in Results(sweeper.out).trials())


def test_what_a_trial_leaves_running_ends_with_it(sweeper: Sweeper) -> None:
    """A killed trial's own children would hold its lock, and the next call could not run it."""
    text = HEAD + "grid: {norm: [orphan, suicide-orphan]}"
    assert sweeper.run(text).killed == 1
    until(lambda: not any(is_held(p.path / "lock") for p in Results(sweeper.out).trials()))
    assert sweeper.run(text).counts.done == 2


def test_a_trial_whose_lock_is_held_is_not_run(sweeper: Sweeper) -> None:
    place = Results(sweeper.out).trial(sweeper.report_ids(HEAD)[0])
    lock = place.try_lock()
    outcome = sweeper.run(HEAD)
    assert lock is not None
    assert (outcome.ran, outcome.counts.left, outcome.counts.running) == (0, 1, 0)
    lock.close()
    assert sweeper.run(HEAD).ran == 1


def test_a_program_that_cannot_start_is_a_failed_trial(
    sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweeper, "program", ["/no/such/program"])
    assert sweeper.run(HEAD).counts.failed == 1
    assert "cannot start /no/such/program" in sweeper.report(HEAD).trials[0].error


def test_a_trial_that_was_killed_is_run_by_the_next_call_alone(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [suicide, ok]}"
    first = sweeper.run(text)
    assert (first.killed, first.counts.done, first.counts.failed) == (1, 1, 0)
    assert states(sweeper, text) == {"killed": 1, "done": 1}
    second = sweeper.run(text)
    assert (second.ran, second.killed, second.counts.done) == (1, 0, 2)


@pytest.mark.parametrize("resume", ["", ", resume: true"])
def test_a_killed_trial_starts_anew_or_resumes_as_it_is_told(sweeper: Sweeper, resume: str) -> None:
    """Training refuses a folder with a run in it: what was left there would fail every attempt."""
    text = HEAD + f'base: {{out: "{{trial}}/run", norm: suicide{resume}}}'
    assert sweeper.run(text).killed == 1
    run = next(Results(sweeper.out).trials()).path / "run"
    (run / "snapshot").touch()
    assert sweeper.run(text).counts.done == 1
    assert (run / "snapshot").exists() == bool(resume)


def test_failures_in_a_row_stop_a_broken_sweep(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [crash], lr: [1, 2, 3, 4, 5]}\nmax_failures_in_row: 3"
    outcome = sweeper.run(text)
    assert (outcome.ran, outcome.counts.left) == (3, 2)
    assert "in a row" in outcome.stopped
    mixed = HEAD + "zip: {norm: [crash, ok, crash, ok], lr: [6, 7, 8, 9]}\nmax_failures_in_row: 2"
    assert sweeper.run(mixed).stopped == ""


def test_fail_fast_starts_no_more(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [crash, ok], lr: [1, 2]}"
    outcome = sweeper.run(text, fail_fast=True)
    assert (outcome.ran, outcome.counts.left) == (1, 3)


def test_jobs_run_at_once_and_share_the_threads(
    sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    most = 0

    def on_event(event: Event) -> None:
        nonlocal most
        most = max(most, event.counts.running)

    text = HEAD + "grid: {norm: [slow], lr: [1, 2, 3]}\njobs: 3\nmetrics: [result.threads]"
    sweeper.run(text, on_event=on_event)
    assert most == 3
    assert {t.metrics["threads"] for t in sweeper.report(text).trials} == {"2"}


def test_the_time_left_goes_down_while_a_trial_runs(
    sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "EVENT_S", 0.0)
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if len(seen()) > 2:
            Path(f"{sweeper.log_file}.open").touch()

    def seen() -> list[float | None]:
        return [e.seconds_left for e in events if (e.counts.done, e.counts.running) == (1, 1)]

    sweeper.run(HEAD + "zip: {norm: [ok, gate], lr: [1, 2]}", on_event=on_event)
    second = seen()
    assert len(second) > 2
    assert all(a is not None and b is not None and a >= b for a, b in itertools.pairwise(second))
    assert events[-1].seconds_left is None


def test_results_that_were_removed_are_made_again(sweeper: Sweeper) -> None:
    sweeper.run(SIX)
    shutil.rmtree(next(Results(sweeper.out).trials()).path)
    assert sweeper.run(SIX).ran == 1
    assert states(sweeper, SIX) == {"done": 6}


def test_a_grid_needs_no_optuna(sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    text = HEAD + "grid: {norm: [ok, crash]}\nrandom: {trials: 2, space: {lr: {low: 0.1, high: 1}}}"
    assert (sweeper.run(text).counts.done, sweeper.run(text).ran) == (2, 0)
    assert not (sweeper.out / "study.journal").exists()
    assert states(sweeper, text) == {"done": 2, "failed": 2}


def test_a_directory_of_the_first_release_goes_on(sweeper: Sweeper) -> None:
    """It has a journal, which held a second truth about each trial; the directories decide."""
    sweeper.run(SIX)
    (sweeper.out / "study.journal").write_text('{"op_code": 0, "worker_id": "x"}\n')
    (sweeper.out / "study.journal.lock").touch()
    shutil.rmtree(next(Results(sweeper.out).trials()).path)
    assert sweeper.run(SIX).ran == 1


def test_a_directory_belongs_to_one_sweep(sweeper: Sweeper) -> None:
    from vitcli.errors import VitcliError

    sweeper.run("name: one\n" + HEAD)
    with pytest.raises(VitcliError, match="holds the sweep 'one'"):
        sweeper.run("name: two\n" + HEAD)
    (sweeper.folder / "other").mkdir()
    (sweeper.folder / "other" / "precious").touch()
    for out in (sweeper.folder / "other", sweeper.folder / "other" / "precious"):
        with pytest.raises(VitcliError, match="not a sweep directory"):
            sweeper.run(HEAD, out=out)


@pytest.mark.parametrize("name", ["toy", "2024", "null", "a: b", "#1", "grün"])
@pytest.mark.parametrize(
    "text",
    [HEAD, "---\n" + HEAD, "{command: train-shapes}", "\ufeff" + HEAD, '"name": mine\n' + HEAD],
)
def test_the_directory_keeps_a_file_that_can_be_read_again(
    sweeper: Sweeper, name: str, text: str
) -> None:
    file = sweeper.folder / f"{name}.yaml"
    file.write_text(text)
    sweep = load_sweep(file)
    for _ in range(2):
        Results(sweeper.out).create(sweep.name, str(file))
    again = load_sweep(sweeper.out / "sweep.yaml")
    assert again.name == ("mine" if "mine" in text else name)
    assert again.command == sweep.command


# -- kill -9 ------------------------------------------------------------------------------------


@contextlib.contextmanager
def dying_at(moment: int) -> Iterator[list[int]]:
    """kill -9 at the n-th of the moments at which the state on disk is about to change."""
    count = [0]
    real = {name: getattr(os, name) for name in ("fsync", "replace", "unlink")}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(os, name, counted(name))
    try:
        yield count
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def test_a_sweep_killed_at_any_moment_is_completed_with_nothing_run_twice(tmp_path: Path) -> None:
    text = HEAD + "base: {norm: ok}\nmetrics: [result.score]"

    def attempt(sweeper: Sweeper, moment: int) -> int:
        def work() -> None:
            with dying_at(moment) as count:
                sweeper.run(text)
            (sweeper.folder / "moments").write_text(str(count[0]))

        return wait(sweeper.fork(work))

    whole = Sweeper(tmp_path / "whole")
    whole.folder.mkdir()
    assert attempt(whole, 0) == 0
    moments = int((whole.folder / "moments").read_text())
    assert moments > 20
    ended_once = 0
    for moment in range(1, moments + 1):
        sweeper = Sweeper(tmp_path / str(moment))
        sweeper.folder.mkdir()
        assert attempt(sweeper, moment) == -signal.SIGKILL
        finished = sweeper.counts("end")
        ended_once += bool(finished)
        assert attempt(sweeper, 0) == 0, moment
        assert states(sweeper, text) == {"done": 1}, moment
        assert set(sweeper.counts("end").values()) <= {1}, moment
        for trial in finished:
            assert sweeper.counts("start")[trial] == 1, moment
    assert ended_once > 2, "some kills must come after the trial's end"


def test_24_trials_killed_three_times(sweeper: Sweeper) -> None:
    text = HEAD + (
        "grid: {norm: [slow, ok], lr: [0.1, 0.2, 0.3, 0.4]}\nrepeat: 3\njobs: 2\n"
        "metrics: [result.score]"
    )
    for finished in (3, 8, 15):
        dying = dying_when(lambda event, finished=finished: event.counts.done >= finished)
        pid = sweeper.fork(lambda dying=dying: sweeper.run(text, on_event=dying))
        assert wait(pid) == -signal.SIGKILL
    done = {t.id for t in sweeper.report(text).trials if t.state == "done"}
    assert 0 < len(done) < 24
    outcome = sweeper.run(text)
    assert outcome.counts.done == 24
    assert set(sweeper.counts("end").values()) == {1}
    assert {t.attempts for t in sweeper.report(text).trials if t.id in done} <= {1, 2, 3}
    assert sweeper.run(text).ran == 0


def test_children_do_not_outlive_a_killed_sweep(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [hang]}"
    pid = sweeper.fork(lambda: sweeper.run(text))
    place = running(sweeper)
    assert place.is_held()
    kill(pid)
    until(lambda: not place.is_held())  # the child holds it too, to its end
    assert states(sweeper, text) == {"interrupted": 1}


def test_a_result_is_kept_when_the_sweep_dies_before_it_is_told(sweeper: Sweeper) -> None:
    """What an orphan of a killed sweep printed to its end, where the system lets it live on."""
    sweeper.run(SIX)
    place = next(Results(sweeper.out).trials())
    place.result_file.rename(place.stdout)
    fields = json.loads((place.path / "status").read_text())
    (place.path / "status").write_text(json.dumps({**fields, "state": "running"}))
    assert sweeper.run(SIX).ran == 0
    assert place.result() and place.status().state == "done"


def _interruptible(sweeper: Sweeper, text: str) -> int:
    """The pid of a process that runs the sweep and ends with 0 only by Ctrl-C."""

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            sweeper.run(text)
            os._exit(3)

    return sweeper.fork(work)


def test_ctrl_c_ends_the_trials_and_the_next_call_runs_them(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [once-hang, ok]}"

    pid = _interruptible(sweeper, text)
    place = running(sweeper)
    os.kill(pid, signal.SIGINT)
    assert wait(pid) == 0
    assert place.status().state == "interrupted" and not place.is_held()
    outcome = sweeper.run(text)
    assert (outcome.ran, outcome.counts.failed, outcome.counts.done) == (2, 0, 2)


def test_a_second_ctrl_c_ends_what_does_not_listen(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [deaf-orphan-hang], lr: [1, 2, 3]}\njobs: 3"

    pid = _interruptible(sweeper, text)
    until(lambda: len(sweeper.counts("deaf")) == 3)
    os.kill(pid, signal.SIGINT)
    until(lambda: len(sweeper.counts("told")) == 3)
    os.kill(pid, signal.SIGINT)
    assert wait(pid) == 0
    until(lambda: not any(place.is_held() for place in Results(sweeper.out).trials()))


def test_a_full_disk_ends_the_trials_and_the_sweep(
    sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitcli.commands.sweep.result import Status
    from vitcli.commands.sweep.trials import TrialDir
    from vitcli.errors import VitcliError

    real = TrialDir.write_status

    def full(place: TrialDir, status: Status) -> None:
        if len(sweeper.counts("start")) == 2:
            raise VitcliError("cannot write status: no space left", exit_code=1)
        real(place, status)

    monkeypatch.setattr(TrialDir, "write_status", full)
    text = HEAD + "grid: {norm: [hang, crash]}\njobs: 2"
    with pytest.raises(VitcliError, match="no space"):
        sweeper.run(text)
    until(lambda: not any(place.is_held() for place in Results(sweeper.out).trials()))
    monkeypatch.undo()
    assert states(sweeper, text)["interrupted"] >= 1


# -- several processes --------------------------------------------------------------------------


def test_two_processes_do_each_trial_once(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [ok], lr: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}\nrepeat: 4\njobs: 2"
    pids = [sweeper.fork(lambda: sweeper.run(text)) for _ in range(3)]
    assert [wait(pid) for pid in pids] == [0, 0, 0]
    assert len(sweeper.counts("start")) == 24
    assert set(sweeper.counts("start").values()) == {1}
    assert states(sweeper, text) == {"done": 24}


def test_the_trials_of_a_process_that_dies_are_taken_over(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {norm: [gate], lr: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}"
    pids = [sweeper.fork(lambda: sweeper.run(text)) for _ in range(2)]
    until(lambda: len(sweeper.counts("start")) == 2)
    at_once = dying_when(lambda event: event.counts.running > 2)
    assert wait(sweeper.fork(lambda: sweeper.run(text, on_event=at_once))) == -signal.SIGKILL
    until(lambda: sum(place.is_held() for place in Results(sweeper.out).trials()) == 2)
    Path(f"{sweeper.log_file}.open").touch()
    assert [wait(pid) for pid in pids] == [0, 0]
    assert states(sweeper, text) == {"done": 6}
    assert set(sweeper.counts("end").values()) == {1}


def test_a_system_without_flock_groups_and_prctl_can_import_it_all() -> None:
    """As on Windows: what is missing there is looked up where it is used, not at import."""
    code = (
        "import os, signal, sys, pydantic.fields, typer, rich.console, subprocess, asyncio; "
        "sys.modules['fcntl'] = None; del os.killpg, os.fork; "
        "del signal.SIGKILL; del os.sched_getaffinity; sys.platform = 'other'; "
        "import vitcli.commands.sweep.command, vitcli.commands.sweep.analysis as a; "
        "from vitcli.commands.sweep.runner import threads_each; assert threads_each(1) >= 1"
    )
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
