"""Worker processes that read images: each has its time and memory, and a crash costs one answer.

Needs Pillow, numpy and pydantic only, so that a process starts quickly.

Not pebble's pool: its time-outs and dead workers are the same, but its processes import the main
script, and with it torch (measured for two of them: first answer after 8 s and 1,050 MiB, here
1.5 s and 110 MiB), and pixels pass one pipe (0.6 to 2.1 ms per 448 px image, here 0.2 to 0.7).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images import MAX_PIXELS, MEMORY_BYTES, TIMEOUT_S
from vitcli.images.decode import DecodedImage, ImageError, decode
from vitcli.images.preprocess import levels
from vitcli.images.sources import Entry, content

READY = "ready"
_SHARED_BYTES = 64 * 2**20
"""Pixels that travel through shared memory; more than that goes through the pipe."""


@dataclass(frozen=True)
class DecodeWork:
    """How every image of a job is decoded."""

    preprocess: PreprocessConfig | None = None
    """None gives the decoded image itself, (H, W, 3)."""
    background: tuple[int, int, int] = (255, 255, 255)
    max_pixels: int = MAX_PIXELS
    min_side: int = 1
    memory_bytes: int = 0
    """Address space a decoding process may take (Linux); 0 is no limit."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What became of one entry."""

    pixels: NDArray[Any] | None = None
    """As `preprocess.levels` gives them, not normalized; None where it failed."""
    width: int | None = None
    height: int | None = None
    """Size of the upright image in pixels, None where it could not be decoded."""
    code: str = "ok"
    error: str = ""
    facts: tuple[Any, ...] = ()
    """mode, format, orientation and transparency of `DecodedImage`, without preprocessing."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """In place of an array in the memory that both processes see."""

    shape: tuple[int, ...]
    dtype: str


Read = Callable[[Any, DecodeWork], Any]


def main(pipe: int, memory: int) -> None:
    """Answer each question in turn, until the other end of the pipe is closed."""
    connection = Connection(pipe)
    with contextlib.suppress(EOFError, OSError):
        work, read = connection.recv()
        shared = mmap.mmap(memory, _SHARED_BYTES)
        _limit(work.memory_bytes)
        connection.send(READY)
        while True:
            answer = read(connection.recv(), work)
            pixels = getattr(answer, "pixels", None)
            if pixels is not None and pixels.nbytes <= _SHARED_BYTES:
                there = np.frombuffer(shared, pixels.dtype, pixels.size).reshape(pixels.shape)
                there[...] = pixels
                answer = replace(answer, pixels=_Shared(pixels.shape, pixels.dtype.str))
            connection.send(answer)


def read(entry: Entry, work: DecodeWork) -> Decoded:
    """Decode, resize and crop one entry; every failure is a code."""
    if entry.code:
        return Decoded(code=entry.code, error=entry.error)
    width = height = None
    try:
        image = decode(
            content(entry),
            name=entry.name,
            background=work.background,
            max_pixels=work.max_pixels,
            min_side=work.min_side,
        )
        width, height = image.width, image.height
        if work.preprocess is not None:
            return Decoded(levels(image.image, work.preprocess), width, height)
        facts = (image.mode, image.format, image.orientation, image.has_alpha)
        return Decoded(np.asarray(image.image), width, height, facts=facts)
    except ImageError as error:
        # The row has the path already.
        message = error.message.removeprefix(f"{printable(entry.name)}: ")
        return Decoded(None, width, height, error.code, message)
    except MemoryError:
        return Decoded(None, width, height, "out_of_memory", "no memory left to decode it")
    except Exception as error:  # one row must not cost the others
        reason = f"{type(error).__name__}: {printable(str(error))}"
        return Decoded(None, width, height, "corrupt", reason)


def decode_within(
    source: str | os.PathLike[str] | Entry,
    *,
    background: tuple[int, int, int] = (255, 255, 255),
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int = MEMORY_BYTES,
) -> DecodedImage:
    """`decode` of a file or a shard's member in another process, with a limit of time and memory.

    The process stays for the next file.

    Raises:
        ImageError: as `decode`; `timed_out`, `crashed` or `out_of_memory`.
    """
    entry = source
    if not isinstance(entry, Entry):
        entry = Entry(os.fspath(entry), os.fspath(entry))
    pool = _process(DecodeWork(background=background, memory_bytes=memory_bytes), timeout_s)
    try:
        (found,) = pool.decode([entry])
    except BaseException:  # Ctrl-C above all: Python waits for the pool's thread before it ends
        _process.cache_clear()
        pool.close()
        raise
    if found.pixels is None:
        raise ImageError(cast(Any, found.code), f"{printable(entry.name)}: {found.error}")
    image = Image.fromarray(found.pixels)
    mode, kind, orientation, alpha = found.facts
    return DecodedImage(image, mode, image.width, image.height, kind, orientation, alpha)


@cache
def _process(work: DecodeWork, timeout_s: float) -> DecodePool:
    """A pool of one process, until this one ends."""
    pool = DecodePool(work, 1, timeout_s, 1)
    atexit.register(pool.close)
    return pool


def _limit(memory_bytes: int) -> None:
    """Die with the parent, leave Ctrl-C to it, keep a decoder's chatter and appetite in bounds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # Windows has no nice
        os.nice(_NICE)
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with contextlib.suppress(ValueError, OSError, ImportError):
            import resource

            if memory_bytes:
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)  # libtiff and others write to the terminal
    os.dup2(null, 1)
    os.dup2(null, 2)


