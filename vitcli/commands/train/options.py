"""Options that `train-shapes` and `train` share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from vitcli.commands.train.result import TrainResult
from vitcli.config.load import Setting, config_yaml
from vitcli.config.request import ModelRequest
from vitcli.config.schema import InitScheme
from vitcli.config.training import TrainRequest, launched
from vitcli.config.yaml import parse_value
from vitcli.errors import VitcliError
from vitcli.files import atomic_write
from vitcli.ui.figures import Plot, draw
from vitcli.ui.options import ModelOptions, choices, model_option, parse_size, registers_setting


def first_process() -> bool:
    """Whether this process prints; torchrun counts them from 0."""
    return launched().rank == 0


def train_option(*names: str, **how: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Training", **how)


def adapter_option(*names: str, **how: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Adapters", **how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """The model, the recipe, and where the run goes."""

    seed: Annotated[
        int | None, model_option("--seed", help="Of weights, data, order and dropout.")
    ] = None  # type: ignore[assignment]
    dtype: Annotated[
        str | None,
        model_option("--dtype", metavar="TYPE", help="float32, or bfloat16 autocast."),
    ] = None  # type: ignore[assignment]
    init: Annotated[
        str | None, model_option("--init", metavar="SCHEME", help=f"{choices(InitScheme)}.")
    ] = None
    lr: Annotated[float | None, train_option("--lr", help="Peak learning rate.")] = None
    warmup: Annotated[
        str | None,
        train_option("--warmup", metavar="FRACTION|STEPS", help="Below 1, a fraction of all."),
    ] = None
    epochs: Annotated[
        int | None, train_option("--epochs", metavar="N", help="Passes over the training data.")
    ] = None
    batch: Annotated[
        int | None, train_option("--batch", metavar="N", help="Images a step, over all processes.")
    ] = None
    accumulate: Annotated[
        int | None, train_option("--accumulate", metavar="N", help="Micro-batches of a step.")
    ] = None
    clip_grad: Annotated[
        float | None, train_option("--clip-grad", metavar="NORM", help="Clip the gradient's norm.")
    ] = None
    freeze: Annotated[
        str | None,
        train_option("--freeze", metavar="encoder", help="Train the classifier alone."),
    ] = None
    compile: Annotated[bool, train_option("--compile", help="Compile the model.")] = False
    out: Annotated[
        Path | None,
        train_option("--out", metavar="DIR", help="Run directory: metrics, snapshots, weights."),
    ] = None
    resume: Annotated[
        bool, train_option("--resume", help="Go on from the last snapshot in --out.")
    ] = False
    lora: Annotated[
        list[str] | None,
        adapter_option(
            "--lora",
            metavar="BLOCK:HEAD",
            help="Train an adapter on this head, both from 1. Repeatable.",
        ),
    ] = None
    lora_rank: Annotated[
        int | None, adapter_option("--lora-rank", metavar="R", help="Width of each adapter.")
    ] = None
    lora_alpha: Annotated[
        float | None, adapter_option("--lora-alpha", metavar="A", help="Scale is alpha / rank.")
    ] = None
    lora_on: Annotated[
        str | None, adapter_option("--lora-on", metavar="PARTS", help="Some of q,k,v.")
    ] = None
    train_head: Annotated[
        bool, adapter_option("--train-head", help="Train the classifier too.")
    ] = False

    def train_settings(self) -> tuple[Setting, ...]:
        """Every option as the config key it stands for; `--set` last, so the exact key wins."""
        warmup = self.warmup and parse_value(self.warmup, f"--warmup {self.warmup}")
        size = parse_size(self.image_size) if self.image_size else None
        named: list[tuple[str, str, Any]] = [
            ("--image-size", "encoder.image_size", size),
            ("--init", "encoder.init", self.init),
            ("--pos-resize", "encoder.position_table.resize", self.pos_resize),
            ("--weights", "train.weights", self.weights),
            ("--seed", "train.seed", self.seed),
            ("--dtype", "train.dtype", self.dtype),
            ("--lr", "train.lr", self.lr),
            ("--warmup", "train.warmup", warmup),
            ("--epochs", "train.epochs", self.epochs),
            ("--batch", "train.batch", self.batch),
            ("--accumulate", "train.accumulate", self.accumulate),
            ("--clip-grad", "train.clip_grad", self.clip_grad),
            ("--freeze", "train.freeze", self.freeze),
            ("--compile", "train.compile", self.compile or None),
            ("--lora", "train.lora.heads", self.lora),
            ("--lora-rank", "train.lora.rank", self.lora_rank),
            ("--lora-alpha", "train.lora.alpha", self.lora_alpha),
            ("--lora-on", "train.lora.on", self.lora_on),
            ("--train-head", "train.lora.train_head", self.train_head or None),
        ]
        registers = () if self.registers is None else (registers_setting(self.registers),)
        given = tuple(
            Setting(tuple(key.split(".")), value, _as_written(option, value))
            for option, key, value in named
            if value is not None
        )
        return (*given, *registers, *self.shared_settings())

    def to_train_request(self, *settings: Setting) -> TrainRequest:
        """What to train, and where.

        Raises:
            VitcliError: options that need another one.
        """
        if self.resume and self.out is None:
            raise VitcliError("--resume goes on from a run directory", "add --out DIR")
        return TrainRequest(
            model=ModelRequest(
                preset=self.preset,
                config_file=self.config,
                weights=self.weights,
                device="cpu",
            ),
            settings=(*settings, *self.train_settings()),
            device=self.device,
            out=self.out,
            resume=self.resume,
        )


def _as_written(option: str, value: Any) -> str:
    """The option as the user gave it."""
    if isinstance(value, list):
        return " ".join(f"{option} {one}" for one in value)
    return option if value is True else f"{option} {value}"


@contextmanager
def one_voice() -> Iterator[None]:
    """The first process reports what is wrong for all, every other one what is its own."""
    launch = launched()
    try:
        yield
    except VitcliError as error:
        if launch.rank == 0:
            raise
        if error.exit_code == 2:  # usage and input: the same in every process
            raise typer.Exit(error.exit_code) from error
        name = f"process {launch.rank}: {error.message}"
        raise VitcliError(name, error.hint, exit_code=error.exit_code) from error


def prepared(
    request: TrainRequest, schema: Any, recipe: Any, plot: Plot, print_config: bool
) -> bool:
    """Tell a bad config before torch is loaded; print it if asked, and then there is no run."""
    from vitcli.ui.console import answer_text
    from vitcli.ui.figures import check_figure_file

    check_figure_file(plot)
    if request.model.weights is None:
        config = request.run_config(schema, recipe)
        if print_config:
            answer_text(config_yaml(config))
            return False
    return True


def finish(result: TrainResult, request: TrainRequest, form: str, plot: Plot) -> None:
    """Show a run that is over, in the first process only."""
    if not first_process():
        return
    from vitcli.ui.console import note
    from vitcli.ui.tables import show

    if request.out:
        with atomic_write(request.out / "result.json") as file:
            file.write(result.to_json().encode())
        loadable = (request.out / "model.safetensors").exists()
        reads = f"; --weights {request.out} reads it" if loadable else ""
        note(f"the run is in {request.out}{reads}")
    if plot:
        from vitcli.commands.train.view import figure

        draw(figure(result), plot)
    show(result, form)
