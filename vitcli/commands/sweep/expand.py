"""From a sweep to its trials, and the names they go by."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vitcli.commands.sweep.options import Command
from vitcli.commands.sweep.space import draw
from vitcli.commands.sweep.spec import Sweep
from vitcli.errors import VitcliError


@dataclass(frozen=True)
class Trial:
    """One run of the command: every option and config key it is given."""

    id: str
    params: Mapping[str, Any]


def trial_id(command: str, params: Mapping[str, Any]) -> str:
    """Twelve hex digits of the SHA-256 of command and parameters.

    Neither the order of the keys nor the spelling of a number (1, 1.0, 1e0) matters.
    """
    same = {"command": command, "params": _one_spelling(params)}
    plain = json.dumps(same, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:12]


def expand(sweep: Sweep) -> list[Trial]:
    """Every trial that is known in advance: zip x grid x random, then the seeds.

    The seeds are the outermost loop, so that a sweep that is cut off has covered the whole space
    with the first seed. A `search` has none: Optuna draws its trials one after the other.
    """
    if sweep.search:
        return []
    zipped = [
        dict(zip(sweep.zip, row, strict=True)) for row in zip(*sweep.zip.values(), strict=True)
    ] or [{}]
    cells = [
        dict(zip(sweep.grid, row, strict=True)) for row in itertools.product(*sweep.grid.values())
    ]
    drawn: list[dict[str, Any]] = [{}]
    if sweep.random:
        drawn = draw(sweep.space, sweep.random.trials, sweep.random.seed)
    found: dict[str, Trial] = {}
    for seed in _seeds(sweep):
        for one, two, three in itertools.product(zipped, cells, drawn):
            trial = _trial(sweep, {**one, **two, **three, **seed})
            found.setdefault(trial.id, trial)
    return list(found.values())


def repeats(sweep: Sweep, point: Mapping[str, Any]) -> list[Trial]:
    """The trials of one point of a search, one a seed."""
    return [_trial(sweep, {**point, **seed}) for seed in _seeds(sweep)]


def belongs(sweep: Sweep, params: Mapping[str, Any]) -> bool:
    """Whether a trial found on disk is one that this search could have drawn."""
    free = {*sweep.space, *sweep.repeat}
    fixed = {key: value for key, value in params.items() if key not in free}
    return (
        fixed == dict(sweep.base)
        and all(key in params and axis.holds(params[key]) for key, axis in sweep.space.items())
        and all(params.get(key) in seeds for key, seeds in sweep.repeat.items())
    )


def check_arguments(sweep: Sweep, command: Command) -> None:
    """Have the command's own parser read every value of every option before any trial is run.

    Raises:
        VitcliError: with the arguments it refuses.
    """
    trials = expand(sweep)
    if sweep.search:
        trials = repeats(sweep, draw(sweep.space, 1, 0)[0])
    read: set[tuple[str, str]] = set()
    for trial in trials:
        values = {(key, repr(value)) for key, value in trial.params.items()}
        if read and values <= read:
            continue
        read |= values
        shown = command.name
        try:
            arguments = command.arguments(trial.params)
            shown = " ".join(arguments)
            command.check(arguments[1:])
        except VitcliError as error:
            raise VitcliError(
                f"{sweep.source}: `vitcli {shown}`: {error.message}", error.hint
            ) from error


def _one_spelling(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _one_spelling(item) for key, item in value.items()}
    return [_one_spelling(item) for item in value] if isinstance(value, list) else value


def _seeds(sweep: Sweep) -> Iterator[dict[str, Any]]:
    if not sweep.repeat:
        yield {}
    for key, seeds in sweep.repeat.items():
        yield from ({key: seed} for seed in seeds)


def _trial(sweep: Sweep, varied: Mapping[str, Any]) -> Trial:
    params = {**sweep.base, **varied}
    return Trial(trial_id(sweep.command, params), params)
