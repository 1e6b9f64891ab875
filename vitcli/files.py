"""Files are never half-written: write beside, flush, rename."""

from __future__ import annotations

import contextlib
import os
import tempfile
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
