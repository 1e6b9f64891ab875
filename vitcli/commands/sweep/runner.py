"""The loop that keeps `jobs` trials running until there are none left to claim.

A trial is a process, started with its share of the threads, and ended with all it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import site
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vitcli
from vitcli.commands.sweep.queue import Claim, Planned, Search
from vitcli.commands.sweep.result import Counts, Event, Outcome, State, Status, TrialConfig
from vitcli.commands.sweep.space import Command
from vitcli.commands.sweep.spec import Sweep
from vitcli.commands.sweep.trials import (
    Results,
    Trial,
    TrialDir,
    arguments_of,
    new_values,
    seeds_of,
    shown_command,
)
from vitcli.errors import VitcliError
from vitcli.files import Lock

if TYPE_CHECKING:
    import optuna

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GRACE_S = 5.0
"""Between asking a trial to end and ending it."""
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in linux/prctl.h
POLL_S = 0.02
SLOW_POLL_S = 0.2
EVENT_S = 1.0
"""How long the time left may stay the same."""
ENDED_FROM_OUTSIDE = frozenset({-1, -2, -9, -15, 130, 137, 143})
"""Exit codes of a process that something else ended: HUP, INT, KILL, TERM, and as shells say it."""


def threads_each(jobs: int) -> int:
    """Threads for one of `jobs` trials: an equal share of the processors this process may use.

    An OMP_NUM_THREADS that the user has set is what is shared out instead.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total = (int(given) if given.isdecimal() else 0) or here or 1
    return max(1, total // jobs)


def environment(threads: int) -> Mapping[str, str]:
    """This process's environment with `threads` for every library that asks.

    Neither the trial nor what it starts looks for modules in the current folder, which may hold
    anybody's files: not by `-m`, and not by an empty or relative entry of PYTHONPATH.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in given if Path(path).is_absolute()]
    home = str(Path(vitcli.__file__).parents[1])
    if home not in [*paths, *site.getsitepackages(), site.getusersitepackages()]:
        paths.append(home)  # run from its sources, which are not installed
    return {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


@dataclass
class Child:
    """A running trial; seconds are those of `time.monotonic`."""

    process: subprocess.Popen[bytes]
    started: float

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.started

    def poll(self) -> int | None:
        """Its exit code once it has ended; what it left running is ended too."""
        code = self.process.poll()
        if code is not None:
            self.kill()
        return code

    def ask_to_end(self) -> None:
        """SIGTERM to it and all it started."""
        self._signal(signal.SIGTERM)

    def end(self) -> int:
        """Ask it to end, SIGKILL to all it started after GRACE_S; returns its exit code."""
        self.ask_to_end()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        finally:
            self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """SIGKILL to it and all it started."""
        self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))

    def _signal(self, number: int) -> None:
        # The group outlives its leader: what the trial left behind goes too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)


def start_trial(argv: Sequence[str], place: TrialDir, lock: Lock, threads: int) -> Child:
    """Start a trial in a process group of its own, stdout and stderr into its directory.

    It inherits the trial's lock, so that a child that outlives a killed sweep still holds it, and
    on Linux it is killed when the sweep dies. Must be called from the main thread: Linux sends
    the signal when the thread that started the child ends.

    Raises:
        OSError: the program cannot be started.
    """
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": environment(threads)}
    if os.name == "posix":
        how |= {"start_new_session": True, "preexec_fn": _dies_with(os.getpid())}
        how["pass_fds"] = () if lock.fd is None else (lock.fd,)
    with place.stdout.open("wb") as out, place.stderr.open("wb") as err:
        process = subprocess.Popen(argv, stdout=out, stderr=err, **how)
    return Child(process, time.monotonic())


def _dies_with(parent: int) -> Callable[[], None] | None:
    """What the child does before it becomes the trial; nothing where the kernel cannot."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None:
        return None

    def ask() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


@dataclass
class _Slot:
    """One claim being run, one trial of it after the other."""

    claim: Claim
    waiting: list[tuple[Trial, TrialDir, Lock]]
    results: list[dict[str, Any]] = field(default_factory=list)
    child: Child | None = None
    place: TrialDir | None = None
    status: Status = field(default_factory=lambda: Status("pending"))
    read_bytes: int = 0
    """How far the file of intermediate values has been read."""
    last_value: float | None = None
    """The last of them."""


@dataclass
class Runner:
    """Runs a sweep's trials.

    `program` takes the place of this vitcli: the words before the command's name.
    """

    sweep: Sweep
    command: Command
    results: Results
    study: Planned | Search
    fail_fast: bool = False
    program: Sequence[str] | None = None
    on_event: Callable[[Event], None] = lambda event: None

    def __post_init__(self) -> None:
        self._threads = threads_each(self.sweep.jobs)
        self._slots: list[_Slot] = []
        self._seconds: list[float] = []
        self._ran = 0
        self._killed = 0
        self._in_row = 0
        self._stopped = ""
        self._event_at = 0.0

    def run(self) -> Outcome:
        """Run what is missing. Ctrl-C ends the running trials, which the next call runs again.

        Raises:
            KeyboardInterrupt: after everything has been put in order.
        """
        try:
            while True:
                while not self._stopped and len(self._slots) < self.sweep.jobs:
                    claim = self.study.claim()
                    if claim is None:
                        break
                    slot = _Slot(claim, list(claim.trials))
                    self._slots.append(slot)
                    self._next(slot)
                if not self._slots:
                    break
                self._wait()
                self.study.beat([slot.claim for slot in self._slots])
                for slot in list(self._slots):
                    self._look_at(slot)
                if time.monotonic() > self._event_at + EVENT_S:
                    self._say()
        except BaseException:
            self._interrupt()
            raise
        return Outcome(self._ran, self._killed, self.study.counts(), self._stopped)

    # -- one slot ----------------------------------------------------------------------------

    def _next(self, slot: _Slot) -> None:
        """Start the slot's next trial that has not ended yet; without any, enter the claim."""
        while slot.waiting:
            trial, place, lock = slot.waiting.pop(0)
            status = place.as_left()
            if status.state == "done" and place.has_result():
                slot.results.append(place.result() or {})
            elif status.state == "failed" and not self.study.retry_failed:
                self._slots.remove(slot)
                self.study.fail(slot.claim, status.error)
                return
            elif status.state == "pruned":
                self._slots.remove(slot)
                self.study.prune(slot.claim)
                return
            else:
                self._start(slot, trial, place, lock)
                return
        self._slots.remove(slot)
        if error := self.study.finish(slot.claim, slot.results):
            self._count("failed", f"{slot.claim.id}: {error}")
        self._say()

    def _start(self, slot: _Slot, trial: Trial, place: TrialDir, lock: Lock) -> None:
        arguments = arguments_of(self.sweep, self.command, trial, place)
        argv = [*(self.program or [sys.executable, "-P", "-m", "vitcli"]), *arguments]
        shown = shown_command(self.program, arguments)
        before = place.status()
        slot.place, slot.read_bytes = place, 0
        slot.status = Status(
            "running",
            started=time.time(),
            host=socket.gethostname(),
            threads=self._threads,
            attempts=before.attempts + 1,
            drawn=before.drawn,
        )
        for file in (place.stdout, place.result_file):
            file.unlink(missing_ok=True)
        out, resumes = str(trial.params.get("out")), trial.params.get("resume")
        if "resume" in self.command.options and not resumes and out.startswith("{trial}/"):
            # A run that an earlier attempt left would be refused, so that no attempt could succeed.
            shutil.rmtree(place.path / out.removeprefix("{trial}/"), ignore_errors=True)
        params, cwd = dict(trial.params), str(Path.cwd())
        place.write_config(TrialConfig(self.sweep.command, params, shown, argv, cwd))
        place.write_status(slot.status)
        try:
            slot.child = start_trial(argv, place, lock, self._threads)
        except OSError as error:
            self._failed(slot, f"cannot start {argv[0]}: {error.strerror or error}", None)
            return
        slot.status = replace(slot.status, pid=slot.child.process.pid)
        place.write_status(slot.status)
        self._say()

    def _look_at(self, slot: _Slot) -> None:
        child, place = slot.child, slot.place
        assert child and place
        code = child.poll()
        if code is None:
            limit = self.sweep.timeout
            if limit is not None and child.wall_s > limit:
                child.end()
                self._failed(slot, f"timed out after {limit:g} s", None)
            elif (live := self._report_values(slot)) and live.should_prune():
                child.end()
                slot.status = replace(slot.status, last_value=slot.last_value)
                self._close(slot, "pruned", None)
                self.study.prune(slot.claim)
                self._count("pruned", f"{slot.claim.id} pruned")
            return
        if code in ENDED_FROM_OUTSIDE:
            error = f"ended from outside (exit code {code}); the next run of the sweep repeats it"
            self._close(slot, "killed", code, error)
            self.study.give_up(slot.claim, again=False)
            self._count("killed", f"{slot.claim.id}: {error}")
        elif code != 0:
            self._failed(slot, place.last_words() or f"exit code {code}", code)
        elif error := place.keep_result():
            self._failed(slot, error, code)
        else:
            # What it wrote since the last look counts too, or a median would lack this trial.
            self._report_values(slot)
            slot.results.append(place.result() or {})
            self._seconds.append(child.wall_s)
            self._close(slot, "done", code, remove=False)
            self._count("done", "")
            self._next(slot)

    def _failed(self, slot: _Slot, error: str, code: int | None) -> None:
        self._close(slot, "failed", code, error)
        self.study.fail(slot.claim, error)
        self._count("failed", f"{slot.claim.id} failed: {error}")

    def _close(
        self, slot: _Slot, state: State, code: int | None, error: str = "", remove: bool = True
    ) -> None:
        """Write how the trial ended, and let go of the slot unless more of its claim is to run."""
        assert slot.place
        wall = slot.child.wall_s if slot.child else None
        slot.status = replace(slot.status, state=state, wall_s=wall, exit_code=code, error=error)
        slot.place.write_status(slot.status)
        slot.child = None
        if remove:
            self._slots.remove(slot)

    def _report_values(self, slot: _Slot) -> optuna.Trial | None:
        """Pass new intermediate values of the claim's first trial on; to whom, if there are any."""
        pruner = self.sweep.search.pruner if self.sweep.search else None
        live = slot.claim.live
        if pruner is None or live is None or slot.results or slot.place is None:
            return None
        file = slot.place.path / pruner.file.replace("{trial}/", "").replace("{trial}", ".")
        values, slot.read_bytes = new_values(file, slot.read_bytes, pruner.step, pruner.value)
        for step, value in values:
            live.report(value, step)
            slot.last_value = value
        return live if values else None

    # -- the whole ---------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until a trial may have ended: short for short trials, lazy for long ones."""
        longest = max((s.child.wall_s for s in self._slots if s.child), default=0.0)
        time.sleep(POLL_S if longest < 5 else SLOW_POLL_S)

    def _interrupt(self) -> None:
        """Ask the trials to end, and put down how each did; a second Ctrl-C ends them at once."""
        children = [slot.child for slot in self._slots if slot.child]
        try:
            for child in children:
                child.ask_to_end()
            for slot in list(self._slots):
                self._put_down(slot)
        finally:
            for child in children:
                child.kill()

    def _put_down(self, slot: _Slot) -> None:
        full = contextlib.suppress(VitcliError, OSError)  # perhaps the disk is the reason
        if slot.child and slot.place:
            code = slot.child.end()
            with full:
                finished = code == 0 and not slot.place.keep_result()
                self._close(slot, "done" if finished else "interrupted", code)
        with full:
            self.study.give_up(slot.claim, again=True)
        slot.claim.release()

    def _count(self, state: State, text: str) -> None:
        self._ran += 1
        if state in ("failed", "killed"):
            self._killed += state == "killed"
            self._in_row += 1
            limit = self.sweep.max_failures_in_row
            if self.fail_fast and state == "failed":
                self._stopped = "a trial failed (--fail-fast)"
            elif limit and self._in_row >= limit:
                self._stopped = f"{self._in_row} trials failed in a row (max_failures_in_row)"
        else:
            self._in_row = 0
        if text:
            self._say(text)

    def _say(self, text: str = "") -> None:
        self._event_at = time.monotonic()
        counts = self.study.counts()
        self.on_event(Event(counts, self._seconds_left(counts), text))

    def _seconds_left(self, counts: Counts) -> float | None:
        """What is left at the mean time of a trial, shared by all that work on it now.

        A search counts points, each of which is as many trials as there are seeds.
        """
        if not self._seconds or not counts.left:
            return None
        trial = statistics.fmean(self._seconds)
        each = trial * (len(seeds_of(self.sweep)) if self.sweep.search else 1)
        running = [(len(s.results), s.child.wall_s) for s in self._slots if s.child]
        spent = sum(min(ended * trial + wall_s, each) for ended, wall_s in running)
        return (each * counts.left - spent) / min(max(self.sweep.jobs, counts.running), counts.left)
