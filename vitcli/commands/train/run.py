"""One run from its config to the verdict: its start or snapshot, its trackers, its result."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vitcli.commands.train.data import ImagesSource, TrainingData
from vitcli.commands.train.loop import Trainer
from vitcli.commands.train.optimization import learning_rate, warmup_steps
from vitcli.commands.train.result import (
    ClassAccuracy,
    HistoryRow,
    Outcome,
    TestScore,
    TrainResult,
    TrainSummary,
    Validation,
    chance_accuracy,
    judge,
)
from vitcli.commands.train.snapshots import RunDirectory
from vitcli.commands.train.splits import marked, write_inputs
from vitcli.commands.train.start import (
    World,
    load_teacher,
    local_device,
    set_threads,
    start_encoder,
    started,
    world,
)
from vitcli.config.request import ModelRequest
from vitcli.config.training import ImagesRun, ShapesRun, TrainConfig, TrainRequest
from vitcli.config.yaml import dotted
from vitcli.engines.timm_networks import TimmNetwork
from vitcli.errors import VitcliError, install_extra
from vitcli.files import atomic_write
from vitcli.loading import load_model, pick_device
from vitcli.model import Model
from vitcli.nn.encoder import VisionEncoder
from vitcli.results import QUIET, FailedImage, Progress
from vitcli.stats import above_chance

CHANGEABLE = (
    *("train.snapshot_every", "train.snapshot_seconds", "train.log_every", "train.threads"),
    *("train.tensorboard", "train.wandb", "train.mlflow"),
    "train.teacher",  # whose checksum may not change
    "data.workers",
    "data.path",  # whose files may not change
)
"""Keys that --resume may change: none of them moves a weight."""
Run = TypeVar("Run", ShapesRun, ImagesRun)


def run(
    request: TrainRequest,
    config: Run,
    data: TrainingData,
    source: Model | None = None,
    progress: Progress = QUIET,
) -> TrainResult:
    """Train the config's encoder on `data`, in this process or in all that torchrun started.

    In a run directory the answer is written too, as `result.json`.
    """
    device = local_device(pick_device(request.device))
    with ExitStack() as ending:
        processes = ending.enter_context(world(device))
        say: Callable[[str], None] = progress.line if processes.first else lambda text: None
        check_sizes(request, config, data, processes)
        teacher = None
        if config.train.teacher:
            teacher = load_teacher(config.train, data.classes, config.preprocess, device)
            known = config.train.model_copy(update={"teacher_sha256": teacher.sha256})
            config = config.model_copy(update={"train": known})
            say(teacher.line(config.train))
        directory = RunDirectory(request.out) if request.out else None
        writer = directory if processes.first else None  # the first process alone writes
        images = data if isinstance(data, ImagesSource) else None
        if writer:
            ending.enter_context(writer.held())
            if images:
                images.inputs.images = marked(images.inputs)
        snapshot, history = None, []
        if directory and request.resume and directory.config_file.exists():
            config = resumed(request, config, directory, data, processes, say)
            snapshot = directory.latest()
        elif writer:
            writer.start(config)
        if writer and images:
            write_inputs(writer.inputs_file, images.inputs)
        train = config.train
        if train.weights and not (source or snapshot):  # killed before its first snapshot
            source = load_model(
                ModelRequest(
                    weights=train.weights, which=train.which, prefix=train.prefix, device="cpu"
                )
            )
        if snapshot:  # its weights come with it
            encoder = start_encoder(config.encoder, train)
        else:
            encoder = started(config, source, data.classes, say)
        if writer and isinstance(encoder, TimmNetwork):
            library = encoder.config(config.preprocess, data.classes)
            with atomic_write(writer.path / "config.json") as file:
                file.write(json.dumps(library, indent=2).encode())
        encoder = encoder.to(device)
        set_threads([encoder, teacher] if teacher else [encoder], train.threads)
        trainer = Trainer(
            encoder,
            data,
            train,
            device,
            processes,
            writer,
            audited=train.freeze != "none" or bool(train.lora.heads),
            teacher=teacher,
            progress=progress,
        )
        step, length = (snapshot.step, snapshot.metrics_bytes) if snapshot else (0, 0)
        if directory and request.resume:
            history = directory.rewind_metrics(length, step, cut=False)
        if snapshot:
            trainer.restore(snapshot, history)
        if writer and request.resume:
            writer.rewind_metrics(length, step)
        if left := data.train_size % train.batch:
            say(
                f"each epoch leaves out {left:,} of {data.train_size:,} training images, which do "
                f"not fill a batch of {train.batch}; every epoch draws others"
            )
        settings = config.model_dump(mode="python")
        names = trackers(train) if writer else []
        place = writer.path if writer else Path()
        with tracked(names, place, settings, trainer.history) as trainer.writers:
            outcome = trainer.run()
        test = None
        if request.test and outcome.validation and images:
            test = test_score(images, trainer.evaluate(images.test_batches, images.test_size))
        skipped = {k: v for part in processes.gather(data.unreadable) for k, v in part.items()}
        result = TrainResult(
            summary(encoder, data, outcome),
            tuple(HistoryRow(**entry) for entry in trainer.history),
            outcome.audit,
            str(device),
            processes.size,
            settings,
            test,
            tuple(FailedImage(path, "unreadable", skipped[path]) for path in sorted(skipped)),
        )
        if writer:
            with atomic_write(writer.path / "result.json") as file:
                file.write(result.to_json().encode())
    return result


def resumed(
    request: TrainRequest,
    config: Run,
    directory: RunDirectory,
    data: TrainingData,
    processes: World,
    say: Callable[[str], None],
) -> Run:
    """The config of the resumed run, with more epochs where that is asked for and possible.

    The warm-up keeps its number of steps.
    """
    written = directory.written_config(type(config))
    before, now = written.train, config.train
    longer = now.epochs > before.epochs and (now.schedule == "constant" or request.extend)
    if isinstance(data, ImagesSource) and data.earlier_size is not None:
        steps = [size // now.batch for size in (data.earlier_size, data.train_size)]
        if steps[0] != steps[1]:
            say(
                f"an epoch now has {steps[1]} steps instead of {steps[0]}: the run ends at step "
                f"{steps[1] * now.epochs}"
            )
    if not longer:
        directory.check_config(written, config, CHANGEABLE)
        if processes.first and config.data != written.data:  # the folder has another place
            directory.write_config(config)
        return config
    per_epoch = data.train_size // now.batch
    old, new = per_epoch * before.epochs, per_epoch * now.epochs
    warmup = warmup_steps(before.warmup, old)
    train = now.model_copy(update={"warmup": warmup if warmup else 0})
    config = config.model_copy(update={"train": train})
    directory.check_config(written, config, (*CHANGEABLE, "train.epochs", "train.warmup"))
    if now.schedule == "cosine":
        snapshot = directory.latest()
        step = min(snapshot.step if snapshot else 0, old - 1)
        rates = [
            learning_rate(step, total, now.lr, warmup, "cosine", now.min_lr) for total in (old, new)
        ]
        say(
            f"the cosine now ends at step {new} instead of {old}: the learning rate at step {step} "
            f"changes from {rates[0]:.2e} to {rates[1]:.2e}"
        )
    if processes.first:
        directory.write_config(config)
    return config


def check_sizes(
    request: TrainRequest, config: ShapesRun | ImagesRun, data: TrainingData, processes: World
) -> None:
    """Refuse a batch that does not divide, or that no image would fill."""
    train, parts = config.train, processes.size * config.train.accumulate
    if train.batch % parts:
        raise VitcliError(
            f"a batch of {train.batch} does not divide into {processes.size} processes x "
            f"{train.accumulate} micro-batches",
            "choose --batch as a multiple of their product",
        )
    if (train.mixup or train.cutmix) and train.batch // parts % 2:
        raise VitcliError(
            f"mixup and cutmix pair neighbors, and a micro-batch has {train.batch // parts}",
            "choose --batch so that each has an even number of images",
        )
    if (names := trackers(train)) and request.out is None:
        raise VitcliError(f"train.{names[0]} writes into the run directory", "add --out DIR")
    if data.train_size < train.batch:
        raise VitcliError(
            f"{data.train_size} training images do not fill a batch of {train.batch}",
            "choose a smaller --batch",
        )


def class_rows(data: TrainingData, validation: Validation) -> tuple[ClassAccuracy, ...]:
    rows = zip(data.classes, validation.correct, validation.counts, strict=True)
    return tuple(ClassAccuracy(name, n, c / n if n else None) for name, c, n in rows)


def test_score(data: ImagesSource, found: Validation) -> TestScore:
    """The answer of --test."""
    rows, images = class_rows(data, found), sum(found.counts)
    return TestScore(found.accuracy, found.loss, images, *found.interval, rows)


def summary(encoder: VisionEncoder, data: TrainingData, outcome: Outcome) -> TrainSummary:
    """The verdict, and the figures behind it."""
    found = outcome.validation
    low, high = found.interval if found else (None, None)
    chance = chance_accuracy(found.counts) if found else 1 / len(data.classes)
    return TrainSummary(
        verdict=judge(sum(found.correct), found.counts) if found else "diverged",
        val_accuracy=found.accuracy if found else None,
        val_loss=found.loss if found else None,
        chance=chance,
        lower_bound=low,
        upper_bound=high,
        bar=above_chance(chance),
        steps=outcome.steps,
        bad_step=None if outcome.bad_step is None else outcome.bad_step + 1,
        bad_layer=outcome.bad_layer,
        images_per_s=outcome.images_per_s,
        parameters=sum(p.numel() for p in encoder.parameters()),
        trainable=sum(p.numel() for p in encoder.parameters() if p.requires_grad),
        classes=class_rows(data, found) if found else (),
    )


Entry = dict[str, Any]
"""A line of metrics.jsonl."""
Write = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its values, by tag."""
TAGS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "val_loss": "val/loss",
    "val_accuracy": "val/accuracy",
}
"""Tag of each value of metrics.jsonl."""


