"""vitcli profile"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.engines import ENGINES
from vitcli.errors import VitcliError
from vitcli.ui.figures import Plot, draw
from vitcli.ui.options import ModelOptions, Output, PrintConfigOption, grouped
from vitcli.ui.tables import show

BATCHES = (1, 8, 64)

EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="|".join(ENGINES),
        help="How to run it. Repeat to compare engines.",
        show_default="onednn where it is there, else eager",
    ),
]


@grouped
@grouped
def profile(
    *,
    model: ModelOptions,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            min=1,
            metavar="N",
            help="Images a step. Repeatable.",
            show_default=", ".join(map(str, BATCHES)),
        ),
    ] = None,
    engine: EngineOption = None,
    attention: Annotated[
        str | None,
        typer.Option("--attention", metavar="fused|explicit", help="How every block attends."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads.")
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            "--runs",
            min=1,
            metavar="N",
            help="Timed steps a batch.",
            show_default="5 to 30, in about 15 s",
        ),
    ] = None,
    backward: Annotated[
        bool,
        typer.Option("--backward", help="Time a training step: forward and backward pass."),
    ] = False,
    ops: Annotated[
        int, typer.Option("--ops", min=0, metavar="N", help="Operators to list per batch.")
    ] = 12,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE.json.gz", help="A Chrome trace of one step, for Perfetto."
        ),
    ] = None,
    output: Output,
    plot: Plot,
    print_config: PrintConfigOption = False,
) -> None:
    """Where an encoder's time goes, against what this machine can do.

    \b
    Examples:
      vitcli profile --batch 1 --batch 8
      vitcli profile --preset dinov2-s14 --image-size 518 --attention explicit
      vitcli profile --engine eager --engine compile --engine onnx --batch 8
    """
    from vitcli.commands.profile.result import ProfileSettings
    from vitcli.ui.console import answer_text, note, progress, status
    from vitcli.ui.figures import check_figure_file

    check_figure_file(plot)
    _check_trace_file(trace)
    settings = ProfileSettings(
        batches=tuple(batch or BATCHES),
        engines=tuple(engine or ()),
        attention=attention,
        runs=runs,
        backward=backward,
        ops=ops,
        trace=trace,
    )
    settings.check()
    request = model.to_request()
    if request.weights is None:
        config = request.fresh_config()  # a bad config is told before torch is loaded
        if print_config:
            from vitcli.config.load import config_yaml

            return answer_text(config_yaml(config))

    with status("loading torch and the encoder"):
        import torch

        from vitcli.commands.profile import analysis
        from vitcli.model import load_model

        if threads:
            torch.set_num_threads(threads)
        loaded = load_model(request)
    if print_config:
        from vitcli.config.load import config_yaml

        return answer_text(config_yaml(loaded.config))

    with progress("profiling (images)") as advance:
        result = analysis.profile(loaded, settings, advance)
    answered = any(run.error is None for run in result.runs)
    if trace and answered:
        note(f"wrote one step to {trace}: open it at https://ui.perfetto.dev")
    if plot and answered:
        from vitcli.commands.profile.view import figure

        draw(figure(result), plot)
    from vitcli.commands.profile.view import tables

    show(result, output.form, tables)
    if not answered:
        raise typer.Exit(1)


def _check_trace_file(path: Path | None) -> None:
    if path is None:
        return
    if not path.name.endswith(".json.gz"):
        raise VitcliError(f"--trace {path}: a trace is a .json.gz file", "--trace trace.json.gz")
    if not path.parent.is_dir():
        raise VitcliError(f"--trace {path}: there is no folder {path.parent}", "make it first")
