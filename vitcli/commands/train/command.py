"""`vitcli train` and `vitcli train-shapes`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vitcli.config.request import config_yaml, registers_setting
from vitcli.config.schema import InitScheme
from vitcli.config.settings import Setting
from vitcli.config.training import (
    RECIPES,
    ImagesRun,
    ShapesRun,
    TrainConfig,
    TrainRequest,
    launched,
)
from vitcli.config.yaml import parse_value
from vitcli.errors import VitcliError
from vitcli.ui.figures import Plot, draw
from vitcli.ui.options import (
    ModelOptions,
    Output,
    PrintConfigOption,
    Without,
    choices,
    grouped,
    model_option,
    option,
    parse_size,
)


def with_default(text: str, key: str) -> str:
    """A help text with the default of a key of `train`, for both commands where they differ."""
    found: list[str] = []
    for run in (ImagesRun, ShapesRun):
        value: Any = TrainConfig(**RECIPES[run]["train"])
        for part in key.split("."):
            value = getattr(value, part)
        value = "none" if value is None else value
        value = ",".join(value) if isinstance(value, tuple) else value
        found.append(f"{value:g}" if isinstance(value, float | int) else str(value))
    images, shapes = found
    return f"{text} Default: {images}{'' if images == shapes else f'; train-shapes: {shapes}'}."


def recipe_option(
    panel: str, name: str, metavar: str | None = None, help: str = "", key: str = ""
) -> Any:
    """An option in a panel of the help, with the default of its `key` of `train` if it has one."""
    text = with_default(help, key) if key else help
    return option(name, metavar, text, rich_help_panel=panel)


train_option = partial(recipe_option, "Training")
data_option = partial(recipe_option, "Data")
adapter_option = partial(recipe_option, "Adapters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """The model, the recipe, and where the run goes; `ARGUMENTS` has the config key of each."""

    seed: Annotated[
        int | None,
        model_option("--seed", help="Seed of weights, data, order and dropout. Default: 0."),
    ] = None  # type: ignore[assignment]
    dtype: Annotated[
        str | None,
        model_option("--dtype", "TYPE", "float32, or bfloat16 autocast. Default: float32."),
    ] = None  # type: ignore[assignment]
    init: Annotated[str | None, model_option("--init", "SCHEME", f"{choices(InitScheme)}.")] = None
    lr: Annotated[float | None, train_option("--lr", help="Peak learning rate.", key="lr")] = None
    warmup: Annotated[
        str | None,
        train_option(
            "--warmup",
            "FRACTION|STEPS",
            "Steps of linear warm-up; below 1, a fraction of all steps.",
            "warmup",
        ),
    ] = None
    epochs: Annotated[
        int | None, train_option("--epochs", "N", "Passes over the training data.", "epochs")
    ] = None
    batch: Annotated[
        int | None, train_option("--batch", "N", "Images per step, over all processes.", "batch")
    ] = None
    accumulate: Annotated[
        int | None, train_option("--accumulate", "N", "Micro-batches per step.", "accumulate")
    ] = None
    clip_grad: Annotated[
        float | None,
        train_option("--clip-grad", "NORM", "Clip the gradient to this norm.", "clip_grad"),
    ] = None
    freeze: Annotated[
        str | None, train_option("--freeze", "encoder", "Train the classifier alone.", "freeze")
    ] = None
    compile: Annotated[bool, train_option("--compile", help="Use torch.compile.")] = False
    out: Annotated[
        Path | None,
        train_option("--out", "DIR", "Run directory: metrics, snapshots, weights."),
    ] = None
    resume: Annotated[
        bool, train_option("--resume", help="Continue from the last snapshot in --out.")
    ] = False
    extend: Annotated[
        bool,
        train_option(
            "--extend", help="With --resume and more --epochs: stretch the cosine over them."
        ),
    ] = False
    lora: Annotated[
        list[str] | None,
        adapter_option(
            "--lora",
            "BLOCK:HEAD",
            "Train a LoRA adapter on this head; both count from 1. Repeatable.",
        ),
    ] = None
    lora_rank: Annotated[
        int | None, adapter_option("--lora-rank", "R", "Rank of each adapter.", "lora.rank")
    ] = None
    lora_alpha: Annotated[
        float | None,
        adapter_option("--lora-alpha", "A", "The adapters' scale is alpha / rank.", "lora.alpha"),
    ] = None
    lora_on: Annotated[
        str | None, adapter_option("--lora-on", "PARTS", "Any of q,k,v.", "lora.on")
    ] = None
    train_head: Annotated[
        bool, adapter_option("--train-head", help="Train the classifier too.")
    ] = False

    def to_train_request(self, *positional: Setting, **more: Any) -> TrainRequest:
        """What to train, and where."""
        if self.resume and self.out is None:
            raise VitcliError("--resume: needs the directory of a run", "add --out DIR")
        given = vars(self) | more
        if self.warmup:
            given["warmup"] = parse_value(self.warmup, f"--warmup {self.warmup}")
        if self.image_size:
            given["image_size"] = parse_size(self.image_size)
        registers = () if self.registers is None else (registers_setting(self.registers),)
        settings = (*positional, *registers, *self.shared_settings())
        return TrainRequest.of(given, settings, self._as_written)

    def _as_written(self, name: str) -> str:
        """The option as the user gave it."""
        option, value = f"--{name.replace('_', '-')}", getattr(self, name)
        if isinstance(value, list):
            return " ".join(f"{option} {one}" for one in value)
        return option if value is True else f"{option} {value}"


FIRST_REPORTS_S = 10.0
"""Before another process ends: torchrun would end the first, which may be slower, unheard. Once
the first has ended, torchrun ends the others at once."""


@contextmanager
def errors_from_first_process() -> Iterator[None]:
    """The first process reports what is wrong for all, every other one what is its own."""
    launch = launched()
    try:
        yield
    except VitcliError as error:
        if launch.rank == 0:
            raise
        if error.exit_code == 2:  # usage and input: the same in every process
            time.sleep(FIRST_REPORTS_S)
            raise typer.Exit(error.exit_code) from error
        name = f"process {launch.rank}: {error.message}"
        raise VitcliError(name, error.hint, exit_code=error.exit_code) from error


def execute(
    request: TrainRequest,
    shapes: bool,
    form: str,
    plot: Plot,
    print_config: bool,
    *,
    download: bool = False,
    show_data: Path | None = None,
) -> None:
    """Train and show the run, in the first process only; or print its config, or draw its data.

    A bad config is reported before torch is loaded.
    """
    from vitcli.ui.console import answer_text, note, progress, show, status
    from vitcli.ui.figures import check_figure_file

    check_figure_file(plot)
    config: Any
    if request.model.weights is None:
        schema: Any = ShapesRun if shapes else ImagesRun
        config = request.run_config(schema)
        if print_config:
            return answer_text(config_yaml(config))
    with status("loading torch, the data and the encoder"):
        from vitcli.commands.train import analysis

        source = analysis.source_of(request)
        config_of = analysis.shapes_config if shapes else analysis.images_config
        config = config_of(request, source)
    if print_config:
        return answer_text(config_yaml(config))
    if show_data:
        from vitcli.images.synthetic import draw_sheet

        draw_sheet(analysis.shapes_of(config), show_data)
        return note(f"drew {show_data}")
    with progress("", lines="tenths") as bar:
        result = (
            analysis.run_shapes(request, config, source, bar)
            if shapes
            else analysis.run_images(request, config, source, bar, download)
        )
    if launched().rank:
        return
    if request.out:
        loadable = (request.out / "model.safetensors").exists()
        library = "timm:" if result.config["train"]["backbone"] else ""
        reads = f"; --weights {library}{request.out} reads it" if loadable else ""
        note(f"the run is in {request.out}{reads}")
    if plot:
        draw(result.figure, plot)
    show(result, form)


def read_classes(file: Path) -> tuple[str, ...]:
    """A name per line; an empty line is an output that is no class here."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise VitcliError(
            f"--classes {file}: {reason}", "name a text file, a class per line"
        ) from error
    return tuple(line.strip() for line in lines)


