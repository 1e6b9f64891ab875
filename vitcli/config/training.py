"""The config of a training run: the model's config plus `data` and `train`; no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, PositiveFloat, model_validator

from vitcli.config.load import (
    ModelRequest,
    check_device,
    check_settings,
    is_architecture,
    load_config,
    read_saved_config,
)
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Setting
from vitcli.config.yaml import Count, Document, Fraction, Pair, Rate, Section, Width, words
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
    """Drawn images of shapes; image i depends on `train.seed`, i and these keys alone."""

    classes: words(ShapeName) = ("circle", "square", "triangle", "cross")  # type: ignore[valid-type]
    """The shapes, two or more: circle, square, triangle, cross, diamond, pentagon, hexagon, star,
    ring."""
    train_size: Count = 16_384
    """Training images."""
    val_size: Count = 2_048
    """Validation images."""
    difficulty: Fraction = 0.1
    """0 to 1; a larger value means more rotation, less contrast and more noise."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError("classes: two or more, each once")
        return self


class ImagesData(Section):
    """Images on disk, and how they are augmented in training."""

    path: str | None = None
    """The folder of images, as `DATA` on the command line."""
    kind: DataKind = "auto"
    """The format of the files. auto: found by their content; folder: a folder per class; cifar10,
    cifar100, mnist, fashion-mnist: the published files; idx: any set in MNIST's format."""
    val_fraction: Rate = 0.1
    """Share of each class that is held out for validation if the data have no such split."""
    train_limit: Count | None = None
    """Number of training images to use, drawn by the seed; null: all."""
    workers: int = Field(default=0, ge=0, le=256)
    """Processes that read and augment images; 0: the training process does it."""
    crop_scale: Pair | None = (0.08, 1.0)
    """Smallest and largest area of the random resized crop, as shares of the image; null: the
    whole image is resized."""
    crop_ratio: Pair = (0.75, 4 / 3)
    """Smallest and largest aspect ratio, width over height, of the random resized crop."""
    pad_crop: int = Field(default=0, ge=0, le=65_536)
    """Pixels of zeros on each side of the image before a random crop of the input size; 0: no such
    crop."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    erase: Fraction = 0.0
    """Probability of random erasing per image (Zhong et al. 2020)."""

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
    """Low-rank adapters on chosen attention heads (LoRA, Hu et al. 2022)."""

    heads: words(str) = ()  # type: ignore[valid-type]
    """The adapted heads as BLOCK:HEAD, both counted from 1; empty: no adapters."""
    rank: Width = 4
    """Rank of each adapter."""
    alpha: PositiveFloat = 8.0
    """Adapters are scaled by alpha / rank."""
    on: words(QkvPart) = ("q", "k", "v")  # type: ignore[valid-type]
    """The projections that are adapted: q (queries), k (keys), v (values)."""
    train_head: bool = False
    """Whether the classifier is trained beside the adapters."""

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
    """The training recipe."""

    weights: str | None = None
    """Checkpoint that initializes the encoder: file, directory or hub id; null: random weights."""
    which: Literal["ema", "raw"] | None = None
    """Which copy of those weights, if the checkpoint has an averaged one; null: the averaged."""
    prefix: str | None = None
    """What precedes the names of its vision tower's tensors; null: found automatically."""
    backbone: str | None = None
    """timm:ARCHITECTURE, trained from random weights in place of `encoder`, of which the image size
    remains, for example a CNN; the run directory is then a checkpoint of timm. null: `encoder`."""
    teacher: str | None = None
    """Checkpoint of a classifier of the same classes, which the distillation token imitates (DeiT,
    Touvron et al. 2021): file, directory or hub id, or timm:SOURCE; null: no teacher."""
    teacher_sha256: str | None = None
    """SHA-256 of the teacher's tensors, which it must have; null: the run writes it down."""
    distillation: Literal["hard", "soft"] = "hard"
    """What is imitated. hard: the teacher's most likely class; soft: its probabilities."""
    distillation_alpha: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the loss; that of the labels is 1 - alpha. DeiT: 0.5 for hard, 0.1
    for soft."""
    distillation_temperature: PositiveFloat = 1.0
    """Temperature of `distillation: soft`, which divides both sides' logits. DeiT: 3."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of random weights, order of images, drawn images, augmentation and dropout."""
    epochs: Count = 1
    """Passes over the training images."""
    batch: Count = 32
    """Images per optimizer step, over all processes and micro-batches."""
    accumulate: Count = 1
    """Micro-batches per step; with dropout each number of them draws other masks."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate of AdamW."""
    warmup: float | int = Field(default=0, ge=0)
    """Linear warm-up of the learning rate: below 1 a fraction of all steps, else a number of
    steps."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate after the warm-up. cosine: falls to `min_lr` at the last step; constant."""
    min_lr: float = Field(default=0.0, ge=0.0)
    """Learning rate at the end of `schedule: cosine`."""
    weight_decay: float = Field(default=0.05, ge=0.0)
    """AdamW's weight decay, on matrices only: norms, biases, tokens, tables and LayerScale have
    none."""
    betas: Pair = (0.9, 0.999)
    """AdamW's decay rates of the two moments of the gradient."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    clip_grad: PositiveFloat | None = None
    """Largest norm of the gradient of all parameters together; null: no clipping."""

    label_smoothing: Rate = 0.0
    """Share of each label that is spread evenly over all classes."""
    mixup: float = Field(default=0.0, ge=0.0)
    """Alpha of mixup's Beta distribution (Zhang et al. 2018); 0: no mixup."""
    cutmix: float = Field(default=0.0, ge=0.0)
    """Alpha of CutMix's Beta distribution (Yun et al. 2019); 0: no CutMix. With mixup too, each
    batch uses one of both."""
    ema: Rate | None = None
    """Decay d of the averaged weights, which are then validated and saved beside the raw ones;
    after t updates it is min(d, (1 + t) / (10 + t)). null: no average."""

    freeze: Literal["none", "encoder"] = "none"
    """What is not trained. none; encoder: only the classifier is trained (a linear probe)."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters; with any, the encoder's own weights are not trained."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the forward pass. bfloat16: autocast; weights and optimizer stay float32."""
    compile: bool = False
    """Whether torch.compile compiles the model."""
    threads: Width | None = None
    """CPU threads per process; null: one for a small model, else torch's choice."""
    validate_every: Count = 1
    """Epochs per validation; the last epoch has one too."""
    log_every: Count = 1
    """Steps per line of metrics.jsonl."""
    snapshot_every: Count = 100
    """Steps per snapshot; the last step and an interrupted run write one too."""
    snapshot_seconds: PositiveFloat = 60.0
    """Longest time between snapshots, in seconds, checked after each step."""
    tensorboard: bool = False
    """Whether TensorBoard event files are written into the run directory."""
    wandb: bool = False
    """Whether an offline run of Weights & Biases is written into the run directory."""
    mlflow: bool = False
    """Whether a file store of MLflow is written into the run directory."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.lora.heads and self.freeze != "none":
            raise ValueError("freeze, lora.heads: adapters freeze the encoder already; write none")
        if self.backbone and not is_architecture(self.backbone):
            raise ValueError("backbone: timm:ARCHITECTURE, for example timm:resnet18")
        if self.backbone and self.weights:
            raise ValueError("backbone, weights: a backbone starts from random weights")
        if self.backbone and (self.freeze != "none" or self.lora.heads):
            raise ValueError("backbone, freeze, lora.heads: a backbone is trained whole")
        if self.backbone and self.teacher:
            raise ValueError("backbone, teacher: only `encoder` has a distillation token")
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
    """The config of `vitcli train-shapes`."""

    data: ShapesData = ShapesData()
    """The drawn images."""
    train: TrainConfig = TrainConfig()
    """The training recipe."""


class ImagesRun(ModelConfig):
    """The config of `vitcli train`."""

    data: ImagesData = ImagesData()
    """The images on disk."""
    train: TrainConfig = TrainConfig()
    """The training recipe."""


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
    """The place of this process among those that torchrun started."""

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


OF_BACKBONE = ("image_size", "head", "head_out")
"""Keys of `encoder` that a backbone follows; the last two are the classifier's."""


