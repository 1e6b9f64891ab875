"""Files are never half-written, one process at a time holds a lock, and any name fits one line."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Any

from vitcli.errors import VitcliError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# -- Writing -------------------------------------------------------------------------------------

_OPEN_FILES = re.compile(r"/dev/(stdin|stdout|stderr)|/(?:dev|proc/self)/fd/(\d+)")
_STANDARD = {"stdin": 0, "stdout": 1, "stderr": 2}


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that becomes `path` when the block ends well, and vanishes when it does not.

    A regular file is replaced in one rename and keeps its permissions; a link is followed to its
    target; a device, a pipe or an open file (`/dev/stdout`) receives the whole content at the end
    and stays what it is. What a killed process left beside `path` is removed.

    Raises:
        VitcliError: `path` cannot be written, or is a folder or a socket (exit code 1).
    """
    path = Path(path)
    with _writing(path):
        if (there := _open_in_place(path)) is not None:
            with os.fdopen(there, "wb") as device, tempfile.TemporaryFile() as file:
                yield file
                file.seek(0)
                shutil.copyfileobj(file, device)
            return
        target = Path(os.path.realpath(path))
        with _part(target, folder=False) as (fd, part):
            if target.exists():
                _set_mode(part, stat.S_IMODE(target.stat().st_mode))
            with os.fdopen(os.dup(fd), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)  # noqa: PTH105 (one call for both platforms)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A new folder that becomes `path`, with all its files, when the block ends well.

    Raises:
        VitcliError: something is there already, or it cannot be written (exit code 1).
    """
    path = Path(path)
    with _writing(path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise VitcliError(
                f"{path}: already exists", "give the name of a new directory", exit_code=2
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with _part(Path(os.path.realpath(path)), folder=True) as (_, part):
            yield part
            for file in part.iterdir():
                as_new(file)
                sync(file)
            part.replace(path)


def check_output(path: Path, *suffixes: str, option: str = "") -> None:
    """Refuse a file that cannot be written, before the work that it is to hold.

    Args:
        suffixes: how its name may end; without any, as it likes.
        option: what named it, for the error.

    Raises:
        VitcliError: another suffix, or a folder that is missing.
    """
    subject = f"{option} {path}".strip()
    if suffixes and not path.name.endswith(suffixes):
        other = shlex.quote(str(path.parent / (path.stem + suffixes[0])))
        raise VitcliError(
            f"{subject}: unknown suffix (got {path.suffix or 'none'}, expected "
            f"{', '.join(suffixes)})",
            f"{option} {other}" if option else f"write {other}",
        )
    if not path.parent.is_dir():
        raise VitcliError(
            f"{subject}: the folder is missing", f"mkdir -p {shlex.quote(str(path.parent))}"
        )


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except InterruptedError:
        raise
    except OSError as error:
        raise VitcliError(
            f"cannot write {path}: {error.strerror or error}",
            "check that the folder exists, may be written and has room",
            exit_code=1,
        ) from error


def _open_in_place(path: Path) -> int | None:
    """A descriptor of what must not be replaced; None where `path` is or will be a regular file.

    Raises:
        OSError: a folder, a socket, or a link that leads nowhere sensible.
    """
    if match := _OPEN_FILES.fullmatch(str(path)):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        name, number = match.groups()
        return os.dup(_STANDARD[name] if name else int(number))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode) and not str(path).startswith("/proc/"):
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(None, "is a folder")
    if stat.S_ISSOCK(mode):
        raise OSError(None, "is a socket")
    return os.open(path, os.O_WRONLY)


@contextlib.contextmanager
def _part(target: Path, folder: bool) -> Iterator[tuple[int, Path]]:
    """A new file or folder beside `target`, locked while it is written; it vanishes at the end."""
    _remove_abandoned(target)
    fd, part = _new_part(target, folder)
    try:
        yield fd, part
    finally:
        with contextlib.suppress(OSError):
            if folder:
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink()  # renamed away if all went well
        if fd >= 0:
            os.close(fd)


def _beside(target: Path) -> str:
    """How the names of its parts begin; within the 255 bytes of a file's name."""
    name = os.fsencode(target.name)
    return f".{target.name}" if len(name) <= 200 else f".{hashlib.sha256(name).hexdigest()}"


def _new_part(target: Path, folder: bool) -> tuple[int, Path]:
    while True:
        part = target.with_name(f"{_beside(target)}.{secrets.token_hex(6)}.part")
        if folder:
            part.mkdir()
            if fcntl is None:
                return -1, part
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        else:
            binary = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | binary, 0o666)
        if fcntl is None:
            return fd, part
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if part.exists():  # else a rerun took it for abandoned before it was locked
            return fd, part
        os.close(fd)