@grouped
@errors_from_first_process()
def train(
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA",
            help="One folder per class, such folders below train/ val/ test/, or the files of "
            "CIFAR-10/100, MNIST, Fashion-MNIST.",
        ),
    ] = None,
    *,
    options: Annotated[TrainOptions, Without(("adapter", "fit"))],
    download: Annotated[
        bool, data_option("--download", help="Download a published set (data.kind) into DATA.")
    ] = False,
    test: Annotated[
        bool, data_option("--test", help="Report accuracy on the test split once, at the end.")
    ] = False,
    classes: Annotated[
        Path | None,
        data_option(
            "--classes",
            "FILE",
            "Names of the outputs of --weights, one per line, where it has none. An output "
            "whose name is a class of DATA is kept.",
        ),
    ] = None,
    check: Annotated[
        bool,
        data_option(
            "--check", help="Decode every image and look for duplicates before the first step."
        ),
    ] = False,
    fail_fast: Annotated[
        bool,
        data_option(
            "--fail-fast",
            help="Stop at an unreadable image. Default: leave it out and list it at the end.",
        ),
    ] = False,
    accept_new_data: Annotated[
        bool,
        data_option(
            "--accept-new-data",
            help="With --resume: train on new files too; every other file keeps its split.",
        ),
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
      vitcli train pictures/ --preset timm:resnet18
      vitcli train --out runs/pictures --resume
      vitcli train pictures/ --weights runs/pictures --test
    """
    named = [] if data is None else [Setting(("data", "path"), str(data), str(data))]
    if classes:
        keys = ("train", "output_names")
        named.append(Setting(keys, read_classes(classes), f"--classes {classes}"))
    request = options.to_train_request(
        *named,
        accept_new_data=accept_new_data,
        check=check,
        fail_fast=fail_fast,
        test=test,
    )
    execute(request, False, output.form, plot, print_config, download=download)


@grouped
@errors_from_first_process()
def train_shapes(
    *,
    options: Annotated[TrainOptions, Without(("adapter", "fit"))],
    difficulty: Annotated[
        float | None,
        option("--difficulty", "0..1", "Rotation, noise, low contrast."),
    ] = None,
    show_data: Annotated[
        Path | None,
        option("--show-data", "FILE", "Draw a labeled sheet and stop."),
    ] = None,
    output: Output,
    plot: Plot,
    print_config: PrintConfigOption = False,
) -> None:
    """Train a small encoder on synthetic shapes and report whether it learned.

    The images are circles, squares, triangles and crosses, drawn on the fly. The result is
    one of learned, stalled near chance, or diverged.

    \b
    Examples:
      vitcli train-shapes --norm post
      vitcli train-shapes --norm post --warmup 0.25 --plot run.png
      vitcli train-shapes --epochs 3 --out runs/a --set data.train_size=4096
      vitcli train-shapes --weights runs/a --lora 6:3 --train-head
    """
    named = []
    if difficulty is not None:
        named = [Setting(("data", "difficulty"), difficulty, f"--difficulty {difficulty}")]
    request = options.to_train_request(*named)
    execute(request, True, output.form, plot, print_config, show_data=show_data)