def _check_backbone(config: ModelConfig, start: ModelConfig) -> None:
    """Refuse keys of an encoder that is not the one that is trained."""
    before = start.encoder.model_dump()
    for key, value in config.encoder.model_dump().items():
        if key not in OF_BACKBONE and value != before[key]:
            raise VitcliError(
                f"train.backbone: trains a network of timm, so encoder.{key} has no effect",
                f"leave encoder.{key} out, or leave out train.backbone",
            )


def split_preset(preset: str | None) -> tuple[str | None, tuple[Setting, ...]]:
    """`--preset` of a run: one of vitcli's, or the setting of a backbone that is timm's."""
    if preset is None or not is_architecture(preset):
        return preset, ()
    return None, (Setting(("train", "backbone"), preset, f"--preset {preset}"),)


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
            raise VitcliError("--accept-new-data: --resume is missing", "add --resume")
        if self.extend and not self.resume:
            raise VitcliError("--extend: --resume is missing", "add --resume")

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
        for key in ("which", "prefix") if source else ():
            if (value := getattr(config.train, key)) != getattr(self.model, key):
                raise VitcliError(
                    f"train.{key} = {value}: is for weights that the config names",
                    f"--{key} {value} beside --weights {self.model.weights}",
                )
        if named := [s for s in self.settings if s.path[0] == "classes"]:
            raise VitcliError(
                f"{named[0].source}: the classes of a run are those of its data",
                "leave classes out; --classes FILE names the outputs of --weights",
            )
        check_settings(self.settings, config)
        if config.train.backbone:
            _check_backbone(config, schema.model_validate(start.data))
        lone = [s for s in self.settings if s.path[:2] == ("train", "lora") and s.path[2:] != HEADS]
        if lone and not config.train.lora.heads:
            raise VitcliError(f"{lone[0].source}: --lora is missing", "add --lora BLOCK:HEAD")
        return config
