"""vitcli sweep"""

from __future__ import annotations

import functools
import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitcli.errors import VitcliError, check_choice
from vitcli.ui.completion import complete_names
from vitcli.ui.console import note, plural, warn
from vitcli.ui.console import show as answer_with
from vitcli.ui.figures import Plot, check_figure_file, draw
from vitcli.ui.options import Output, grouped, option

if TYPE_CHECKING:
    from vitcli.commands.sweep.result import SweepReport
    from vitcli.commands.sweep.space import Command
    from vitcli.commands.sweep.spec import Sweep
    from vitcli.commands.sweep.trials import Results

PROGRAM_VARIABLE = "VITCLI_SWEEP_PROGRAM"
"""What trials run in place of this vitcli, e.g. `srun -n1 vitcli`. Never read from a sweep's file,
so that running a file runs vitcli and nothing else."""

run_option = functools.partial(option, rich_help_panel="Running")
report_option = functools.partial(option, rich_help_panel="Reporting")


def _shipped() -> list[str]:
    from vitcli.commands.sweep.spec import shipped_sweeps

    return shipped_sweeps()


@grouped
def sweep(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.yaml|NAME]",
            help="The sweep to run: a file, or a shipped sweep by name.",
            autocompletion=complete_names(_shipped, ".yaml"),
        ),
    ] = None,
    out: Annotated[
        Path | None, run_option("--out", "DIR", "Directory of the trials (default: runs/NAME).")
    ] = None,
    report: Annotated[
        str | None,
        report_option(
            "--report",
            "DIR|FILE|NAME",
            "Report finished trials; run none.",
            autocompletion=complete_names(_shipped),
        ),
    ] = None,
    jobs: Annotated[
        int | None, run_option("--jobs", "N", "Trials that run at the same time.", min=1)
    ] = None,
    timeout: Annotated[
        float | None, run_option("--timeout", "S", "Time limit per trial, in seconds.", min=0.001)
    ] = None,
    storage: Annotated[
        str | None,
        run_option(
            "--storage",
            "URL",
            "Database that machines share for a `search:` (sqlite, postgresql, mysql; default: a "
            "journal file in DIR). Machines share a grid by its --out directory.",
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
        report_option("--where", "COND", "Filter: norm=post, 'lr<=0.01', … Repeatable."),
    ] = None,
    sort: Annotated[
        str | None, report_option("--sort", "NAME", "Sort by this; -NAME for the largest first.")
    ] = None,
    group: Annotated[
        str | None, report_option("--group", "KEY,…", "Group trials that agree in these keys.")
    ] = None,
    power: Annotated[
        float | None,
        report_option(
            "--power",
            "D",
            "Print how many seeds would detect a difference of D (extra stats).",
            min=1e-12,
        ),
    ] = None,
    mix_incomplete: Annotated[
        bool,
        report_option("--mix-incomplete", help="Rank groups with missing trials or numbers too."),
    ] = False,
    each: Annotated[
        bool, report_option("--each", help="One row per trial, not per group.")
    ] = False,
    stale: Annotated[
        bool, report_option("--stale", help="Include trials that are no longer in the file.")
    ] = False,
    show: Annotated[
        str | None, report_option("--show", "TRIAL", "Show one trial in full, with its command.")
    ] = None,
    *,
    output: Output,
    plot: Plot,
    csv: Annotated[Path | None, report_option("--csv", "FILE", "Write one row per trial.")] = None,
    parquet: Annotated[
        Path | None, report_option("--parquet", "FILE", "Write one row per trial.")
    ] = None,
    plot_kind: Annotated[
        str,
        report_option("--plot-kind", "auto|bars|lines|heatmap|curves|search", "Kind of figure."),
    ] = "auto",
    metric: Annotated[
        str | None, report_option("--metric", "NAME", "Metric to draw and compare.")
    ] = None,
) -> None:
    """Run a command for every combination of settings in a YAML file, and report the results.

    Run it again to run the missing trials. Several processes may run the same sweep,
    on any machine that shares the directory --out.

    With the extra stats, pairs of levels are compared: 95% intervals, paired by seed.

    Trials run this vitcli, or the program that VITCLI_SWEEP_PROGRAM names.

    \b
    Examples:
      vitcli sweep norm-warmup-init --out runs/norm --jobs 2
      vitcli sweep --report runs/norm --sort -accuracy --plot norm.png
      vitcli sweep --report runs/norm --where norm=post --csv post.csv
    """
    from vitcli.commands.sweep import analysis
    from vitcli.commands.sweep import report as reports
    from vitcli.commands.sweep.figure import KINDS, figure
    from vitcli.commands.sweep.view import check_files, write_csv, write_parquet

    running = {"--jobs": jobs, "--timeout": timeout, "--dry-run": dry_run,
               "--fail-fast": fail_fast, "--retry-failed": retry_failed}  # fmt: skip
    reporting = {"--power": power is not None, "--mix-incomplete": mix_incomplete, "--where": where,
                 "--sort": sort, "--group": group, "--each": each, "--stale": stale, "--show": show,
                 "--csv": csv, "--parquet": parquet, "--plot": plot}  # fmt: skip
    if report:
        _refuse(running, "--report runs no trials")
    if dry_run:
        _refuse(reporting, "--dry-run reports no results")
    if not plot:
        _refuse({"--plot-kind": plot_kind != "auto"}, "--plot is missing")
    check_figure_file(plot)
    check_choice("--plot-kind", plot_kind, KINDS)
    check_files(csv, parquet)
    if (file is None) == (report is None):
        raise VitcliError(
            "sweep: expected either a sweep to run or --report DIR to read",
            "vitcli sweep position, or vitcli sweep --report runs/position",
        )
    given = file or report or ""
    loaded, results, command = analysis.opened(given, out, to_run=file is not None)
    loaded = analysis.changed(loaded, jobs=jobs, timeout=timeout, storage=storage)
    check_choice("--metric", metric, loaded.metrics or ["NAME"])
    if dry_run:
        assert command
        planned = analysis.plan(
            loaded, results, command, retry_failed=retry_failed, program=_program()
        )
        return answer_with(planned, output.form)
    code = 0
    if command:
        for said in loaded.notes():
            note(said)
        code = _run(loaded, results, command, fail_fast, retry_failed)
    found = reports.report(
        loaded,
        results,
        where or (),
        sort,
        None if group is None else list(filter(None, group.split(","))),
        stale=stale,
        mix_incomplete=mix_incomplete,
        power=power,
        named=bool(command or storage),
    )
    for name in reports.never_found(found):
        key = loaded.metrics[name].path
        warn(
            f"no finished trial has {key}: correct its path under metrics; trials do not run again"
        )
    for path, write in ((csv, write_csv), (parquet, write_parquet)):
        if path:
            write(found, path)
            note(f"wrote {plural(len(found.trials), 'trial')} to {path}")
    if show:
        _show(found, show, output.form)
    else:
        answer_with(found, output.form, each=each, metric=metric)
        if output.form == "table":
            reading = f"vitcli sweep --report {shlex.quote(found.directory)}"
            note(f"all trials: {reading} --each; a trial's command: {reading} --show TRIAL")
    if plot:
        draw(lambda: figure(found, metric, plot_kind), plot)
    if code:
        raise typer.Exit(code)


