"""The config of a training run: the model's config plus `data` and `train`; no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, PositiveFloat, model_validator

from vitcli.config.request import (
    ModelRequest,
    check_device,
    check_settings,
    is_architecture,
    load_config,
    read_saved_config,
)
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Setting
from vitcli.config.yaml import (
    Count,
    Document,
    Fraction,
    Names,
    Pair,
    Rate,
    Section,
    Width,
    words,
)
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
    output_names: Names | None = None
    """Names of the outputs of those weights in their order, empty for one that is no class of the
    run; null: the names that the weights have."""
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


RECIPES: dict[type[ModelConfig], dict[str, Any]] = {
    ShapesRun: SHAPES_RECIPE,
    ImagesRun: IMAGES_RECIPE,
}


@dataclass(frozen=True)
class Launch:
    """The place of this process among those that torchrun started."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def launched() -> Launch:
    """The process's place by RANK, WORLD_SIZE and LOCAL_RANK; alone where neither is set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return Launch()
    hint = "unset RANK WORLD_SIZE LOCAL_RANK, or start with torchrun"
    for name in names[:2]:
        if name not in given:
            there = next(iter(given))
            raise VitcliError(f"{name}: is missing beside {there}={given[there]}", hint)
    given.setdefault("LOCAL_RANK", given["RANK"])  # all on one machine
    for name, text in given.items():
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise VitcliError(f"{name}: is not a count (got {text[:40]!r})", hint)
    launch = Launch(*(int(given[name]) for name in names))
    if not launch.rank < launch.size:
        raise VitcliError(
            f"RANK: is out of range (got {launch.rank}, expected below WORLD_SIZE={launch.size})",
            hint,
        )
    return launch


ARGUMENTS = {
    "data": "data.path",
    "difficulty": "data.difficulty",
    "norm": "encoder.norm_placement",
    "image_size": "encoder.image_size",
    "init": "encoder.init",
    "classes": "train.output_names",
    **{name: f"train.{name}" for name in ("weights", "which", "prefix", "seed", "dtype", "lr")},
    **{name: f"train.{name}" for name in ("warmup", "epochs", "batch", "accumulate", "clip_grad")},
    **{name: f"train.{name}" for name in ("freeze", "compile")},
    "lora": "train.lora.heads",
    **{f"lora_{name}": f"train.lora.{name}" for name in ("rank", "alpha", "on")},
    "train_head": "train.lora.train_head",
}
"""The config keys of options, and of the arguments of `vitcli.train` and `vitcli.train_shapes`."""
Run = TypeVar("Run", ShapesRun, ImagesRun)


@dataclass(frozen=True)
class TrainRequest:
    """A run as the command line names it.

    `model` is the preset, file and weights to start from; `settings` are all that was set; the
    rest are arguments of `vitcli.train`.
    """

    model: ModelRequest = field(default_factory=ModelRequest)
    settings: tuple[Setting, ...] = ()
    device: str = "auto"
    out: Path | None = None
    resume: bool = False
    accept_new_data: bool = False
    extend: bool = False
    check: bool = False
    fail_fast: bool = False
    test: bool = False

    def __post_init__(self) -> None:
        check_device(self.device)
        for name in ("accept_new_data", "extend"):
            if getattr(self, name) and not self.resume:
                option = f"--{name.replace('_', '-')}"
                raise VitcliError(f"{option}: --resume is missing", "add --resume")

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        more: Sequence[Setting] = (),
        source: Callable[[str], str] = ARGUMENTS.__getitem__,
    ) -> TrainRequest:
        """The request of options, or of a function's arguments, by their names.

        Args:
            more: settings after those of ARGUMENTS, so that the exact key wins.
            source: what an error calls the setting of an argument.
        """
        given = {k: str(v) if isinstance(v, Path) else v for k, v in given.items()}
        preset: str | None = given["preset"]
        settings: list[Setting] = []
        if preset and is_architecture(preset):
            settings = [Setting(("train", "backbone"), preset, f"--preset {preset}")]
            preset = None
        settings += [
            Setting(tuple(key.split(".")), value, source(name))
            for name, key in ARGUMENTS.items()
            if (value := given.get(name)) is not None and value is not False
        ]
        model = ModelRequest(
            preset=preset,
            config_file=given["config"] and Path(given["config"]),
            device="cpu",
            **{name: given[name] for name in ("weights", "which", "prefix")},
        )
        own = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        own |= {"settings": (*settings, *more), "out": given["out"] and Path(given["out"])}
        return cls(model, **own)

    def run_config(self, schema: type[Run], source: ModelConfig | None = None) -> Run:
        """The run's config: a run to resume, or the recipe, under preset, file and settings.

        `source` is the config that belongs to the weights to start from.
        """
        model = self.model
        named = model.preset or model.config_file or model.weights
        stored = self.out / "config.yaml" if self.resume and self.out and not named else None
        if stored and stored.exists():
            start = read_saved_config(stored)
        elif source:
            rest = {key: RECIPES[schema][key] for key in ("data", "train")}
            own = source.model_dump(mode="python")
            start = Document(f"the config of {model.weights}", {**rest, **own})
        else:
            start = Document("the default recipe", dict(RECIPES[schema]))
        preset = None if source else model.preset
        config = load_config(schema, preset, model.config_file, self.settings, start)
        for key in ("which", "prefix") if source else ():
            if (value := getattr(config.train, key)) != getattr(model, key):
                raise VitcliError(
                    f"train.{key} = {value}: is for weights that the config names",
                    f"--{key} {value} beside --weights {model.weights}",
                )
        if classes := [s for s in self.settings if s.path[0] == "classes"]:
            raise VitcliError(
                f"{classes[0].source}: the classes of a run are those of its data",
                "leave classes out; --classes FILE names the outputs of --weights",
            )
        check_settings(self.settings, config)
        if config.train.backbone:
            before = schema.model_validate(start.data).encoder.model_dump()
            follows = {"image_size", "head", "head_out"}
            for key, value in config.encoder.model_dump().items():
                if key not in follows and value != before[key]:
                    raise VitcliError(
                        f"train.backbone: trains a network of timm, so encoder.{key} has no effect",
                        f"leave encoder.{key} out, or leave out train.backbone",
                    )
        lora = [s for s in self.settings if s.path[:2] == ("train", "lora")]
        lone = [s for s in lora if s.path[2:] != ("heads",)]
        if lone and not config.train.lora.heads:
            raise VitcliError(f"{lone[0].source}: --lora is missing", "add --lora BLOCK:HEAD")
        return config