_NICE = 5
"""Decoding yields to the encoder, which waits for the slowest of its threads."""
_START_S = 120.0
_STARTS = 3
_PROGRAM = (
    "import sys; pipe, memory, *sys.path = sys.argv[1:]; "
    "from vitcli.images.workers import main; main(int(pipe), int(memory))"
)
LEAN = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PILLOW_BLOCKS_MAX": "8"}
"""Nothing here is worth a thread for each core, or the address space of their stacks. Pillow keeps
the memory of the last image (8 blocks of 16 MiB at most): new pages cost a sixth of decoding."""


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
        self.close()

    def close(self) -> None:
        """End the processes; what is being decoded is lost."""
        with self._lock:
            self._closed = True
            for worker in self._running:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._running:
            worker.close()

    def decode(self, entries: Iterable[Any]) -> Iterator[Any]:
        """An answer of `read` for each entry, in order; a `Decoded` where its process failed."""
        coming = iter(entries)
        waiting: deque[Future[Any]] = deque(
            self._threads.submit(self._one, entry) for entry in islice(coming, self.ahead)
        )
        while waiting:
            done = waiting.popleft().result()
            waiting += [self._threads.submit(self._one, entry) for entry in islice(coming, 1)]
            yield done

    def _one(self, entry: Any) -> Any:
        """Runs in a thread, which keeps a process of its own."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = self._start()
        try:
            worker.connection.send(entry)
            if worker.connection.poll(self.timeout_s):
                return worker.answer()
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
        raise VitcliError("decoding processes cannot be started", "lower --workers", exit_code=1)

    def _forget(self, worker: _Worker) -> None:
        worker.kill()
        worker.close()
        with self._lock:
            self._running.discard(worker)


class _Worker:
    """One process, our end of its pipe and the memory in which its pixels arrive.

    Not `multiprocessing`, whose children import the main script, and with it torch, once more.
    The child never looks for modules in the current folder.
    """

    def __init__(self, work: DecodeWork, read: Read) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        with _memory_file() as file:
            os.truncate(file, _SHARED_BYTES)  # sparse: pages exist when they are written
            self.memory = mmap.mmap(file, _SHARED_BYTES)
            numbers = theirs.fileno(), file
            path = [os.path.abspath(p) for p in sys.path if p]  # noqa: PTH100
            command = [sys.executable, "-P", "-c", _PROGRAM, *map(str, numbers), *path]
            self._process = subprocess.Popen(
                command,
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **LEAN, "PYTHONSAFEPATH": "1"},
            )
        theirs.close()
        with contextlib.suppress(OSError):  # one that has died already is not ready either
            self.connection.send((work, read))

    def ready(self) -> bool:
        try:
            return bool(self.connection.poll(_START_S) and self.connection.recv() == READY)
        except (EOFError, OSError):
            return False

    def answer(self) -> Any:
        """What the process sent, with pixels of our own."""
        answer = self.connection.recv()
        there = getattr(answer, "pixels", None)
        if isinstance(there, _Shared):
            count = int(np.prod(there.shape))
            seen = np.frombuffer(self.memory, there.dtype, count).reshape(there.shape)
            return replace(answer, pixels=seen.copy())
        return answer

    def wait(self) -> int | None:
        """The exit code of a process whose pipe has closed; negative is a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(5.0)
        return None

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def close(self) -> None:
        self.connection.close()
        with contextlib.suppress(BufferError):  # a thread that still copies lets go of it later
            self.memory.close()


@contextlib.contextmanager
def _memory_file() -> Iterator[int]:
    """A file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("vitcli", 0)
        try:
            yield number
        finally:
            os.close(number)
    else:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()


def _death(exit_code: int | None) -> Decoded:
    if exit_code == -signal.SIGKILL:
        return Decoded(code="out_of_memory", error="the decoding process was killed")
    if exit_code is not None and exit_code < 0:
        name: Any = signal.Signals(-exit_code).name
        return Decoded(code="crashed", error=f"the decoder crashed ({name})")
    return Decoded(code="crashed", error=f"the decoding process ended with code {exit_code}")
