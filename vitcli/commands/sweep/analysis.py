"""Run a sweep, or say what a run would do."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitcli.commands.sweep.queue import Planned, Search
from vitcli.commands.sweep.report import report
from vitcli.commands.sweep.result import Event, Outcome, PlannedTrial, SweepPlan, SweepReport
from vitcli.commands.sweep.runner import Runner
from vitcli.commands.sweep.space import Command, known_commands
from vitcli.commands.sweep.spec import FOR_A_SEARCH, Sweep, load_sweep, sweep_path
from vitcli.commands.sweep.storage import check_search
from vitcli.commands.sweep.trials import (
    Results,
    arguments_of,
    expand,
    seeds_of,
    shown_command,
)
from vitcli.errors import VitcliError


def sweep(
    file: str | Path,
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    timeout: float | None = None,
    storage: str | None = None,
    fail_fast: bool = False,
    retry_failed: bool = False,
    where: Sequence[str] = (),
    sort: str | None = None,
    group: Sequence[str] | None = None,
    power: float | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> SweepReport:
    """Run what is missing of a sweep and report all of it, as `vitcli sweep` does.

    Args:
        file: the sweep's YAML file, or the name of a shipped one such as `"position"`; a directory
            that a sweep has made is only read.
        out: where trials go; `runs/NAME` by default.
        jobs: trials at a time, which share the threads; by default what the file says.
        timeout: seconds per trial; by default what the file says.
        storage: a database that several machines share, for a search.
        fail_fast: start no more trials once one has failed.
        retry_failed: run failed trials again.
        where: conditions such as `"lr<=0.01"` that reported trials meet.
        sort: a name to sort by, `-name` for the largest first.
        group: keys whose values trials of a group share; by default all that varies but the seeds.
        power: also say how many seeds would detect a difference of this size.
        on_event: is called with the state of the sweep.

    Raises:
        VitcliError: a file, a value or a directory that is not what it must be.
    """
    path = sweep_path(file, or_directory=True)
    loaded, results, command = opened(path, out, to_run=not path.is_dir())
    loaded = changed(loaded, jobs=jobs, timeout=timeout, storage=storage)
    if command:
        run(
            loaded,
            results,
            command,
            fail_fast=fail_fast,
            retry_failed=retry_failed,
            on_event=on_event,
        )
    named = bool(command or storage)
    return report(loaded, results, where, sort, group, power=power, named=named)


def opened(
    given: str | Path, out: str | Path | None, *, to_run: bool
) -> tuple[Sweep, Results, Command | None]:
    """A sweep and its directory; to run it, also its command, which has accepted every value.

    Args:
        given: its file, the name of a shipped one or, to read it, the directory of its trials.
        out: that directory; by default runs/NAME.

    Raises:
        VitcliError: as `load_sweep` and `check_arguments`, or where no trials are to be read.
    """
    path = sweep_path(given, or_directory=not to_run)
    if path.is_dir():
        results = Results(path)
        if to_run:
            raise VitcliError(
                f"{path}: is a directory (expected a YAML file)", f"vitcli sweep --report {path}"
            )
        if not results.sweep_file.is_file():
            raise VitcliError(f"{path}: is not a sweep directory", "run `vitcli sweep --help`")
        return load_sweep(results.sweep_file), results, None
    commands = known_commands() if to_run else None
    loaded = load_sweep(path, commands)
    results = Results(Path(out) if out is not None else Path("runs") / loaded.name)
    if commands:
        check_arguments(loaded, commands[loaded.command])
        return loaded, results, commands[loaded.command]
    if not results.sweep_file.is_file():
        raise VitcliError(
            f"{results.root}: holds no trials of {given}", "name the directory with --out"
        )
    return loaded, results, None


def changed(sweep: Sweep, **given: Any) -> Sweep:
    """The sweep with what the caller says in place of its file."""
    if given.get("storage") and not sweep.search:
        raise VitcliError(f"--storage: {FOR_A_SEARCH[0]}", FOR_A_SEARCH[1])
    return sweep.model_copy(update={k: v for k, v in given.items() if v is not None})


def run(
    sweep: Sweep,
    results: Results,
    command: Command,
    *,
    fail_fast: bool = False,
    retry_failed: bool = False,
    program: Sequence[str] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Run the trials that are missing.

    Raises:
        VitcliError: a file that the sweep needs is missing, the directory holds something else, or
            the search's storage cannot be opened.
        KeyboardInterrupt: after everything has been put in order.
    """
    check_search(sweep)
    for path, made_by in sweep.needs.items():
        if not Path(path).exists():
            raise VitcliError(f"{sweep.name}: {path}: is missing", made_by)
    results.create(sweep.name, sweep.source, sweep.storage)
    study = (Search if sweep.search else Planned)(sweep, results, retry_failed)
    return Runner(sweep, command, results, study, fail_fast, program, on_event).run()


