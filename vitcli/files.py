"""Files are never half-written: write beside, flush, rename."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vitcli.errors import VitcliError


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` when the block ends well, and vanishes when it does not.

    Raises:
        VitcliError: the place cannot be written (exit code 1).
    """
    path = Path(path)
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(fd, 0o666 & ~umask)
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)  # noqa: PTH105 (one call for both platforms)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        if isinstance(error, OSError) and not isinstance(error, InterruptedError):
            raise _cannot_write(path, error) from error
        raise


def _cannot_write(path: Path, error: OSError) -> VitcliError:
    return VitcliError(
        f"cannot write {path}: {error.strerror or error}",
        "check that the folder exists, may be written and has room",
        exit_code=1,
    )


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PROBE_S = 0.01
"""A report may hold a lock for an instant to see whether anyone else does."""


def check_platform() -> None:
    """Raises VitcliError where the system has no flock."""
    if fcntl is None:
        raise VitcliError("sweeps need POSIX file locks", "run them on Linux or macOS, or in WSL")


def try_lock(path: Path) -> int | None:
    """A file descriptor that holds an exclusive lock on `path`, or None while another does.

    The lock belongs to the open file: a child that inherits the descriptor holds it too, so it is
    free only when both are gone. Linux gives flock the same meaning over NFS.
    """
    fd = _open(path)
    for attempt in range(3):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if attempt < 2:
                time.sleep(PROBE_S)
    os.close(fd)
    return None


def is_held(path: Path) -> bool:
    """Whether any process holds `path`; one that was never locked is free."""
    if not path.exists():
        return False
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # also in a directory that others own
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def lock(path: Path) -> int:
    """A file descriptor that holds `path`, after waiting for it; closing it releases it."""
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path`, waiting for it."""
    fd = lock(path)
    try:
        yield
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def printable(path: str | bytes | os.PathLike[str]) -> str:
    """One line for any file name: what cannot be printed is shown as an escape.

    Newlines, other control characters and the bytes of a name that is not UTF-8 come out as
    `\\n`, `\\x1b`, `\\xff`; all other characters stay as they are.
    """
    name = os.fsdecode(path)
    return "".join(c if c.isprintable() else _escape(c) for c in name)


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that os.fsdecode kept as a lone surrogate
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def is_folder(path: str) -> bool:
    """Also for what no file can be called; `Path.is_dir` raises for too long a name."""
    return os.path.isdir(path)  # noqa: PTH112
