"""vitcli train"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.commands.train.options import TrainOptions, one_voice
from vitcli.ui.figures import Plot
from vitcli.ui.options import Output, PrintConfigOption, Without, grouped


@grouped
@one_voice()
@grouped
def train(
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA",
            help="A folder for each class, or the files of CIFAR-10/100, MNIST, Fashion-MNIST.",
        ),
    ] = None,
    *,
    options: Annotated[TrainOptions, Without(("adapter",))],
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a published set (data.kind) into DATA.")
    ] = False,
    output: Output,
    plot: Plot,
    print_config: PrintConfigOption = False,
) -> None:
    """Fit an encoder and a classifier to real images.

    The recipe is the config's: crops, flips, mixup, CutMix, erasing, smoothing, drop path, EMA.

    \b
    Examples:
      vitcli train pictures/ --out runs/pictures
      vitcli train cifar --set data.kind=cifar10 --download --epochs 100
      vitcli train pictures/ --weights facebook/dinov2-small --freeze encoder
      vitcli train --out runs/pictures --resume
    """
    from vitcli.commands.train.options import finish, prepared
    from vitcli.config.load import Setting, config_yaml
    from vitcli.config.training import IMAGES_RECIPE, ImagesRun
    from vitcli.ui.console import answer_text, status

    named = [] if data is None else [Setting(("data", "path"), str(data), str(data))]
    request = options.to_train_request(*named)
    if not prepared(request, ImagesRun, IMAGES_RECIPE, plot, print_config):
        return

    with status("loading torch, the data and the encoder"):
        from vitcli.commands.train import analysis

        source = analysis.source_of(request)
        config = analysis.images_config(request, source)
    if print_config:
        return answer_text(config_yaml(config))
    with status("looking at the images"):
        images = analysis.images_of(config, download)

    from vitcli.commands.train.view import live

    with live() as on_report:
        result = analysis.train_images(request, config, images, source, on_report)
    finish(result, request, output.form, plot)


@grouped
@one_voice()
@grouped
def train_shapes(
    *,
    options: Annotated[TrainOptions, Without(("adapter",))],
    difficulty: Annotated[
        float | None,
        typer.Option("--difficulty", metavar="0..1", help="Rotation, low contrast and noise."),
    ] = None,
    show_data: Annotated[
        Path | None,
        typer.Option("--show-data", metavar="FILE", help="Draw a labeled sheet and stop."),
    ] = None,
    output: Output,
    plot: Plot,
    print_config: PrintConfigOption = False,
) -> None:
    """Does it train? Synthetic shapes, with either norm placement, with or without warm-up.

    A small encoder learns to tell circles, squares, triangles and crosses, drawn
    on the fly. Then the command says whether it learned, stalled or diverged.

    \b
    Examples:
      vitcli train-shapes --norm post
      vitcli train-shapes --norm post --warmup 0.1 --plot run.png
      vitcli train-shapes --epochs 3 --out runs/a --set data.train_size=4096
      vitcli train-shapes --weights runs/a --lora 11:2 --train-head
    """
    from vitcli.commands.train.options import finish, prepared
    from vitcli.config.load import Setting, config_yaml
    from vitcli.config.training import SHAPES_RECIPE, ShapesRun
    from vitcli.ui.console import answer_text, note, status

    settings = (
        []
        if difficulty is None
        else [Setting(("data", "difficulty"), difficulty, f"--difficulty {difficulty}")]
    )
    request = options.to_train_request(*settings)
    if not prepared(request, ShapesRun, SHAPES_RECIPE, plot, print_config):
        return

    with status("loading torch and the encoder"):
        from vitcli.commands.train import analysis

        source = analysis.source_of(request)
        config = analysis.shapes_config(request, source)
    if print_config:
        return answer_text(config_yaml(config))
    if show_data:
        from vitcli.images.shapes import draw_sheet

        draw_sheet(analysis.shapes_of(config), show_data)
        return note(f"drew {show_data}")

    from vitcli.commands.train.view import live

    with live() as on_report:
        result = analysis.train_shapes(request, config, source, on_report)
    finish(result, request, output.form, plot)
