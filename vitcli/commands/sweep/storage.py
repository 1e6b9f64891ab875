"""Where a search keeps its points, and how they are read again.

That is a journal file beside the results, or a database of a kind that stores data and never
objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import mmap
import os
import random
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from vitcli.commands.sweep.result import NOT_STARTED, SweepTrial
from vitcli.commands.sweep.space import Choice
from vitcli.commands.sweep.spec import Sweep
from vitcli.config.yaml import checked
from vitcli.errors import VitcliError, install_extra
from vitcli.files import Lock, lock

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

HEARTBEAT_S = 15
GRACE_S = 60
"""A trial on another machine that has not been heard of for this long is taken for dead."""
STORAGES = ("sqlite", "postgresql", "mysql", "mariadb")
"""Databases that hold data alone; Redis, which Optuna also knows, holds pickles."""


def check_search(sweep: Sweep) -> None:
    """Refuse, before anything is made, a search that cannot run.

    Raises:
        VitcliError: Optuna is not installed, or the storage is of another kind.
    """
    if sweep.search and importlib.util.find_spec("optuna") is None:
        raise VitcliError("search: needs Optuna, which is not installed", install_extra("search"))
    if sweep.storage:
        check_storage(sweep.storage)


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


def is_file_storage(url: str) -> bool:
    """Whether a storage is an SQLite file that exists: reading it opens no connection."""
    path = urlsplit(url).path.removeprefix("/")
    return check_storage(url) == "sqlite" and bool(path) and Path(path).is_file()


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
        if size := file.seek(0, os.SEEK_END):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                end = text.rfind(b"\n") + 1
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
            reason = _first_line(error)
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
        raise VitcliError(
            f"{journal}: is damaged ({type(error).__name__}: {_first_line(error)})",
            f"remove {journal}; finished trials are read from their directories",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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


STATES = {"COMPLETE": "done", "FAIL": "failed", "PRUNED": "pruned", "RUNNING": "running"}
"""Of a trial, by that of its entry."""


def study_name(sweep: Sweep) -> str:
    """The sweep's name, and what makes the values of two searches comparable."""
    search = sweep.search
    assert search
    axes = {
        key: list(axis.values) if isinstance(axis, Choice) else "range"
        for key, axis in sweep.space.items()
    }
    repeat = {key: list(seeds) for key, seeds in sweep.repeat.items()}
    same = [sweep.command, sweep.base, repeat, axes]
    same += [sweep.configs] if sweep.configs else []
    text = json.dumps([*same, search.metric, search.direction], sort_keys=True)
    return f"{sweep.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def remote_trials(sweep: Sweep, journal: Path) -> dict[str, SweepTrial]:
    """The trials in a search's storage, as far as their entries tell of them, by trial id.

    Raises:
        VitcliError: the storage cannot be read, or holds what no sweep has written.
    """
    import optuna

    assert sweep.storage
    shown, other = f"storage {masked_url(sweep.storage)}", "name another --storage"
    opened = open_storage(sweep.storage, journal, reading=True)
    try:
        study = optuna.load_study(study_name=study_name(sweep), storage=opened)
        entries = study.get_trials(deepcopy=False)
    except KeyError:
        return {}
    except Exception as error:
        raise VitcliError(
            f"{shown}: is not the storage of a sweep ({_first_line(error)})", "check the URL"
        ) from error
    found: dict[str, SweepTrial] = {}
    for entry in entries:
        attributes = entry.user_attrs
        state = STATES.get(entry.state.name)
        if state == "failed" and "outcome" not in attributes:
            state = None  # it was given up
        known = attributes.get("told", [])  # the name in storages that exist
        for index, id in enumerate(trial_ids(entry) if state else []):
            kept = known[index] if isinstance(known, list) and index < len(known) else {}
            fields = {
                **NOT_STARTED,
                "params": attributes.get("params", {}),
                **checked(kept, shown, dict[str, Any], other),
                "id": id,
                "state": state,
                "directory": "",
                "curve": None,
                "error": str(attributes.get("error", "")),
            }
            found[id] = checked(fields, shown, SweepTrial, other)
    return found


_ID = re.compile(r"[0-9a-f]{12}")


def trial_ids(entry: FrozenTrial) -> list[str]:
    """The ids of an entry's trials.

    Raises:
        VitcliError: they are not ids; they name directories.
    """
    ids = entry.user_attrs.get("trials", [])
    if not isinstance(ids, list) or not all(isinstance(i, str) and _ID.fullmatch(i) for i in ids):
        raise VitcliError(
            f"study, trial {entry.number}: trials: is not a list of trial ids (got {ids!r})",
            "name another --out or --storage: something else has written to this one",
        )
    return ids
