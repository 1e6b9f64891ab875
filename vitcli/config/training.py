"""The config of a training run: the model's config plus `data` and `train`; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import (
    Field,
    PositiveFloat,
    model_validator,
)

from vitcli.config.load import (
    ModelRequest,
    Setting,
    check_device,
    check_table_rule,
    load_config,
    read_saved_config,
)
from vitcli.config.schema import ModelConfig, Section
from vitcli.config.yaml import Count, Document, Fraction, Pair, Rate, Width, words
from vitcli.errors import VitcliError

ShapeName = Literal[
    "circle",
    "square",
    "triangle",
    "cross",
    "diamond",
    "pentagon",
    "hexagon",
    "star",
    "ring",
]
DataKind = Literal["auto", "folder", "cifar10", "cifar100", "mnist", "fashion-mnist", "idx"]
QkvPart = Literal["q", "k", "v"]


class ShapesData(Section):
    """Images drawn on the fly; image i depends on `train.seed`, i and these keys alone."""

    classes: words(ShapeName) = ("circle", "square", "triangle", "cross")  # type: ignore[valid-type]
    train_size: Count = 16_384
    val_size: Count = 2_048
    difficulty: Fraction = 0.1
    """0 to 1: more rotation, less contrast, more noise."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError("classes: two or more, each once")
        return self


class ImagesData(Section):
    """Images on disk, and what is done to them before the model sees them in training."""

    path: str | None = None
    """The folder, the `DATA` of the command line."""
    kind: DataKind = "auto"
    """auto looks at the files: a folder per class, or a published set's own; idx is any set in
    MNIST's format."""
    val_fraction: Rate = 0.1
    """About this share of each class is held out where there is no split to validate on."""
    train_limit: Count | None = None
    """Use only this many training images, drawn by the seed."""
    workers: int = Field(default=0, ge=0, le=256)
    """Processes that read and augment; 0 does it in the training process."""
    crop_scale: Pair | None = (0.08, 1.0)
    """Area of the random resized crop; null resizes the whole image."""
    crop_ratio: Pair = (0.75, 4 / 3)
    pad_crop: int = Field(default=0, ge=0, le=65_536)
    """Pixels of zeros around the image before a random crop of the input size."""
    flip: Fraction = 0.5
    erase: Fraction = 0.0
    """Probability of random erasing (Zhong et al. 2020)."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.crop_scale and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError("crop_scale: two rising numbers above 0, at most 1")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1]:
            raise ValueError("crop_ratio: two rising numbers above 0")
        if self.crop_scale and self.pad_crop:
            raise ValueError("pad_crop, crop_scale: needs crop_scale: null")
        return self


class LoraConfig(Section):
    """Low-rank adapters on chosen heads; no head means none."""

    heads: words(str) = ()  # type: ignore[valid-type]
    """BLOCK:HEAD, both from 1."""
    rank: Width = 4
    alpha: PositiveFloat = 8.0
    """The adapter is scaled by alpha / rank."""
    on: words(QkvPart) = ("q", "k", "v")  # type: ignore[valid-type]
    train_head: bool = False
    """Train the classifier too."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self.places()
        if not self.on or len(set(self.on)) < len(self.on):
            raise ValueError("on: some of q, k, v, each once")
        return self

    def places(self) -> tuple[tuple[int, int], ...]:
        """(block, head) of each adapter, as indices from 0."""
        pairs = [head.split(":") for head in self.heads]
        if not all(
            len(pair) == 2 and all(p.isascii() and p.isdecimal() and 0 < len(p) < 7 for p in pair)
            for pair in pairs
        ):
            raise ValueError("heads: each BLOCK:HEAD, for example 12:3")
        if any(int(part) == 0 for pair in pairs for part in pair):
            raise ValueError("heads: blocks and heads count from 1, as in 12:3")
        places = tuple((int(block) - 1, int(head) - 1) for block, head in pairs)
        if len(set(places)) < len(places):
            raise ValueError("heads: the same head twice")
        return places


