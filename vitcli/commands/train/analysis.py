"""Training on shapes or images: from the arguments to the config of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitcli.commands.train.data import ImagesSource, ShapesSource
from vitcli.commands.train.result import TrainResult
from vitcli.commands.train.run import Run, run
from vitcli.commands.train.snapshots import RunDirectory
from vitcli.commands.train.splits import read_inputs
from vitcli.commands.train.start import with_classifier
from vitcli.config.request import resized_to
from vitcli.config.settings import named_settings
from vitcli.config.training import (
    ImagesRun,
    ShapesRun,
    TrainRequest,
    launched,
)
from vitcli.errors import VitcliError
from vitcli.images.synthetic import Shapes
from vitcli.loading import load_model
from vitcli.model import Model
from vitcli.results import QUIET, Progress


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
    request = TrainRequest.of(locals(), named_settings(set))
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
    request = TrainRequest.of(locals(), named_settings(set))
    source = source_of(request)
    return run_images(request, images_config(request, source), source, progress, download)


def source_of(request: TrainRequest) -> Model | None:
    """The model that a run starts from, or none where its weights are fresh or resumed."""
    return load_model(request.model) if request.model.weights else None


def shapes_config(request: TrainRequest, source: Model | None = None) -> ShapesRun:
    """The whole config of a run on shapes."""
    config = request.run_config(ShapesRun, source.config if source else None)
    return for_classes(request, config, config.data.classes)


def run_shapes(
    request: TrainRequest,
    config: ShapesRun,
    source: Model | None = None,
    progress: Progress = QUIET,
) -> TrainResult:
    """Train on synthetic shapes."""
    data = ShapesSource(
        shapes_of(config), config.data.train_size, config.data.val_size, config.preprocess
    )
    return run(request, config, data, source, progress)


def shapes_of(config: ShapesRun) -> Shapes:
    data = config.data
    return Shapes(config.encoder.image_size, data.classes, data.difficulty, config.train.seed)


def images_config(request: TrainRequest, source: Model | None = None) -> ImagesRun:
    """The whole config of a run on images, but for the classifier, which follows the data."""
    config = request.run_config(ImagesRun, source.config if source else None)
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
    """Read the images that the config names and train on them."""
    if download and launched().size > 1:
        raise VitcliError("--download is for one process", "fetch the files first, then torchrun")
    stored = None
    if request.resume and request.out and (request.out / "config.yaml").exists():
        directory = RunDirectory(request.out)
        stored = read_inputs(directory.inputs_file)
        if stored is None and directory.latest():  # else it was killed in its first moment
            raise VitcliError(
                f"{request.out}: is a run of an older release, which kept no list of its images "
                "and chose the held-out ones by another rule, so it cannot be resumed",
                f"train on from its weights: vitcli train DATA --weights {request.out} --out DIR "
                "(it may have trained on images that are held out there)",
            )
    data = ImagesSource(config, request, stored, download, progress)
    for text in data.inputs.notes if launched().rank == 0 else ():
        progress.line(text)
    return run(request, for_classes(request, config, data.classes), data, source, progress)


def for_classes(request: TrainRequest, config: Run, classes: tuple[str, ...]) -> Run:
    """The config with a classifier of these classes."""
    possible: dict[str, list[Any]] = {"head": ["distilled"], "head_out": [len(classes)]}
    if config.train.teacher:
        possible["dist_token"] = [True]
    else:
        possible["head"].append("linear")
    for setting in request.settings:
        section, key = setting.path[0], setting.path[-1]
        if section == "encoder" and setting.value not in possible.get(key, [setting.value]):
            raise VitcliError(
                f"{setting.source}: training classifies {len(classes)} classes",
                f"leave {'.'.join(setting.path)} out: the classifier follows the data",
            )
    named = with_classes(config, len(classes))
    return named.model_copy(update={"classes": tuple(classes)})


def with_classes(config: Run, classes: int) -> Run:
    """The config as it is run: a classifier for the classes, preprocessing to the input's size."""
    if config.encoder.channels != 3:
        raise VitcliError("training images have 3 channels", "add --set encoder.channels=3")
    encoder = with_classifier(config.encoder, classes, distilled=config.train.teacher is not None)
    preprocess = config.preprocess
    if preprocess.output_size != encoder.image_size:
        preprocess = resized_to(preprocess, encoder.image_size)
    return type(config).model_validate(
        {**dict(config), "encoder": encoder, "preprocess": preprocess}
    )
