"""Training runs, from the config to the verdict: shapes and images."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from vitcli.commands.train.data import ImagesSource, ShapesSource, TrainingData
from vitcli.commands.train.distillation import load_teacher
from vitcli.commands.train.inputs import read_inputs, write_inputs
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
    with_classifier,
    world,
)
from vitcli.commands.train.trackers import tracked, trackers
from vitcli.config.load import ModelRequest, Setting, resized_to
from vitcli.config.training import (
    IMAGES_RECIPE,
    SHAPES_RECIPE,
    ImagesRun,
    ShapesRun,
    TrainRequest,
    launched,
    split_preset,
)
from vitcli.engines.timm_networks import TimmNetwork
from vitcli.errors import VitcliError
from vitcli.files import atomic_write
from vitcli.images.shapes import Shapes
from vitcli.loading import load_model, pick_device
from vitcli.measures import above_chance, wilson
from vitcli.model import Model
from vitcli.nn.encoder import VisionEncoder
from vitcli.results import QUIET, FailedImage, Progress

CHANGEABLE = (
    "train.snapshot_every",
    "train.snapshot_seconds",
    "train.log_every",
    "train.threads",
    "train.tensorboard",
    "train.wandb",
    "train.mlflow",
    "train.teacher",  # whose checksum may not change
    "data.workers",
)
"""Keys that --resume may change: none of them moves a weight."""
KEYS = {
    "data": "data.path",
    "difficulty": "data.difficulty",
    "norm": "encoder.norm_placement",
    **{name: f"train.{name}" for name in ("lr", "epochs", "batch", "warmup", "freeze", "seed")},
    **{name: f"train.{name}" for name in ("weights", "which", "prefix")},
}
"""Arguments of `train` and `train_shapes` that are config keys."""
REQUESTED = (
    *("device", "resume", "extend", "accept_new_data"),
    *("check", "fail_fast", "test", "classes"),
)
"""Arguments that are `TrainRequest`'s."""
Run = TypeVar("Run", ShapesRun, ImagesRun)


def train_shapes(
    *,
    norm: str | None = None,
    warmup: float | None = None,
    lr: float | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    difficulty: float | None = None,
    seed: int | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    weights: str | Path | None = None,
    which: str | None = None,
    prefix: str | None = None,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = QUIET,
) -> TrainResult:
    """Train a small encoder on synthetic shapes and say whether it learned, as `train-shapes`.

    Args:
        norm: `pre` or `post`, where the norms are in a block.
        warmup: a fraction of all steps below 1, else a number of steps.
        lr: peak learning rate of AdamW.
        difficulty: 0 to 1: rotation, low contrast and noise of the images.
        seed: of weights, images, order and dropout.
        preset, config: what to start from in place of the default recipe.
        weights: a checkpoint or run directory to start from.
        which, prefix: its tensors, as in `vitcli.load`.
        set: dotted config keys, as `--set` takes them: `{"encoder.depth": 4}`.
        out: the run directory: config, metrics, snapshots, weights, result.
        resume: continue the run in `out`.
        progress: shows the run as it goes; without it nothing is printed.

    Raises:
        VitcliError: a bad config or source, an impossible run, a directory that cannot be
            written or holds another run.
    """
    request = _request(locals())
    source = source_of(request)
    return run_shapes(request, shapes_config(request, source), source, progress)


def train(
    data: str | Path | None = None,
    *,
    lr: float | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    warmup: float | None = None,
    freeze: str | None = None,
    seed: int | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    weights: str | Path | None = None,
    which: str | None = None,
    prefix: str | None = None,
    set: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    accept_new_data: bool = False,
    extend: bool = False,
    check: bool = False,
    fail_fast: bool = False,
    test: bool = False,
    classes: tuple[str, ...] | None = None,
    download: bool = False,
    device: str = "auto",
    progress: Progress = QUIET,
) -> TrainResult:
    """Fit an encoder and a classifier to a folder of images, as `vitcli train`.

    Args:
        data: a folder per class, or such folders below `train`, `val` and `test`, or the files of
            CIFAR-10, CIFAR-100, MNIST or Fashion-MNIST; a resumed run knows its own.
        freeze: `encoder` trains the classifier alone.
        accept_new_data: a resumed run trains on files that were not there before.
        extend: a resumed run with more epochs stretches its cosine over them.
        check: decode every image before the first step.
        fail_fast: an image that cannot be read ends the run; else it is left out and listed.
        test: report accuracy on the test split at the end.
        classes: names for the outputs of `weights`, in their order, where they have none or
            others than the folders.
        download: fetch a published set (`set={"data.kind": "cifar10"}`).

    The other arguments are those of `train_shapes`.

    Raises:
        VitcliError: as `train_shapes`; no images, or on resuming not those of the run.
    """
    request = _request(locals())
    source = source_of(request)
    return run_images(request, images_config(request, source), source, progress, download)


def _request(given: Mapping[str, Any]) -> TrainRequest:
    """The arguments of `train` or `train_shapes` as the request of a command line; what is in
    `set` comes last, so the exact key wins."""
    named = {key: given[name] for name, key in KEYS.items() if given.get(name) is not None}
    named = {key: str(v) if isinstance(v, Path) else v for key, v in named.items()}
    settings = [Setting(tuple(key.split(".")), v, key) for key, v in named.items()]
    settings += [
        Setting(tuple(key.split(".")), v, f"set[{key!r}]")
        for key, v in (given["set"] or {}).items()
    ]
    preset, backbone = split_preset(given["preset"])
    model = ModelRequest(
        preset=preset,
        config_file=given["config"] and Path(given["config"]),
        device="cpu",
        weights=named.get("train.weights"),
        which=named.get("train.which"),
        prefix=named.get("train.prefix"),
    )
    rest = {name: given[name] for name in REQUESTED if name in given}
    return TrainRequest(
        model, (*backbone, *settings), out=given["out"] and Path(given["out"]), **rest
    )


