"""Where a search keeps its points: a journal file beside the results, or a database."""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from vitcli.errors import VitcliError
from vitcli.files import Lock, lock

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


HEARTBEAT_S = 15
GRACE_S = 60
"""A trial on another machine that has not been heard of for this long is taken for dead."""
STORAGES = ("sqlite", "postgresql", "mysql", "mariadb")
"""Databases that hold data alone; Redis, which Optuna also knows, holds pickles."""


def check_storage(url: str) -> str:
    """The kind of a storage.

    Raises:
        VitcliError: not one of STORAGES.
    """
    scheme = urlsplit(url).scheme.partition("+")[0]
    if scheme not in STORAGES:
        raise VitcliError(
            f"storage {masked_url(url)}: vitcli does not support this kind (got "
            f"{scheme or 'no URL'}, expected {', '.join(STORAGES)})",
            "name a database, e.g. --storage sqlite:///shared.db, or none for a journal file",
        )
    return scheme


class JournalLock:
    """The journal's lock, which a killed process cannot leave behind.

    Optuna's own lock is a file that outlives its maker and is broken after half a minute. This one
    also cuts off the half line of a writer that was killed, which would spoil the line after it.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._lock: Lock | None = None

    def acquire(self) -> bool:
        self._lock = lock(self._journal.with_name(self._journal.name + ".lock"))
        cut_torn_line(self._journal)
        return True

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def cut_torn_line(path: Path) -> None:
    """Drop what follows the last newline."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def open_storage(url: str | None, journal: Path, *, reading: bool = False) -> BaseStorage:
    """The storage of a search.

    Args:
        reading: make no tables, for a report.

    Raises:
        VitcliError: a URL that Optuna cannot open, or a journal that it cannot read.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    quiet()
    if url is None:
        guard: Any = JournalLock(journal)
        with journal_errors(journal):
            return JournalStorage(JournalFileBackend(str(journal), lock_obj=guard))
    check_storage(url)
    for wait_s in (0.3, 1.0, None):
        try:
            return _open_database(url, reading)
        except Exception as error:  # whatever the driver of that database raises
            # Two machines that make the same new tables at once get in each other's way.
            if wait_s is not None and not isinstance(error, ImportError):
                time.sleep(wait_s * (1 + random.random()))
                continue
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            for secret in {urlsplit(url).password or "", unquote(urlsplit(url).password or "")}:
                reason = reason.replace(secret, "***") if secret else reason
            raise VitcliError(
                f"storage {masked_url(url)}: {reason.replace(url, masked_url(url))}",
                "check the URL, the database and its driver, or leave --storage out",
            ) from error
    raise AssertionError("unreachable")


def _open_database(url: str, reading: bool) -> BaseStorage:
    import optuna
    from optuna.storages import RDBStorage

    database = RDBStorage(
        url,
        heartbeat_interval=HEARTBEAT_S,
        grace_period=GRACE_S,
        skip_table_creation=reading,
    )
    return optuna.storages.get_storage(database)


@contextlib.contextmanager
def journal_errors(journal: Path) -> Iterator[None]:
    """What Optuna raises on a journal that something else has written, as one line."""
    try:
        yield
    except (VitcliError, OSError):
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise VitcliError(
            f"{journal}: is damaged ({type(error).__name__}: {reason})",
            f"remove {journal}; finished trials are read from their directories",
        ) from error


def quiet() -> None:
    """Optuna logs every trial; the sweep's own progress says it once."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")


_SECRETS = (
    (re.compile(r"(://[^:/@]*):.*@"), r"\1:***@"),
    (re.compile(r"([?&][^=&]*(?:pass|pwd|secret|token)[^=&]*)=[^&]*", re.IGNORECASE), r"\1=***"),
)


def masked_url(url: str) -> str:
    """A storage's URL as it may be shown and kept: without the passwords in it."""
    for pattern, shown in _SECRETS:
        url = pattern.sub(shown, url)
    return url
