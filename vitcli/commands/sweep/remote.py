"""What a sweep's directories tell each other through a shared storage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vitcli.commands.sweep.expand import Trial
from vitcli.commands.sweep.metrics import lookup
from vitcli.commands.sweep.result import SweepTrial
from vitcli.commands.sweep.space import Choice
from vitcli.commands.sweep.spec import Sweep
from vitcli.commands.sweep.storage import open_storage
from vitcli.commands.sweep.trialdir import Results, TrialDir


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
