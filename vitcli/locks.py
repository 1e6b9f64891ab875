"""Locks that the kernel releases when their holder dies, however it dies."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from vitcli.errors import VitcliError

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
