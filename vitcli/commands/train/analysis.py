"""Training runs, from the config to the verdict: shapes and images."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from vitcli.commands.train.data import ShapesSource, TrainingData
from vitcli.commands.train.datasets import ImagesSource
from vitcli.commands.train.loop import Trainer
from vitcli.commands.train.outcome import (
    CONFIDENCE,
    MARGIN,
    Outcome,
    StepReport,
    chance_accuracy,
    judge,
)
from vitcli.commands.train.parallel import World, local_device, world
from vitcli.commands.train.result import ClassAccuracy, HistoryRow, TrainResult, TrainSummary
from vitcli.commands.train.snapshots import RunDirectory
from vitcli.commands.train.start import set_threads, start_encoder, with_classifier
from vitcli.commands.train.trackers import event_writer
from vitcli.config.load import resized_to
from vitcli.config.request import ModelRequest
from vitcli.config.training import IMAGES_RECIPE, SHAPES_RECIPE, ImagesRun, ShapesRun, TrainRequest
from vitcli.errors import VitcliError
from vitcli.images.shapes import Shapes
from vitcli.measures import wilson
from vitcli.model import Model, load_model, pick_device
from vitcli.nn.encoder import VisionEncoder

CHANGEABLE = (
    "train.snapshot_every",
    "train.snapshot_seconds",
    "train.log_every",
    "train.threads",
    "train.tensorboard",
    "data.workers",
)
"""Keys that --resume may change: none of them moves a weight."""
Run = TypeVar("Run", ShapesRun, ImagesRun)
OnReport = Callable[[StepReport], None]
"""Told of each logged step, in the first process only."""


def nothing(report: StepReport) -> None:
    pass


def source_of(request: TrainRequest) -> Model | None:
    """The model that a run starts from, or none where its weights are fresh or resumed."""
    return load_model(request.model) if request.model.weights else None


def shapes_config(request: TrainRequest, source: Model | None = None) -> ShapesRun:
    """The whole config of a run on shapes.

    Raises:
        VitcliError: unknown keys, wrong types or impossible combinations.
    """
    config = request.run_config(ShapesRun, SHAPES_RECIPE, source.config if source else None)
    check_classifier(request, len(config.data.classes))
    return settled(config, len(config.data.classes))


def train_shapes(
    request: TrainRequest,
    config: ShapesRun,
    source: Model | None = None,
    on_report: OnReport = nothing,
) -> TrainResult:
    """Train on synthetic shapes.

    Raises:
        VitcliError: an impossible run, a directory that cannot be written, a failed audit.
    """
    data = ShapesSource(
        shapes_of(config), config.data.train_size, config.data.val_size, config.preprocess
    )
    return run(request, config, data, source, on_report)


def images_config(request: TrainRequest, source: Model | None = None) -> ImagesRun:
    """The whole config of a run on images, but for the classifier (see `images_of`).

    Raises:
        VitcliError: unknown keys, wrong types or impossible combinations; no data.
    """
    config = request.run_config(ImagesRun, IMAGES_RECIPE, source.config if source else None)
    if config.data.path is None:
        raise VitcliError("there is nothing to train on", "vitcli train DATA")
    return settled(config, config.encoder.head_out or 1)


def images_of(config: ImagesRun, download: bool = False) -> ImagesSource:
    """The images that the config names.

    Raises:
        VitcliError: they are not there or not readable.
    """
    assert config.data.path is not None
    return ImagesSource(
        Path(config.data.path),
        config.data,
        config.preprocess,
        config.train.seed,
        config.encoder.image_size,
        download,
    )


def train_images(
    request: TrainRequest,
    config: ImagesRun,
    data: ImagesSource,
    source: Model | None = None,
    on_report: OnReport = nothing,
) -> TrainResult:
    """Train on images.

    Raises:
        VitcliError: as `train_shapes`.
    """
    check_classifier(request, len(data.classes))
    return run(request, settled(config, len(data.classes)), data, source, on_report)


def shapes_of(config: ShapesRun) -> Shapes:
    data = config.data
    return Shapes(config.encoder.image_size, data.classes, data.difficulty, config.train.seed)


def check_classifier(request: TrainRequest, classes: int) -> None:
    """Refuse a head that was asked for and cannot be: a run classifies its classes.

    Raises:
        VitcliError: with what was set.
    """
    possible = {"head": ("linear", "distilled"), "head_out": (classes,)}
    for setting in request.settings:
        key = setting.path[-1]
        if setting.path[0] == "encoder" and setting.value not in possible.get(
            key, (setting.value,)
        ):
            raise VitcliError(
                f"{setting.source}: training classifies {classes} classes",
                f"leave {'.'.join(setting.path)} out: the classifier follows the data",
            )


def settled(config: Run, classes: int) -> Run:
    """The config as it is run: a classifier for the classes, preprocessing to the input's size.

    Raises:
        VitcliError: nothing is pooled, or the encoder does not read RGB.
    """
    if config.encoder.channels != 3:
        raise VitcliError("training images have 3 channels", "--set encoder.channels=3")
    encoder = with_classifier(config.encoder, classes)
    preprocess = config.preprocess
    if preprocess.output_size != encoder.image_size:
        preprocess = resized_to(preprocess, encoder.image_size)
    return type(config).model_validate(
        {**dict(config), "encoder": encoder, "preprocess": preprocess}
    )


def run(
    request: TrainRequest,
    config: ShapesRun | ImagesRun,
    data: TrainingData,
    source: Model | None = None,
    on_report: OnReport = nothing,
) -> TrainResult:
    """Train the config's encoder on `data`, in this process or in all that torchrun started."""
    device = local_device(pick_device(request.device))
    with ExitStack() as ending:
        processes = ending.enter_context(world(device))
        check_sizes(request, config, data, processes)
        directory = RunDirectory(request.out) if request.out else None
        if directory and processes.first:
            ending.enter_context(directory.held())
        snapshot, history = None, []
        if directory and request.resume and directory.config_file.exists():
            directory.check_config(config, CHANGEABLE)
            snapshot = directory.latest()
        elif directory and processes.first:
            directory.start(config)
        if config.train.weights and not (source or snapshot):  # killed before its first snapshot
            source = load_model(ModelRequest(weights=config.train.weights, device="cpu"))
        start = source.encoder if source else None
        encoder = start_encoder(config.encoder, config.train, start).to(device)
        set_threads(encoder, config.train.threads)
        trainer = Trainer(
            encoder,
            data,
            config.train,
            device,
            processes,
            directory,
            audited=config.train.freeze != "none" or bool(config.train.lora.heads),
            on_report=on_report,
        )
        if directory and request.resume:
            step, length = (snapshot.step, snapshot.metrics_bytes) if snapshot else (0, 0)
            history = directory.rewind_metrics(length, step, cut=False)
        if snapshot:
            trainer.restore(snapshot, history)
        if directory and request.resume and processes.first:
            directory.rewind_metrics(length, step)
        if config.train.tensorboard and directory and processes.first:
            write = event_writer(directory.path / "tensorboard", trainer.step)
            trainer.on_report = both(on_report, write)
        outcome = trainer.run()
    return TrainResult(
        summary(encoder, data, outcome),
        tuple(HistoryRow(**entry) for entry in trainer.history),
        outcome.audit,
        str(device),
        processes.size,
        config.model_dump(mode="python"),
    )