def plan(
    sweep: Sweep,
    results: Results,
    command: Command,
    *,
    retry_failed: bool = False,
    program: Sequence[str] | None = None,
) -> SweepPlan:
    """The trials known in advance, with their command lines, and their status.

    Raises:
        VitcliError: as `expand` and `report`.
    """
    seeds = max([1, *map(len, sweep.repeat.values())])
    found = report(sweep, results).trials
    states = {trial.id: trial.state for trial in found}
    trials = tuple(
        PlannedTrial(
            trial.id,
            states[trial.id],
            trial.params,
            shown_command(program, arguments_of(sweep, command, trial, results.trial(trial.id))),
        )
        for trial in expand(sweep)
    )
    kept = {"done", "pruned"} if retry_failed else {"done", "pruned", "failed"}
    drawn = sum(trial.state in kept for trial in found) // seeds
    return SweepPlan(
        name=sweep.name,
        axes=tuple(sweep.axes),
        trials=trials,
        to_run=sum(trial.state not in kept for trial in trials),
        draws=max(0, sweep.search.trials - drawn) if sweep.search else 0,
        seeds_each=seeds,
        total=len(trials),
        shape=sweep.shape,
        notes=tuple(sweep.notes()),
    )


MOST_CHECKED = 1000
"""So many combinations of values are checked with each other; of more, each value once."""


def check_arguments(sweep: Sweep, command: Command) -> None:
    """Have the command read every value of every option and config key before any trial is run.

    Values are checked together as the trials combine them, seeds apart, up to MOST_CHECKED
    combinations; after that each value once. Of a search's ranges both ends are checked.

    Raises:
        VitcliError: with the arguments it refuses.
    """
    read: set[tuple[str, str]] = set()
    first = {(key, repr(seeds[0])) for key, seeds in sweep.repeat.items()}
    for index, given in enumerate(_to_check(sweep)):
        params = sweep.spelled_out(given)
        values = {(key, repr(value)) for key, value in params.items()}
        apart = {(key, repr(value)) for key, value in params.items() if key in sweep.repeat}
        if read and values <= read and (index >= MOST_CHECKED or apart - first):
            continue
        read |= values
        shown = command.name
        try:
            shown = shlex.join(command.arguments(params))
            command.check(params)
        except VitcliError as error:
            raise VitcliError(
                f"{sweep.source}: `vitcli {shown}`: {error.message}", error.hint
            ) from error


def _to_check(sweep: Sweep) -> Iterator[Mapping[str, Any]]:
    """The trials; of a search, a point with each choice and each end of a range."""
    trials = expand(sweep)
    if not sweep.search:
        yield from (trial.params for trial in trials)
        return
    first = {key: axis.ends()[0] for key, axis in sweep.space.items()}
    for seed in seeds_of(sweep):
        yield {**sweep.base, **first, **seed}
    for key, axis in sweep.space.items():
        for value in axis.ends():
            yield {**sweep.base, **first, **seeds_of(sweep)[0], key: value}