class TrainConfig(Section):
    """The recipe."""

    weights: str | None = None
    """Where the encoder's weights come from at the start; null draws them from the seed."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Weights, order, drawing, augmentation and dropout all follow from it."""
    epochs: Count = 1
    batch: Count = 32
    """Images of one optimizer step, over all processes and micro-batches."""
    accumulate: Count = 1
    """Micro-batches that a step is split into; as over processes, dropout draws other masks."""

    lr: PositiveFloat = 1e-3
    warmup: float | int = Field(default=0, ge=0)
    """Linear warm-up: a fraction of all steps below 1, else a number of steps."""
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr: float = Field(default=0.0, ge=0.0)
    """Where the cosine ends."""
    weight_decay: float = Field(default=0.05, ge=0.0)
    """On matrices only: norms, biases, tokens, tables and LayerScale have none."""
    betas: Pair = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    clip_grad: PositiveFloat | None = None
    """Largest norm of the gradient of all parameters; null leaves it as it is."""

    label_smoothing: Rate = 0.0
    mixup: float = Field(default=0.0, ge=0.0)
    """Alpha of mixup's Beta distribution (Zhang et al. 2018); 0 is off."""
    cutmix: float = Field(default=0.0, ge=0.0)
    """Alpha of CutMix's Beta distribution (Yun et al. 2019); with both, each batch takes one."""
    ema: Rate | None = None
    """Decay d of the averaged weights, which are then those that are validated; after t updates
    the decay is min(d, (1 + t) / (10 + t)), so that the first ones do not linger."""

    freeze: Literal["none", "encoder"] = "none"
    """encoder trains the classifier alone, a linear probe."""
    lora: LoraConfig = LoraConfig()

    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 autocasts the forward pass; weights and optimizer stay float32."""
    compile: bool = False
    threads: Width | None = None
    """CPU threads of each process; null is one for a small model and torch's choice else."""
    log_every: Count = 1
    """Steps between lines of metrics.jsonl."""
    snapshot_every: Count = 100
    """Steps between snapshots; the last step has one too, and so has a run that is interrupted."""
    snapshot_seconds: PositiveFloat = 60.0
    """Longest time between snapshots, counted at the end of a step."""
    tensorboard: bool = False
    """Event files in the run directory."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.lora.heads and self.freeze != "none":
            raise ValueError("freeze, lora.heads: adapters freeze the encoder already; write none")
        if self.batch % self.accumulate:
            raise ValueError(
                f"accumulate, batch: {self.accumulate} does not divide batch {self.batch}"
            )
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError("warmup: a fraction below 1, or a whole number of steps")
        if self.schedule == "constant" and self.min_lr:
            raise ValueError("min_lr, schedule: a constant rate has no end; leave min_lr out")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr, lr: {self.min_lr:g} is above the peak rate {self.lr:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas: each at least 0 and below 1")
        return self


class ShapesRun(ModelConfig):
    """`vitcli train-shapes`."""

    data: ShapesData = ShapesData()
    train: TrainConfig = TrainConfig()


class ImagesRun(ModelConfig):
    """`vitcli train`."""

    data: ImagesData = ImagesData()
    train: TrainConfig = TrainConfig()


SHAPES_RECIPE: dict[str, Any] = {
    "name": "shapes",
    "encoder": {
        "image_size": 32,
        "patch_size": 8,
        "hidden": 96,
        "depth": 6,
        "heads": 3,
        "mlp_hidden": 384,
        "init": "xavier_uniform",
    },
    "preprocess": {"resize_size": 32},
    "train": {"lr": 2.5e-3, "clip_grad": 1.0},
    "data": {"train_size": 12_288, "val_size": 1_024},
}
"""What `vitcli train-shapes` starts from when no preset is named; the rest is the schema's.