def source_of(request: TrainRequest) -> Model | None:
    """The model that a run starts from, or none where its weights are fresh or resumed."""
    return load_model(request.model) if request.model.weights else None


def shapes_config(request: TrainRequest, source: Model | None = None) -> ShapesRun:
    """The whole config of a run on shapes.

    Raises:
        VitcliError: unknown keys, wrong types or impossible combinations.
    """
    config = request.run_config(ShapesRun, SHAPES_RECIPE, source.config if source else None)
    return for_classes(request, config, config.data.classes)


def run_shapes(
    request: TrainRequest,
    config: ShapesRun,
    source: Model | None = None,
    progress: Progress = QUIET,
) -> TrainResult:
    """Train on synthetic shapes.

    Raises:
        VitcliError: an impossible run, a directory that cannot be written, a failed audit.
    """
    data = ShapesSource(
        shapes_of(config), config.data.train_size, config.data.val_size, config.preprocess
    )
    return run(request, config, data, source, progress)


def shapes_of(config: ShapesRun) -> Shapes:
    data = config.data
    return Shapes(config.encoder.image_size, data.classes, data.difficulty, config.train.seed)


def images_config(request: TrainRequest, source: Model | None = None) -> ImagesRun:
    """The whole config of a run on images, but for the classifier, which follows the data.

    Raises:
        VitcliError: unknown keys, wrong types or impossible combinations; no data.
    """
    config = request.run_config(ImagesRun, IMAGES_RECIPE, source.config if source else None)
    if config.data.path is None:
        raise VitcliError(
            "DATA: is missing (expected a folder of images)", "name a folder: vitcli train DATA"
        )
    return with_classes(config, config.encoder.head_out or 1)


def run_images(
    request: TrainRequest,
    config: ImagesRun,
    source: Model | None = None,
    progress: Progress = QUIET,
    download: bool = False,
) -> TrainResult:
    """Read the images that the config names and train on them.

    Raises:
        VitcliError: as `run_shapes`; no images, or on resuming not those of the run.
    """
    data = images_of(request, config, progress, download)
    for text in data.inputs.notes if launched().rank == 0 else ():
        progress.line(text)
    return run(request, for_classes(request, config, data.classes), data, source, progress)


def images_of(
    request: TrainRequest,
    config: ImagesRun,
    progress: Progress = QUIET,
    download: bool = False,
) -> ImagesSource:
    """The images that the config names; those of the run, where one is resumed.

    Raises:
        VitcliError: they are not there or not readable, or they are not those of the run.
    """
    assert config.data.path is not None
    if download and launched().size > 1:
        raise VitcliError("--download is for one process", "fetch the files first, then torchrun")
    stored = None
    if request.resume and request.out and (request.out / "config.yaml").exists():
        stored = read_inputs(RunDirectory(request.out).inputs_file)
        if stored is None:
            raise VitcliError(
                f"{request.out}: is a run of an older release, which kept no list of its images "
                "and chose the held-out ones by another rule, so it cannot be resumed",
                f"train on from its weights: vitcli train DATA --weights {request.out} --out DIR "
                "(it may have trained on images that are held out there)",
            )
    return ImagesSource(
        Path(config.data.path),
        config.data,
        config.preprocess,
        config.train.seed,
        config.encoder.image_size,
        download=download,
        stored=stored,
        accept_new=request.accept_new_data,
        test=request.test,
        check=request.check,
        fail_fast=request.fail_fast,
        report=lambda done, total: progress(done, total, "images decoded"),
    )


def for_classes(request: TrainRequest, config: Run, classes: tuple[str, ...]) -> Run:
    """The config with a classifier of these classes.

    Raises:
        VitcliError: a head was asked for that cannot be: a run classifies its classes.
    """
    heads = ("distilled",) if config.train.teacher else ("linear", "distilled")
    possible: dict[str, tuple[Any, ...]] = {"head": heads, "head_out": (len(classes),)}
    if config.train.teacher:
        possible["dist_token"] = (True,)
    for setting in request.settings:
        key = setting.path[-1]
        if setting.path[0] == "encoder" and setting.value not in possible.get(
            key, (setting.value,)
        ):
            raise VitcliError(
                f"{setting.source}: training classifies {len(classes)} classes",
                f"leave {'.'.join(setting.path)} out: the classifier follows the data",
            )
    named = with_classes(config, len(classes))
    return named.model_copy(update={"classes": tuple(classes)})


def with_classes(config: Run, classes: int) -> Run:
    """The config as it is run: a classifier for the classes, preprocessing to the input's size.

    Raises:
        VitcliError: nothing is pooled, or the encoder does not read RGB.
    """
    if config.encoder.channels != 3:
        raise VitcliError("training images have 3 channels", "add --set encoder.channels=3")
    encoder = with_classifier(config.encoder, classes, distilled=config.train.teacher is not None)
    preprocess = config.preprocess
    if preprocess.output_size != encoder.image_size:
        preprocess = resized_to(preprocess, encoder.image_size)
    return type(config).model_validate(
        {**dict(config), "encoder": encoder, "preprocess": preprocess}
    )


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
    if not longer:
        directory.check_config(config, CHANGEABLE)
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