def both(first: OnReport, write: Callable[[dict[str, Any]], None]) -> OnReport:
    def tell(report: StepReport) -> None:
        write(report.entry)
        first(report)

    return tell


def check_sizes(
    request: TrainRequest, config: ShapesRun | ImagesRun, data: TrainingData, processes: World
) -> None:
    """Refuse a batch that does not divide, or that no image would fill.

    Raises:
        VitcliError: with the sizes in question.
    """
    train, parts = config.train, processes.size * config.train.accumulate
    if train.batch % parts:
        raise VitcliError(
            f"a batch of {train.batch} does not divide into {processes.size} processes x "
            f"{train.accumulate} micro-batches",
            "--batch a multiple of their product",
        )
    if (train.mixup or train.cutmix) and train.batch // parts % 2:
        raise VitcliError(
            f"mixup and cutmix pair neighbors, and a micro-batch has {train.batch // parts}",
            "an even number of images in each",
        )
    if train.tensorboard and request.out is None:
        raise VitcliError("train.tensorboard writes into the run directory", "add --out DIR")
    if data.train_size < train.batch:
        raise VitcliError(
            f"{data.train_size} training images do not fill a batch of {train.batch}",
            "a smaller --batch",
        )


def summary(encoder: VisionEncoder, data: TrainingData, outcome: Outcome) -> TrainSummary:
    """The verdict, and the figures behind it."""
    validation = outcome.validation
    classes: tuple[ClassAccuracy, ...] = ()
    if validation is not None:
        rows = zip(data.classes, validation.correct, validation.counts, strict=True)
        classes = tuple(ClassAccuracy(name, n, c / n if n else None) for name, c, n in rows)
    low = high = None
    if validation is not None:
        low, high = wilson(sum(validation.correct), sum(validation.counts), CONFIDENCE)
    chance = chance_accuracy(validation.counts) if validation is not None else 1 / len(data.classes)
    return TrainSummary(
        verdict=judge(sum(validation.correct), validation.counts) if validation else "diverged",
        val_accuracy=validation.accuracy if validation else None,
        val_loss=validation.loss if validation else None,
        chance=chance,
        lower_bound=low,
        upper_bound=high,
        bar=chance + MARGIN * (1 - chance),
        steps=outcome.steps,
        bad_step=None if outcome.bad_step is None else outcome.bad_step + 1,
        bad_layer=outcome.bad_layer,
        images_per_s=outcome.images_per_s,
        parameters=sum(p.numel() for p in encoder.parameters()),
        trainable=sum(p.numel() for p in encoder.parameters() if p.requires_grad),
        classes=classes,
    )
