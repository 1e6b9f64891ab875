"""What a run would do, without doing it."""

from __future__ import annotations

from collections.abc import Sequence

from vitcli.commands.sweep.expand import expand
from vitcli.commands.sweep.options import Command
from vitcli.commands.sweep.report import report
from vitcli.commands.sweep.result import PlannedTrial, SweepPlan
from vitcli.commands.sweep.spec import Sweep
from vitcli.commands.sweep.trialdir import Results, placed, shown_command

KEPT = frozenset({"done", "pruned"})


def plan(
    sweep: Sweep,
    results: Results,
    command: Command,
    *,
    retry_failed: bool = False,
    program: Sequence[str] | None = None,
) -> SweepPlan:
    """The trials known in advance, with their command lines, and how they stand now."""
    found = report(sweep, results).trials
    states = {trial.id: trial.state for trial in found}
    trials = tuple(
        PlannedTrial(
            trial.id,
            states[trial.id],
            trial.params,
            shown_command(
                program,
                command.arguments(placed(trial.params, results.trial(trial.id).path)),
            ),
        )
        for trial in expand(sweep)
    )
    kept = KEPT if retry_failed else KEPT | {"failed"}
    seeds = max([1, *map(len, sweep.repeat.values())])
    drawn = len([t for t in found if t.state in kept]) // seeds if sweep.search else 0
    return SweepPlan(
        name=sweep.name,
        axes=tuple(sweep.axes),
        trials=trials,
        to_run=sum(trial.state not in kept for trial in trials),
        draws=max(0, sweep.search.trials - drawn) if sweep.search else 0,
        seeds_each=seeds,
    )
