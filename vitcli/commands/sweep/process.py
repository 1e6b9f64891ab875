"""One trial as a process: started with its share of the threads, and ended with all it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vitcli.commands.sweep.trialdir import TrialDir
from vitcli.files import Lock

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GRACE_S = 5.0
"""Between asking a trial to end and ending it."""
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG in linux/prctl.h


def threads_each(jobs: int) -> int:
    """Threads for one of `jobs` trials: an equal share of the processors this process may use.

    An OMP_NUM_THREADS that the user has set is what is shared out instead.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        total = int(given)
    elif hasattr(os, "sched_getaffinity"):
        total = len(os.sched_getaffinity(0))
    else:
        total = os.cpu_count() or 1
    return max(1, total // jobs)


def environment(threads: int) -> Mapping[str, str]:
    """This process's environment with `threads` for every library that asks."""
    return {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}


@dataclass
class Child:
    """A running trial; seconds are those of `time.monotonic`."""

    process: subprocess.Popen[bytes]
    started: float
    timeout_s: float | None

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def overdue(self) -> bool:
        return self.timeout_s is not None and self.wall_s > self.timeout_s

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
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """SIGKILL to it and all it started."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        # The group outlives its leader: what the trial left behind goes too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def start(
    argv: Sequence[str], place: TrialDir, lock: Lock, threads: int, timeout_s: float | None
) -> Child:
    """Start a trial in a process group of its own, stdout and stderr into its directory.

    It inherits the trial's lock, so that a child that outlives a killed sweep still holds it, and
    on Linux it is killed when the sweep dies. Must be called from the main thread: Linux sends
    the signal when the thread that started the child ends.

    Raises:
        OSError: the program cannot be started.
    """
    with place.stdout.open("wb") as out, place.stderr.open("wb") as err:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment(threads),
            pass_fds=() if lock.fd is None else (lock.fd,),
            start_new_session=True,
            preexec_fn=_dies_with(os.getpid()),
        )
    return Child(process, time.monotonic(), timeout_s)


def _dies_with(parent: int) -> Callable[[], None] | None:
    """What the child does before it becomes the trial; nothing where the kernel cannot."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask
