"""A sweep of a fake command, in this process or in a forked one that may be killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from vitcli.commands.sweep import analysis
from vitcli.commands.sweep.report import report
from vitcli.commands.sweep.result import Event, Outcome, SweepPlan, SweepReport
from vitcli.commands.sweep.space import Command
from vitcli.commands.sweep.spec import Sweep, load_sweep
from vitcli.commands.sweep.trials import Results, expand

FAKE = Path(__file__).with_name("fake.py")
KEYS = frozenset({"encoder", "encoder.depth", "encoder.position", "data.train_size"})


def fake_command(
    images: Annotated[list[str] | None, typer.Argument()] = None,
    norm: str = "",
    lr: float = 0.0,
    seed: int = 0,
    out: str = "",
    batch: int = 1,
    config: str = "",
    resume: Annotated[bool, typer.Option("--resume")] = False,
    compile: bool = True,
    lora: list[str] | None = None,
) -> None:
    """What a sweep may give the fake; `fake.py` reads it."""


_app = typer.Typer(add_completion=False)
_app.command("train-shapes")(fake_command)
COMMAND = Command("train-shapes", typer.main.get_command(_app), KEYS)


@dataclass
class Sweeper:
    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def log_file(self) -> Path:
        return self.folder / "log"

    @property
    def program(self) -> list[str]:
        return [sys.executable, "-S", "-E", str(FAKE), str(self.log_file)]

    def load(self, text: str) -> Sweep:
        file = self.folder / "toy.yaml"
        file.write_text(text)
        return load_sweep(file, {"train-shapes": COMMAND})

    def run(
        self, text: str, *, out: Path | None = None, jobs: int | None = None, **options: Any
    ) -> Outcome:
        """As the command does, with the fake in place of vitcli; `options` are `analysis.run`'s."""
        sweep = analysis.changed(self.load(text), jobs=jobs)
        results = Results(out or self.out)
        return analysis.run(sweep, results, COMMAND, program=self.program, **options)

    def plan(self, text: str) -> SweepPlan:
        return analysis.plan(self.load(text), Results(self.out), COMMAND)

    def fork(self, work: Callable[[], Any]) -> int:
        """Do the work in a forked process, which starts at once; its pid.

        It shares this worker's pipe to pytest-xdist, and a lock that another thread held is never
        released in it. So it ends with the worker and after ten minutes, or the suite would wait.
        """
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            signal.alarm(600)
            if sys.platform.startswith("linux"):
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(code)
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid

    def report(self, text: str, **view: Any) -> SweepReport:
        return report(self.load(text), Results(self.out), **view)

    def report_ids(self, text: str) -> list[str]:
        return [trial.id for trial in expand(self.load(text))]

    def counts(self, what: str) -> Counter[str]:
        """How often each trial did `start` or `end`, by its arguments."""
        if not self.log_file.exists():
            return Counter()
        lines = self.log_file.read_text().splitlines()
        return Counter(
            line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")
        )


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process has written stays without it; only a power cut would tell."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def sweeper(tmp_path: Path) -> Sweeper:
    return Sweeper(tmp_path)


def until(true: Callable[[], bool]) -> None:
    """Wait for it; five minutes without is a failure."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def running(sweeper: Sweeper) -> Any:
    """The directory of the first trial, once it runs."""
    until(lambda: len(sweeper.counts("start")) > 0)
    until(lambda: any(p.status().pid for p in Results(sweeper.out).trials()))
    return next(p for p in Results(sweeper.out).trials() if p.status().pid)


def wait(pid: int) -> int:
    """The exit code of a forked process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL


def dying_when(true: Callable[[Event], bool]) -> Callable[[Event], None]:
    """Kills the process that a sweep runs in as soon as its state is so, on any machine."""

    def on_event(event: Event) -> None:
        if true(event):
            os.kill(os.getpid(), signal.SIGKILL)

    return on_event