With it pre-norm learns without a warm-up, post-norm stalls without and learns with a warm-up of a
quarter of the steps; `experiments/README.md` has how surely."""

IMAGES_RECIPE: dict[str, Any] = {
    "name": "vit-small-images",
    "encoder": {
        "image_size": 32,
        "patch_size": 4,
        "hidden": 192,
        "depth": 9,
        "heads": 3,
        "mlp_hidden": 768,
        "drop_path": 0.1,
    },
    "preprocess": {"resize_size": 32},
    "train": {
        "epochs": 100,
        "batch": 128,
        "warmup": 0.05,
        "clip_grad": 1.0,
        "label_smoothing": 0.1,
        "mixup": 0.8,
        "cutmix": 1.0,
    },
    "data": {"erase": 0.25},
}
"""What `vitcli train` starts from: the small-data recipe of DeiT and its followers."""


@dataclass(frozen=True)
class Launch:
    """What torchrun says to a process: which one of how many it is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def launched() -> Launch:
    """The process's place by RANK, WORLD_SIZE and LOCAL_RANK; alone where neither is set.

    Raises:
        VitcliError: one of them is missing, is not a number, or is out of range.
    """
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if given["RANK"] is None and given["WORLD_SIZE"] is None:
        return Launch()
    hint = "unset RANK WORLD_SIZE LOCAL_RANK, or start with torchrun"
    numbers: dict[str, int] = {}
    for name, text in given.items():
        if text is None and name == "LOCAL_RANK":
            text = given["RANK"]  # all on one machine
        if text is None:
            there = next(name for name, value in given.items() if value is not None)
            raise VitcliError(f"{name}: is missing beside {there}={given[there]}", hint)
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise VitcliError(f"{name}: is not a count (got {text[:40]!r})", hint)
        numbers[name] = int(text)
    launch = Launch(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])
    if not launch.rank < launch.size:
        raise VitcliError(
            f"RANK: is out of range (got {launch.rank}, expected below WORLD_SIZE={launch.size})",
            hint,
        )
    return launch


HEADS = ("heads",)
Run = TypeVar("Run", ShapesRun, ImagesRun)


@dataclass(frozen=True)
class TrainRequest:
    """A run as the command line names it.

    `model` is the preset, file and weights to start from; `settings` are all that was set.
    """

    model: ModelRequest = field(default_factory=ModelRequest)
    settings: tuple[Setting, ...] = ()
    device: str = "auto"
    out: Path | None = None
    resume: bool = False
    accept_new_data: bool = False
    """A resumed run trains on files that were not there before."""
    extend: bool = False
    """A resumed run with more epochs stretches its cosine over them."""
    check: bool = False
    """Decode every image before the first step."""
    fail_fast: bool = False
    """An image that cannot be read ends the run."""
    test: bool = False
    """Report accuracy on the test split at the end."""
    classes: tuple[str, ...] | None = None
    """Names for the outputs of the weights to start from, in their order; "" is for none."""

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.accept_new_data and not self.resume:
            raise VitcliError("--accept-new-data is for a run that is resumed", "add --resume")
        if self.extend and not self.resume:
            raise VitcliError("--extend is for a run that is resumed", "add --resume")

    @property
    def resumed_config(self) -> Path | None:
        """The config of the run to go on with, if the command names no other start."""
        named = self.model.preset or self.model.config_file or self.model.weights
        if not self.resume or self.out is None or named:
            return None
        file = self.out / "config.yaml"
        return file if file.exists() else None

    def run_config(
        self, schema: type[Run], recipe: Mapping[str, Any], source: ModelConfig | None = None
    ) -> Run:
        """The run's config: a run to resume, or the recipe, under preset, file and settings.

        `source` is the config that belongs to the weights to start from.

        Raises:
            VitcliError: as `load_config`; settings of adapters without a head to adapt.
        """
        if self.resumed_config:
            start = read_saved_config(self.resumed_config)
        elif source:
            model = source.model_dump(mode="python")
            rest = {key: value for key, value in recipe.items() if key in ("data", "train")}
            start = Document(f"the config of {self.model.weights}", {**rest, **model})
        else:
            start = Document("the default recipe", dict(recipe))
        preset = None if source else self.model.preset
        config = load_config(schema, preset, self.model.config_file, self.settings, start)
        check_table_rule(self.settings, config.encoder)
        lone = [s for s in self.settings if s.path[:2] == ("train", "lora") and s.path[2:] != HEADS]
        if lone and not config.train.lora.heads:
            raise VitcliError(f"{lone[0].source}: there is no adapter", "--lora BLOCK:HEAD")
        return config
