"""One run from its config to the verdict: its start or snapshot, its trackers, its result."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from vitcli.commands.train.data import ImagesSource, TrainingData
from vitcli.commands.train.distillation import load_teacher
from vitcli.commands.train.inputs import marked, write_inputs
from vitcli.commands.train.loop import Trainer
from vitcli.commands.train.result import (
    CONFIDENCE,
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
from vitcli.commands.train.start import (
    World,
    learning_rate,
    local_device,
    map_outputs,
    set_threads,
    start_encoder,
    warmup_steps,
    world,
)
from vitcli.config.load import ModelRequest
from vitcli.config.training import ImagesRun, ShapesRun, TrainConfig, TrainRequest
from vitcli.config.yaml import dotted
from vitcli.engines.timm_networks import TimmNetwork
from vitcli.errors import VitcliError, install_extra
from vitcli.files import atomic_write
from vitcli.loading import load_model, pick_device
from vitcli.measures import above_chance, wilson
from vitcli.model import Model
from vitcli.nn.encoder import VisionEncoder
from vitcli.results import QUIET, FailedImage, Progress

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
        if directory and processes.first:
            ending.enter_context(directory.held())
        if directory and processes.first and isinstance(data, ImagesSource):
            data.inputs.images = marked(data.inputs)
        snapshot, history = None, []
        if directory and request.resume and directory.config_file.exists():
            config = resumed(request, config, directory, data, processes, say)
            snapshot = directory.latest()
        elif directory and processes.first:
            directory.start(config)
        if directory and processes.first and isinstance(data, ImagesSource):
            write_inputs(directory.inputs_file, data.inputs)
        if config.train.weights and not (source or snapshot):  # killed before its first snapshot
            start = config.train
            named = ModelRequest(
                weights=start.weights, which=start.which, prefix=start.prefix, device="cpu"
            )
            source = load_model(named)
        if snapshot:  # its weights come with it
            encoder = start_encoder(config.encoder, config.train)
        else:
            encoder = started(request, config, source, data, say)
        if directory and processes.first and isinstance(encoder, TimmNetwork):
            written = encoder.config(config.preprocess, data.classes)
            with atomic_write(directory.path / "config.json") as file:
                file.write(json.dumps(written, indent=2).encode())
        encoder = encoder.to(device)
        set_threads([encoder, teacher] if teacher else [encoder], config.train.threads)
        trainer = Trainer(
            encoder,
            data,
            config.train,
            device,
            processes,
            directory,
            audited=config.train.freeze != "none" or bool(config.train.lora.heads),
            teacher=teacher,
            progress=progress,
        )
        if directory and request.resume:
            step, length = (snapshot.step, snapshot.metrics_bytes) if snapshot else (0, 0)
            history = directory.rewind_metrics(length, step, cut=False)
        if snapshot:
            trainer.restore(snapshot, history)
        if directory and request.resume and processes.first:
            directory.rewind_metrics(length, step)
        if left := data.train_size % config.train.batch:
            say(
                f"each epoch leaves out {left:,} of {data.train_size:,} training images, which do "
                f"not fill a batch of {config.train.batch}; every epoch draws others"
            )
        place = directory.path if directory and processes.first else None
        settings = config.model_dump(mode="python")
        names = trackers(config.train) if place else []
        with tracked(names, place or Path(), settings, trainer.history) as trainer.writers:
            outcome = trainer.run()
        test = None
        if request.test and outcome.validation and isinstance(data, ImagesSource):
            test = test_score(data, trainer.evaluate(data.test_batches, data.test_size))
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
        if directory and processes.first:
            with atomic_write(directory.path / "result.json") as file:
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

    Raises:
        VitcliError: the config is not that of the run.
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
        directory.check_config(config, CHANGEABLE)
        if processes.first and config.data != written.data:  # the folder has another place
            directory.write_config(config)
        return config
    per_epoch = data.train_size // now.batch
    old, new = per_epoch * before.epochs, per_epoch * now.epochs
    warmup = warmup_steps(before.warmup, old)
    train = now.model_copy(update={"warmup": warmup if warmup else 0})
    config = config.model_copy(update={"train": train})
    directory.check_config(config, (*CHANGEABLE, "train.epochs", "train.warmup"))
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


def started(
    request: TrainRequest,
    config: ShapesRun | ImagesRun,
    source: Model | None,
    data: TrainingData,
    say: Callable[[str], None],
) -> VisionEncoder:
    """The encoder before its first step; says which outputs of the weights it kept.

    Raises:
        VitcliError: as `start_encoder`; names of classes that cannot be those of the weights.
    """
    if source is None:
        if request.classes:
            raise VitcliError(
                "--classes: needs the weights whose outputs it names", "add --weights SOURCE"
            )
        return start_encoder(config.encoder, config.train)
    names, outputs = request.classes or source.config.classes, source.config.encoder.head_out
    if request.classes and len(request.classes) != (outputs or 0):
        raise VitcliError(
            f"--classes: wrong number of names (got {len(request.classes)}, expected "
            f"{outputs or 0}, one per output of the weights)",
            "write one line per output; leave it empty for an output that is not a class here",
        )
    mapped = map_outputs(names, data.classes) if names and len(names) == outputs else None
    if mapped is not None:
        say(f"classifier: {mapped.line()}")
    elif outputs:
        say(
            f"classifier: new for {len(data.classes)} classes; the weights have {outputs} outputs "
            "without names (--classes FILE names them)"
        )
    return start_encoder(config.encoder, config.train, source.encoder, mapped)


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
    images = sum(found.counts)
    low, high = wilson(sum(found.correct), images, CONFIDENCE)
    return TestScore(found.accuracy, found.loss, images, low, high, class_rows(data, found))


def summary(encoder: VisionEncoder, data: TrainingData, outcome: Outcome) -> TrainSummary:
    """The verdict, and the figures behind it."""
    validation = outcome.validation
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
        bar=above_chance(chance),
        steps=outcome.steps,
        bad_step=None if outcome.bad_step is None else outcome.bad_step + 1,
        bad_layer=outcome.bad_layer,
        images_per_s=outcome.images_per_s,
        parameters=sum(p.numel() for p in encoder.parameters()),
        trainable=sum(p.numel() for p in encoder.parameters() if p.requires_grad),
        classes=class_rows(data, validation) if validation is not None else (),
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

    Raises:
        VitcliError: the library is not installed, or the folder is a link.
    """
    with ExitStack() as stack:
        writers = []
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
            writers.append(_of_entries(write))
        for entry in history:
            for log in writers:
                log(entry)
        yield writers


def _of_entries(write: Write) -> Callable[[Entry], None]:
    def log(entry: Entry) -> None:
        values = {tag: entry[key] for key, tag in TAGS.items() if entry.get(key) is not None}
        write(entry["step"], values)

    return log
