"""vitcli sweep"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitcli.errors import VitcliError
from vitcli.ui import figures as answers
from vitcli.ui.options import Output, PlotOption, grouped
from vitcli.ui.tables import show as answer_with

if TYPE_CHECKING:
    from vitcli.commands.sweep.result import SweepReport
    from vitcli.commands.sweep.spec import Sweep

PROGRAM_VARIABLE = "VITCLI_SWEEP_PROGRAM"
"""What trials run in place of this vitcli, e.g. `srun -n1 vitcli`. Never read from a sweep's file,
so that running a file runs vitcli and nothing else."""


def run_option(*names: str, **how: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Running", **how)


def report_option(*names: str, **how: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Reporting", **how)


@grouped
def sweep(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.yaml]", help="The sweep to run.")
    ] = None,
    out: Annotated[
        Path | None,
        run_option("--out", metavar="DIR", help="Where trials go (default: runs/NAME)."),
    ] = None,
    report: Annotated[
        Path | None,
        report_option("--report", metavar="DIR|FILE", help="Run nothing: show what is there."),
    ] = None,
    jobs: Annotated[
        int | None,
        run_option("--jobs", min=1, metavar="N", help="Trials at a time; they share the threads."),
    ] = None,
    timeout: Annotated[
        float | None,
        run_option("--timeout", min=0.001, metavar="S", help="Seconds a trial may take."),
    ] = None,
    storage: Annotated[
        str | None,
        run_option(
            "--storage",
            metavar="URL",
            help="Optuna storage that several machines share (default: a journal file in DIR).",
        ),
    ] = None,
    dry_run: Annotated[
        bool, run_option("--dry-run", help="Print the trials and their commands; run none.")
    ] = False,
    fail_fast: Annotated[
        bool, run_option("--fail-fast", help="Start no more trials once one has failed.")
    ] = False,
    retry_failed: Annotated[
        bool, run_option("--retry-failed", help="Run failed trials again.")
    ] = False,
    where: Annotated[
        list[str] | None,
        report_option("--where", metavar="COND", help="Show norm=post, 'lr<=0.01', … Repeatable."),
    ] = None,
    sort: Annotated[
        str | None,
        report_option("--sort", metavar="NAME", help="Sort by it; -NAME for the largest first."),
    ] = None,
    group: Annotated[
        str | None,
        report_option(
            "--group", metavar="KEY,…", help="Mean and spread of trials that agree here."
        ),
    ] = None,
    each: Annotated[bool, report_option("--each", help="A row a trial, not a group.")] = False,
    stale: Annotated[
        bool, report_option("--stale", help="Also trials the file no longer asks for.")
    ] = False,
    show: Annotated[
        str | None,
        report_option("--show", metavar="TRIAL", help="All about one trial and its command."),
    ] = None,
    *,
    output: Output,
    csv: Annotated[
        Path | None, report_option("--csv", metavar="FILE", help="Write a row a trial.")
    ] = None,
    parquet: Annotated[
        Path | None, report_option("--parquet", metavar="FILE", help="Write a row a trial.")
    ] = None,
    plot: PlotOption = None,
    plot_kind: Annotated[
        str,
        report_option("--plot-kind", metavar="KIND", help="auto|bars|lines|heatmap|curves|search."),
    ] = "auto",
    metric: Annotated[
        str | None, report_option("--metric", metavar="NAME", help="What --plot draws.")
    ] = None,
) -> None:
    """Run a command over a space that a YAML file describes, and show what came out.

    Run it again and it does what is missing. Several processes and machines may run the same sweep.
    Trials run this vitcli, or the program that VITCLI_SWEEP_PROGRAM names: "srun -n1 vitcli".

    \b
    Examples:
      vitcli sweep experiments/norm-warmup-init.yaml --out runs/norm --jobs 2
      vitcli sweep --report runs/norm --sort -accuracy --plot norm.png
      vitcli sweep --report runs/norm --where norm=post --csv post.csv
    """
    from vitcli.commands.sweep.figure import check_kind
    from vitcli.commands.sweep.report import View, check_files, never_found
    from vitcli.commands.sweep.report import report as gather
    from vitcli.commands.sweep.trialdir import Results
    from vitcli.commands.sweep.view import tables
    from vitcli.ui.console import note, warn
    from vitcli.ui.figures import check_figure_file

    _check_together(
        {
            "--report runs nothing": (
                report,
                {
                    "--jobs": jobs,
                    "--timeout": timeout,
                    "--dry-run": dry_run,
                    "--fail-fast": fail_fast,
                    "--retry-failed": retry_failed,
                },
            ),
            "--dry-run has nothing to report": (
                dry_run,
                {
                    "--where": where,
                    "--sort": sort,
                    "--group": group,
                    "--each": each,
                    "--stale": stale,
                    "--show": show,
                    "--csv": csv,
                    "--parquet": parquet,
                    "--plot": plot,
                },
            ),
            "there is no --plot": (
                plot is None,
                {"--metric": metric, "--plot-kind": plot_kind != "auto"},
            ),
        }
    )
    check_figure_file(plot)
    check_kind(plot_kind)
    check_files(csv, parquet)
    if (file is None) == (report is None):
        raise VitcliError("give a sweep's file to run it, or --report DIR to read it", "not both")
    loaded, place = _load(file or report, out, running=file is not None)  # type: ignore[arg-type]
    loaded = _with(loaded, jobs=jobs, timeout=timeout, storage=storage)
    results = Results(place)
    view = View(
        where=tuple(where or ()),
        sort=sort,
        group=tuple(key for key in group.split(",") if key) if group is not None else None,
        stale=stale,
    )
    code = 0
    if dry_run:
        return _dry_run(loaded, results, retry_failed, output.form)
    if report is None:
        code = _run(loaded, results, fail_fast, retry_failed)
    found = gather(loaded, results, view)
    for name in never_found(found):
        key = loaded.metrics[name]
        warn(f"no finished trial has {key}: correct it under metrics, no trial runs again for it")
    if csv or parquet:
        from vitcli.commands.sweep.report import write_csv, write_parquet

        for path, write in ((csv, write_csv), (parquet, write_parquet)):
            if path:
                write(found, path)
                note(f"wrote {len(found.trials)} trials to {path}")
    if show:
        _show(found, show, output.form)
    else:
        answer_with(found, output.form, lambda found: tables(found, each))
        if output.form == "table":
            reading = f"vitcli sweep --report {shlex.quote(str(place))}"
            note(f"all trials: {reading} --each; a trial's command: {reading} --show TRIAL")
    if plot:
        from vitcli.commands.sweep.figure import figure

        answers.draw(figure(found, metric, plot_kind), plot)
    if code:
        raise typer.Exit(code)


def _check_together(rules: Mapping[str, tuple[Any, Mapping[str, Any]]]) -> None:
    """Refuse options that would do nothing beside the others."""
    for reason, (holds, options) in rules.items():
        idle = [name for name, given in options.items() if given]
        if holds and idle:
            raise VitcliError(f"{idle[0]} does nothing: {reason}", f"leave out {', '.join(idle)}")


def _load(path: Path, out: Path | None, *, running: bool) -> tuple[Sweep, Path]:
    """The sweep and its directory, from its file or from the directory itself."""
    from vitcli.commands.sweep.spec import check_arguments, load_sweep

    if path.is_dir() and not running:
        if not (path / "sweep.yaml").is_file():
            raise VitcliError(f"{path} holds no sweep", "the --out of `vitcli sweep FILE.yaml`")
        return load_sweep(path / "sweep.yaml"), path
    if path.is_dir():
        raise VitcliError(f"{path} is a directory", f"--report {path}, or the sweep's file to run")
    if not running:
        loaded = load_sweep(path)
    else:
        from vitcli.commands.sweep.options import known_commands

        commands = known_commands()
        loaded = load_sweep(path, commands)
        check_arguments(loaded, commands[loaded.command])
    place = out or Path("runs") / loaded.name
    if not running and not (place / "sweep.yaml").is_file():
        raise VitcliError(f"{place} holds no trials of {path}", "say where with --out DIR")
    return loaded, place


def _with(sweep: Sweep, **given: Any) -> Sweep:
    import dataclasses

    return dataclasses.replace(sweep, **{k: v for k, v in given.items() if v is not None})


def _program() -> list[str] | None:
    return shlex.split(os.environ.get(PROGRAM_VARIABLE, "")) or None


def _dry_run(sweep: Sweep, results: Any, retry_failed: bool, form: str) -> None:
    from vitcli.commands.sweep.options import known_commands
    from vitcli.commands.sweep.report import plan
    from vitcli.commands.sweep.view import plan_tables

    command = known_commands()[sweep.command]
    planned = plan(sweep, results, command, retry_failed=retry_failed, program=_program())
    answer_with(planned, form, plan_tables)


def _run(sweep: Sweep, results: Any, fail_fast: bool, retry_failed: bool) -> int:
    """Run what is missing; the exit code says whether any trial of the sweep has failed."""
    from vitcli.commands.sweep.analysis import Runner
    from vitcli.commands.sweep.options import known_commands
    from vitcli.commands.sweep.study import Study
    from vitcli.commands.sweep.view import sweep_progress
    from vitcli.ui.console import note, plural, warn

    results.create(sweep.name, sweep.source, sweep.storage)
    study = Study(sweep, results, retry_failed)
    # A scheduler asks with SIGTERM for what a person asks with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with sweep_progress(study.counts().total) as tell:
        runner = Runner(
            sweep,
            known_commands()[sweep.command],
            results,
            study,
            sweep.jobs,
            fail_fast,
            _program(),
            tell,
        )
        try:
            outcome = runner.run()
        except KeyboardInterrupt:
            note("what has finished is kept; the same command runs the rest")
            raise
    counts = outcome.counts
    if outcome.stopped:
        warn(f"stopped: {outcome.stopped}; {plural(counts.left, 'trial')} left")
    elif counts.running:
        note(f"{plural(counts.running, 'trial')} still running in another process")
    elif counts.left > outcome.killed:
        warn(f"{plural(counts.left, 'trial')} left: something still holds their lock files")
    if counts.failed and not retry_failed:
        note(f"{plural(counts.failed, 'trial')} failed; --retry-failed runs again what failed")
    alone = counts.left and not counts.running
    return 1 if outcome.stopped or counts.failed or outcome.killed or alone else 0


def _show(found: SweepReport, id: str, form: str) -> None:

    matches = [trial for trial in found.trials if trial.id.startswith(id)]
    if len(matches) != 1:
        raise VitcliError(
            f"--show {id}: {'several trials begin' if matches else 'no trial begins'} with it",
            "`--each` lists the trials",
        )
    answer_with(matches[0], form)
