"""Worker processes that decode: each image has its time, and a crash costs one row."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vitcli.commands.embed.shards import Entry
from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.decode import MAX_PIXELS, ImageError, decode
from vitcli.images.preprocess import preprocess

READY = "ready"


@dataclass(frozen=True)
class DecodeWork:
    """How every image of a job is decoded."""

    preprocess: PreprocessConfig
    background: tuple[int, int, int] = (255, 255, 255)
    max_pixels: int = MAX_PIXELS
    min_side: int = 1
    memory_bytes: int = 0
    """Address space a decoding process may take (Linux); 0 is no limit."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What became of one entry."""

    pixels: NDArray[np.float32] | None = None
    """(3, h, w), None where it failed."""
    width: int | None = None
    height: int | None = None
    """Size of the upright image in pixels, None where it could not be decoded."""
    code: str = "ok"
    error: str = ""


Read = Callable[[Entry, "DecodeWork"], "Decoded"]


def main(number: int) -> None:
    """Answer each `Entry` with a `Decoded`, until the other end of the pipe is closed."""
    connection = Connection(number)
    with contextlib.suppress(EOFError, OSError):
        work, read = connection.recv()
        _settle(work.memory_bytes)
        connection.send(READY)
        while True:
            connection.send(read(connection.recv(), work))


def read(entry: Entry, work: DecodeWork) -> Decoded:
    """Decode and preprocess one entry; every failure is a code."""
    if entry.code:
        return Decoded(code=entry.code, error=entry.error)
    width = height = None
    try:
        source = content(entry)
        image = decode(
            source,
            name=entry.name,
            background=work.background,
            max_pixels=work.max_pixels,
            min_side=work.min_side,
        )
        width, height = image.width, image.height
        return Decoded(preprocess(image.image, work.preprocess), width, height)
    except ImageError as error:
        # The row has the path already.
        message = error.message.removeprefix(f"{printable(entry.name)}: ")
        return Decoded(None, width, height, error.code, message)
    except MemoryError:
        return Decoded(None, width, height, "out_of_memory", "no memory left to decode it")
    except Exception as error:  # one row must not cost the others
        reason = f"{type(error).__name__}: {printable(str(error))}"
        return Decoded(None, width, height, "corrupt", reason)


def content(entry: Entry) -> str | bytes:
    """What `decode` reads: the file's path, or the bytes of a member.

    Raises:
        ImageError: the shard cannot be read so far.
    """
    if entry.offset < 0:
        return entry.source
    try:
        with Path(entry.source).open("rb") as file:
            file.seek(entry.offset)
            content = file.read(entry.size)
    except OSError as error:
        raise ImageError("unreadable", f"shard: {error.strerror or error}") from error
    if len(content) < entry.size:
        raise ImageError("truncated", f"the shard ends after {len(content)} of {entry.size} bytes")
    return content


def _settle(memory_bytes: int) -> None:
    """Die with the parent, leave Ctrl-C to it, keep a decoder's chatter and appetite in bounds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with contextlib.suppress(ValueError, OSError):
            import resource

            if memory_bytes:
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)  # libtiff and others write to the terminal
    os.dup2(null, 1)
    os.dup2(null, 2)


_START_S = 120.0
_STARTS = 3
_PROGRAM = (
    "import sys; number, *sys.path = sys.argv[1:]; "
    "from vitcli.commands.embed.decoding import main; main(int(number))"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Nothing here is worth a thread for each core, or the address space of their stacks."""


def available_cpus() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class DecodePool:
    """`workers` processes behind one thread each; `decode` answers in the order it was asked.

    A decoder that takes longer than `timeout_s` is killed (`timed_out`), one that dies gives
    `crashed`, or `out_of_memory` where the system killed it; a new process takes its place. At
    most `ahead` images beyond the one that is read next are decoded or waiting.
    """

    def __init__(
        self, work: DecodeWork, workers: int, timeout_s: float, ahead: int, read: Read = read
    ) -> None:
        self.work = work
        self.read = read
        self.timeout_s = timeout_s
        self.ahead = ahead
        self._local = threading.local()
        self._lock = threading.Lock()
        self._closed = False
        self._running: set[_Worker] = set()
        self._threads = ThreadPoolExecutor(workers, "decode")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = True
            for worker in self._running:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._running:
            worker.connection.close()

    def decode(self, entries: Iterable[Entry]) -> Iterator[Decoded]:
        """One `Decoded` for each entry, in order."""
        coming = iter(entries)
        waiting: deque[Future[Decoded]] = deque(
            self._threads.submit(self._one, entry) for entry in islice(coming, self.ahead)
        )
        while waiting:
            done = waiting.popleft().result()
            waiting += [self._threads.submit(self._one, entry) for entry in islice(coming, 1)]
            yield done

    def _one(self, entry: Entry) -> Decoded:
        """Runs in a thread, which keeps a process of its own."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = self._start()
        try:
            worker.connection.send(entry)
            if worker.connection.poll(self.timeout_s):
                answer: Decoded = worker.connection.recv()
                return answer
            failed = Decoded(code="timed_out", error=f"not decoded in {self.timeout_s:g} s")
        except (EOFError, OSError):
            failed = _death(worker.wait())
        self._local.worker = None
        self._forget(worker)
        return failed

    def _start(self) -> _Worker:
        for _ in range(_STARTS):
            with self._lock:
                if self._closed:
                    break
                worker = _Worker(self.work, self.read)
                self._running.add(worker)
            if worker.ready():
                return worker
            self._forget(worker)
        raise VitcliError(
            "decoding processes cannot be started", "fewer --workers, more memory", exit_code=1
        )

    def _forget(self, worker: _Worker) -> None:
        worker.kill()
        worker.connection.close()
        with self._lock:
            self._running.discard(worker)


class _Worker:
    """One process and our end of its pipe.

    Not `multiprocessing`, whose children import the main script, and with it torch, once more.
    """

    def __init__(self, work: DecodeWork, read: Read) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        number = theirs.fileno()
        command = [sys.executable, "-c", _PROGRAM, str(number), *sys.path]
        self._process = subprocess.Popen(
            command, pass_fds=[number], stdin=subprocess.DEVNULL, env={**os.environ, **_ONE_THREAD}
        )
        theirs.close()
        with contextlib.suppress(OSError):  # one that has died already is not ready either
            self.connection.send((work, read))

    def ready(self) -> bool:
        try:
            return bool(self.connection.poll(_START_S) and self.connection.recv() == READY)
        except (EOFError, OSError):
            return False

    def wait(self) -> int | None:
        """The exit code of a process whose pipe has closed; negative is a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(5.0)
        return None

    def kill(self) -> None:
        self._process.kill()
        self.wait()


def _death(exit_code: int | None) -> Decoded:
    if exit_code == -signal.SIGKILL:
        return Decoded(code="out_of_memory", error="the decoding process was killed")
    if exit_code is not None and exit_code < 0:
        name: Any = signal.Signals(-exit_code).name
        return Decoded(code="crashed", error=f"the decoder crashed ({name})")
    return Decoded(code="crashed", error=f"the decoding process ended with code {exit_code}")
