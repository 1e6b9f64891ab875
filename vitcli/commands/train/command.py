"""vitcli train"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.commands.train.options import TrainOptions, one_voice
from vitcli.ui.options import JsonOption, PlotOption, PrintConfigOption, Without, grouped


@grouped
@one_voice()
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
    json: JsonOption = False,
    plot: PlotOption = None,
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
    finish(result, request, json, plot)