def _remove_abandoned(target: Path) -> None:
    """Remove the parts whose writers are dead: nobody holds their locks."""
    if fcntl is None:
        return
    ours = re.compile(re.escape(_beside(target)) + r"\.[0-9a-f]{12}\.part")
    with contextlib.suppress(OSError):
        for part in target.parent.iterdir():
            if ours.fullmatch(part.name) and not part.is_symlink() and not is_held(part):
                shutil.rmtree(part) if part.is_dir() else part.unlink()


def as_new(path: Path) -> None:
    """Give `path` the permissions of any new file; safetensors leaves its files to their owner."""
    umask = os.umask(0o077)
    os.umask(umask)
    _set_mode(path, (0o777 if path.is_dir() else 0o666) & ~umask)


def _set_mode(path: Path, mode: int) -> None:
    with contextlib.suppress(PermissionError):  # FAT and exFAT have no such modes
        path.chmod(mode)


def sync(path: Path) -> None:
    """Wait until a file, or on POSIX a folder, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- Locks ---------------------------------------------------------------------------------------

PROBE_S = 0.01
"""A report may hold a lock for an instant to see whether anyone else does."""


@dataclass(eq=False)
class Lock:
    """A lock on a file, held until `close` or the end of the process.

    On POSIX it is flock's: it belongs to the open file, so a child that inherits `fd` holds it too,
    and it is free when both are gone, however they ended. Linux gives it the same meaning over NFS.
    On other systems it is filelock's, which has no shared locks and hands none to children; `fd`
    is None then.
    """

    fd: int | None = None
    other: Any = None

    def close(self) -> None:
        """Release it; a second time does nothing."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)
        if self.other is not None:
            self.other.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock(path: Path, shared: bool = False) -> Lock:
    """Hold a file or folder, after waiting for it."""
    held = _hold(path, shared, wait=True)
    assert held is not None
    return held


def try_lock(path: Path, shared: bool = False) -> Lock | None:
    """Hold a file or folder, or None while another process does.

    Raises:
        OSError: it cannot be opened, or its file system has no locks.
    """
    return _hold(path, shared, wait=False)


def _hold(path: Path, shared: bool, wait: bool) -> Lock | None:
    if fcntl is None:
        return _other_lock(path, shared, wait)
    if path.is_dir():
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    else:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        for pause_s in (PROBE_S, PROBE_S, 0):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, how)
                return Lock(fd)
            time.sleep(pause_s)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def is_held(path: Path) -> bool:
    """Whether any process holds `path`; one that was never locked is free."""
    if not path.exists():
        return False
    if fcntl is None:
        held = _other_lock(path, shared=False, wait=False)
        if held is not None:
            held.close()
        return held is None
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # also in a directory that others own
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _other_lock(path: Path, shared: bool, wait: bool) -> Lock | None:
    if shared:
        return Lock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "only soft file lock is available"
        import filelock

    if path.is_dir():
        beside = path / ".lock"
    else:
        path.touch()
        beside = path.with_name(path.name + ".held")
    other = filelock.FileLock(beside)
    try:
        other.acquire(blocking=wait)
    except filelock.Timeout:
        return None
    return Lock(other=other)


# -- Names ---------------------------------------------------------------------------------------


def data_size(count: int) -> str:
    """`1.25 GiB`, `3.1 MiB`, `64.2 KiB`."""
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def printable(path: str | bytes | os.PathLike[str]) -> str:
    """One line for any text: what cannot be printed is shown as an escape.

    Newlines, other control characters, marks that change the direction of text and the bytes of a
    name that is not UTF-8 come out as `\\n`, `\\x1b`, `\\u202e`, `\\xff`; all other characters stay
    as they are.
    """
    name = os.fsdecode(path)
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else _escape(c) for c in name)


SHOWN = 3
"""Names in a message."""


def first_names(names: Collection[str], count: int | None = None) -> str:
    """The first three names as text, and how many more there are, of `count` or of all."""
    rest = (len(names) if count is None else count) - SHOWN
    shown = ", ".join(map(printable, itertools.islice(names, SHOWN)))
    return shown + (f" and {rest:,} more" if rest > 0 else "")


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that os.fsdecode kept as a lone surrogate
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")


def is_folder(path: str) -> bool:
    """Also for what no file can be called; `Path.is_dir` raises for too long a name."""
    return os.path.isdir(path)  # noqa: PTH112


def filled_page(package: str, name: str, data: dict[str, Any]) -> bytes:
    """A page of the package with its data; "<" cannot end the script element that holds them."""
    template = (resources.files(package) / name).read_text("utf-8")
    return template.replace("{{DATA}}", json.dumps(data).replace("<", "\\u003c")).encode()


def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
