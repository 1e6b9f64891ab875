"""vitcli profile"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from vitcli.config.request import REFERENCE
from vitcli.engines import ENGINES
from vitcli.errors import VitcliError
from vitcli.files import check_output
from vitcli.ui.console import note, progress
from vitcli.ui.figures import Plot, check_figure_file, finish
from vitcli.ui.options import (
    ModelOptions,
    Output,
    PrintConfigOption,
    Without,
    grouped,
    load_all,
    option,
)

BATCHES = (1, 8, 64)

EngineOption = Annotated[
    list[str] | None,
    option(
        "--engine",
        "|".join(ENGINES),
        "Engine that runs the encoder. Repeat to compare engines.",
        show_default="onednn if available, else eager",
    ),
]


@grouped
def profile(
    *,
    model: Annotated[ModelOptions, Without(("dtype",))],
    dtype: Annotated[
        list[str] | None,
        option(
            "--dtype",
            "TYPE",
            "float32, bfloat16, float16 or float64. Repeat to compare dtypes in speed and in "
            "difference to float32.",
            show_default="float32",
        ),
    ] = None,
    image: Annotated[
        list[str] | None,
        option(
            "--image",
            "FILE",
            "Image on which to compare dtypes. Repeatable.",
            show_default="a built-in image",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        option("--memory", "GIB", "Find the largest batch that fits in this memory.", min=0.001),
    ] = None,
    batch: Annotated[
        list[int] | None,
        option(
            "--batch",
            "N",
            "Images per step. Repeatable.",
            min=1,
            show_default=", ".join(map(str, BATCHES)),
        ),
    ] = None,
    engine: EngineOption = None,
    attention: Annotated[
        str | None,
        option(
            "--attention",
            "fused|explicit",
            "Attention implementation of every block (default: the config's).",
        ),
    ] = None,
    threads: Annotated[int | None, option("--threads", "N", "CPU threads.", min=1)] = None,
    runs: Annotated[
        int | None,
        option(
            "--runs",
            "N",
            "Timed steps per batch size.",
            min=1,
            show_default="5 to 30, in about 15 s",
        ),
    ] = None,
    backward: Annotated[
        bool, option("--backward", help="Time a training step: forward and backward pass.")
    ] = False,
    ops: Annotated[int, option("--ops", "N", "Operators to list per batch size.", min=0)] = 12,
    trace: Annotated[
        Path | None,
        option("--trace", "FILE.json.gz", "Write a Chrome trace of one step, for Perfetto."),
    ] = None,
    output: Output,
    plot: Plot,
    print_config: PrintConfigOption = False,
) -> None:
    """Measure an encoder's speed and memory, and the time of each component.

    \b
    Examples:
      vitcli profile --batch 1 --batch 8
      vitcli profile --preset dinov2-s14 --image-size 518 --attention explicit
      vitcli profile --engine eager --engine compile --engine onnx --batch 8
      vitcli profile --dtype float32 --dtype bfloat16 --batch 8 --memory 4
    """
    from vitcli.commands.profile.result import ProfileSettings

    check_figure_file(plot)
    if trace:
        check_output(trace, ".json.gz", option="--trace")
    settings = ProfileSettings(
        batches=tuple(batch or BATCHES),
        engines=tuple(engine or ()),
        dtypes=tuple(dtype or ()) if len(dtype or ()) > 1 else (),
        memory_bytes=None if memory is None else int(memory * 2**30),
        attention=attention,
        runs=runs,
        backward=backward,
        ops=ops,
        trace=trace,
    )
    settings.check()
    if image and len(dtype or ()) < 2:
        raise VitcliError(
            "--image: needs several dtypes to compare", "--dtype float32 --dtype bfloat16"
        )
    alone = dtype[0] if dtype and len(dtype) == 1 else "float32"
    request = replace(model.to_request(), dtype=alone)
    if request.weights and settings.engines == (REFERENCE,):
        request = replace(request, engine=REFERENCE)  # of any architecture
    (loaded,) = load_all([request], by_library=True, print_config=print_config)
    import torch

    from vitcli.commands.profile import analysis

    if threads:
        torch.set_num_threads(threads)
    with progress("profiling (images)") as bar:
        result = analysis.profile(loaded, settings, bar, images=image or ())
    answered = any(run.error is None for run in result.runs)
    if trace and answered:
        note(f"wrote the trace of one step to {trace}; open it at https://ui.perfetto.dev")
    finish(result, output.form, plot if answered else None, wrong=not answered)