@contextmanager
def _tensorboard(folder: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))

    def write(step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def _wandb(folder: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
    """An offline run: nothing is sent until somebody types `wandb sync`."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
    run = wandb.init(
        mode="offline",
        project="vitcli",
        name=name,
        dir=str(folder.parent),  # the library adds the folder `wandb`
        config=dict(config),
        settings=quiet,
        reinit="create_new",
    )
    code = 1
    try:
        yield lambda step, values: run.log(dict(values), step=step)
        code = 0
    finally:
        run.finish(exit_code=code)


@contextmanager
def _mlflow(folder: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
    """A file store, which MLflow reads where MLFLOW_ALLOW_FILE_STORE is true, and migrates."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=folder.absolute().as_uri())
    run = client.create_run(client.create_experiment("vitcli"), run_name=name).info.run_id
    values = dotted(config)
    for at in range(0, len(values), 100):  # the most that a call takes
        some = list(values.items())[at : at + 100]
        client.log_batch(run, params=[Param(key, str(value)[:500]) for key, value in some])

    def write(step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(run, metrics=[Metric(tag, v, now, step) for tag, v in values.items()])

    status = "FAILED"
    try:
        yield write
        status = "FINISHED"
    finally:
        client.set_terminated(run, status)


Tracker = Callable[[Path, str, Mapping[str, Any]], AbstractContextManager[Write]]
TRACKERS: dict[str, Tracker] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
"""By key of `train`, extra and folder in the run directory."""


def trackers(train: TrainConfig) -> list[str]:
    """Those that the config turns on."""
    return [name for name in TRACKERS if getattr(train, name)]


@contextmanager
def tracked(
    names: Sequence[str], run: Path, config: Mapping[str, Any], history: Iterable[Entry]
) -> Iterator[list[Callable[[Entry], None]]]:
    """Functions that take each new line of metrics, one per tracker; `history` is written first.

    A tracker's folder is made anew, so that a resumed run has each step once.

    Args:
        names: keys of TRACKERS.
        run: the run directory; each tracker writes into the folder of its name there.
    """
    with ExitStack() as stack:
        writers: list[Callable[[Entry], None]] = []
        for name in names:
            folder = run / name
            if folder.is_symlink():
                raise VitcliError(
                    f"{folder}: is a link (expected a folder of this run)", f"rm {folder}"
                )
            for old in folder.glob("[!.]*"):  # MLflow expects its .trash again
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
            try:
                write = stack.enter_context(TRACKERS[name](folder, run.absolute().name, config))
            except ImportError as error:
                raise VitcliError(
                    f"train.{name}: {name} is not installed", install_extra(name)
                ) from error
            writers.append(partial(_log, write))
        for entry in history:
            for log in writers:
                log(entry)
        yield writers


def _log(write: Write, entry: Entry) -> None:
    values = {tag: entry[key] for key, tag in TAGS.items() if entry.get(key) is not None}
    write(entry["step"], values)
