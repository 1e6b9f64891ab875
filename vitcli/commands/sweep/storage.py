"""Optuna's storage: a journal file beside the results, or whatever storage a URL names."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.commands.sweep.result import SweepTrial
from vitcli.commands.sweep.space import Choice, quiet
from vitcli.commands.sweep.spec import Sweep, Trial
from vitcli.commands.sweep.trialdir import Results, TrialDir, lookup
from vitcli.errors import VitcliError
from vitcli.files import Lock, lock

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

HEARTBEAT_S = 15
GRACE_S = 60
"""A trial on another machine that has not been heard of for this long is taken for dead."""


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


def open_storage(url: str | None, journal: Path) -> BaseStorage:
    """The storage of a sweep.

    Raises:
        VitcliError: a URL that Optuna cannot open, or a journal that it cannot read.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    quiet()
    if url is None:
        guard: Any = JournalLock(journal)
        try:
            return JournalStorage(JournalFileBackend(str(journal), lock_obj=guard))
        except (ValueError, KeyError) as error:
            raise VitcliError(
                f"{journal} is damaged: {error}",
                "remove it: finished trials are read from their directories",
            ) from error
    for wait_s in (0.3, 1.0, None):
        try:
            return _open_url(url)
        except Exception as error:  # whatever the driver of that database raises
            # Two machines that make the same new tables at once get in each other's way.
            if wait_s is not None:
                time.sleep(wait_s * (1 + random.random()))
                continue
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise VitcliError(
                f"storage {url}: {reason}", "an Optuna storage URL, or none for a journal file"
            ) from error
    raise AssertionError("unreachable")


def _open_url(url: str) -> BaseStorage:
    import optuna
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalRedisBackend

    if url.startswith(("redis://", "rediss://", "unix://")):
        return JournalStorage(JournalRedisBackend(url))
    database = RDBStorage(url, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)
    return optuna.storages.get_storage(database)


def study_name(sweep: Sweep) -> str:
    """The sweep's name; of a search, also what makes its values comparable."""
    search = sweep.search
    if not search:
        return sweep.name
    axes = {
        key: list(axis.values) if isinstance(axis, Choice) else "range"
        for key, axis in sweep.space.items()
    }
    same = [sweep.command, dict(sweep.base), dict(sweep.repeat), axes]
    text = json.dumps([*same, search.metric, search.direction], sort_keys=True)
    return f"{sweep.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def tell(sweep: Sweep, trial: Trial, place: TrialDir, result: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry of the study keeps of a finished trial, for reports on other machines."""
    status, config = place.status(), place.config() or {}
    return {
        "params": dict(trial.params),
        "metrics": {name: lookup(result, path) for name, path in sweep.metrics.items()},
        "wall_s": status.wall_s,
        "attempts": status.attempts,
        "host": status.host,
        "threads": status.threads,
        "command": config.get("run", ""),
        "cwd": config.get("cwd", ""),
    }


def elsewhere(sweep: Sweep, results: Results) -> dict[str, SweepTrial]:
    """Trials in the study that another directory holds: what their entries tell, by trial id."""
    import optuna

    storage = open_storage(sweep.storage, results.journal)
    try:
        study = optuna.load_study(study_name=study_name(sweep), storage=storage)
    except KeyError:
        return {}
    found: dict[str, SweepTrial] = {}
    for entry in study.get_trials(deepcopy=False):
        attributes = entry.user_attrs
        state = {"COMPLETE": "done", "PRUNED": "pruned", "RUNNING": "running"}.get(entry.state.name)
        if entry.state.name == "FAIL" and "outcome" in attributes:
            state = "failed"
        for index, id in enumerate(attributes.get("trials", []) if state else []):
            known = attributes.get("told", [])
            told = known[index] if index < len(known) else {}
            found[id] = SweepTrial(
                id=id,
                state=state or "",
                params=told.get("params", attributes.get("params", {})),
                metrics=told.get("metrics", {}),
                wall_s=told.get("wall_s"),
                attempts=told.get("attempts", 0),
                error=attributes.get("error", ""),
                command=told.get("command", ""),
                cwd=told.get("cwd", ""),
                directory="",
                host=told.get("host", ""),
                threads=told.get("threads"),
            )
    return found