def _refuse(options: Mapping[str, Any], reason: str) -> None:
    """Refuse options that would do nothing beside the others."""
    if idle := [name for name, given in options.items() if given]:
        raise VitcliError(f"{idle[0]}: has no effect ({reason})", f"leave out {', '.join(idle)}")


def _program() -> list[str] | None:
    return shlex.split(os.environ.get(PROGRAM_VARIABLE, "")) or None


def _run(
    sweep: Sweep, results: Results, command: Command, fail_fast: bool, retry_failed: bool
) -> int:
    """Run what is missing; the exit code says whether any trial of the sweep has failed."""
    from vitcli.commands.sweep import analysis
    from vitcli.commands.sweep.view import sweep_progress

    # A scheduler asks with SIGTERM for what a person asks with Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with sweep_progress(sweep.search.trials if sweep.search else sweep.size) as on_event:
        try:
            outcome = analysis.run(
                sweep,
                results,
                command,
                fail_fast=fail_fast,
                retry_failed=retry_failed,
                program=_program(),
                on_event=on_event,
            )
        except KeyboardInterrupt:
            note("finished trials are kept; run the same command to continue")
            raise
    counts = outcome.counts
    if outcome.stopped:
        warn(f"stopped: {outcome.stopped}; {plural(counts.left, 'trial')} left")
    elif counts.running:
        note(f"{plural(counts.running, 'trial')} still running in another process")
    elif counts.left > outcome.killed:
        warn(f"{plural(counts.left, 'trial')} left: another process still holds their lock files")
    if counts.failed and not retry_failed:
        note(f"{plural(counts.failed, 'trial')} failed; --retry-failed runs them again")
    alone = counts.left and not counts.running
    return 1 if outcome.stopped or counts.failed or outcome.killed or alone else 0


def _show(found: SweepReport, id: str, form: str) -> None:
    matches = [trial for trial in found.trials if trial.id.startswith(id)]
    if len(matches) != 1:
        which = "several trials begin" if matches else "no trial begins"
        raise VitcliError(
            f"--show {id}: {which} with it", f"vitcli sweep --report {found.directory} --each"
        )
    answer_with(matches[0], form)
