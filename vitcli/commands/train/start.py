"""What a run starts from: its encoder, whose weights and classifier, its teacher, its processes.

B images, K classes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from vitcli.build import build_encoder
from vitcli.checkpoints.adapters import adapt_heads
from vitcli.checkpoints.weights import class_names, weights_digest
from vitcli.commands.train.data import channels
from vitcli.commands.train.splits import derived_seed
from vitcli.config.request import ModelRequest
from vitcli.config.schema import EncoderConfig, PreprocessConfig
from vitcli.config.training import ImagesRun, ShapesRun, TrainConfig, launched
from vitcli.config.variants import HEADS, POOLINGS
from vitcli.engines.reference import LibraryEncoder
from vitcli.engines.timm_networks import TimmNetwork
from vitcli.errors import VitcliError
from vitcli.files import first_names
from vitcli.images.folders import class_name, class_order
from vitcli.loading import load_model
from vitcli.model import Model
from vitcli.nn.encoder import VisionEncoder
from vitcli.stats import all_finite

SMALL = 5_000_000
"""Below this many parameters a second thread waits more than it works."""


def with_classifier(config: EncoderConfig, classes: int, distilled: bool = False) -> EncoderConfig:
    """The config with a classifier of `classes` outputs on its pooled vector.

    Args:
        distilled: with a second classifier on a distillation token.
    """
    if distilled:
        if not config.cls_token:
            raise VitcliError(
                "a teacher needs a CLS token beside the distillation token",
                "add --set encoder.cls_token=true",
            )
        config = config.model_copy(update={"head": "distilled", "dist_token": True})
    keeps = HEADS[config.head].classifies_tokens
    if not keeps and not POOLINGS[config.pooling].width:
        raise VitcliError("a classifier needs a pooled vector", "add --pool cls, mean or map")
    head = config.head if keeps else "linear"
    values = {**dict(config), "head": head, "head_out": classes, "deepstack": ()}
    return EncoderConfig.model_validate(values)


def start_encoder(
    config: EncoderConfig,
    train: TrainConfig,
    source: VisionEncoder | None = None,
    outputs: OutputMap | None = None,
) -> VisionEncoder:
    """A fresh encoder, or one with the weights of `source`; frozen and adapted as configured.

    With `train.backbone` a network of timm, of which the trainer needs the output alone.

    Args:
        outputs: which of the source's outputs are classes of this run; without, none is kept.
    """
    if train.backbone:
        size, classes = config.image_size, config.head_out or 1
        return cast(VisionEncoder, TimmNetwork(train.backbone, train.seed, size, classes))
    encoder = build_encoder(config, train.seed)
    kept = copy_weights(source, encoder, outputs) if source is not None else False
    if train.freeze == "encoder":
        encoder.requires_grad_(False)
        encoder.head.requires_grad_(True)
    if train.lora.heads:
        lora = train.lora
        new = outputs.new if outputs else ()
        if source is not None and not lora.train_head and (new or not kept):
            lacking = f"the class {new[0]}" if new else "the classes by name"
            raise VitcliError(
                f"--lora: the weights have no output for {lacking}",
                "add --train-head, or name the outputs of the weights with --classes FILE",
            )
        try:
            seed = derived_seed(train.seed, "adapters")
            adapt_heads(encoder, lora.places(), lora.on, lora.rank, lora.alpha, seed)
        except ValueError as error:
            raise VitcliError(f"--lora: {error}", "name another BLOCK:HEAD") from error
        encoder.head.requires_grad_(lora.train_head)
    return encoder


@dataclass(frozen=True)
class OutputMap:
    """The outputs of some weights that are classes of a run, by name."""

    rows: tuple[tuple[int, int], ...]
    """(output of the weights, class of the run)."""
    new: tuple[str, ...]
    """Classes of the run that the weights do not have."""
    left: tuple[str, ...]
    """Outputs of the weights that are no class of the run."""

    def line(self) -> str:
        """What became of the classifier, in a line."""
        kept = f"{len(self.rows)} of the weights' outputs kept by name"
        new = f"; new: {first_names(self.new)}" if self.new else ""
        left = f"; left out: {first_names(self.left)}" if self.left else ""
        return kept + new + left


def map_outputs(given: Sequence[str], classes: Sequence[str]) -> OutputMap:
    """Which outputs, by their names, are which classes; an empty name is none."""
    place = {name: index for index, name in enumerate(classes)}
    rows, used = [], set()
    names = [class_name(name) for name in given]
    for index, name in enumerate(names):
        if name in place and name not in used:
            used.add(name)
            rows.append((index, place[name]))
    new = tuple(name for name in classes if name not in used)
    return OutputMap(tuple(rows), new, tuple(n for n in names if n and n not in place))


@torch.no_grad()
def copy_weights(
    source: VisionEncoder, encoder: VisionEncoder, outputs: OutputMap | None = None
) -> bool:
    """All of `source`, its positions converted to the encoder's grid; of the classifier the
    outputs that are mapped, never one for its shape alone. Whether any output was kept.
    """
    given, own = source.state_dict(), encoder.state_dict()
    position = encoder.front_end.position.converted(source.front_end.position)
    given |= {f"front_end.position.{key}": value for key, value in position.items()}
    if not encoder.deepstack_blocks:
        given = {k: value for k, value in given.items() if not k.startswith("deepstack.")}
    heads = {key for key in (*given, *own) if key.startswith("head.")}
    old = {key: given.pop(key) for key in heads & given.keys()}
    new = {key: own.pop(key) for key in heads & own.keys()}
    missing, left = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    shapes = [k for k in given.keys() & own.keys() if given[k].shape != own[k].shape]
    for what, names in (("misses", missing), ("has also", left), ("differs in", sorted(shapes))):
        if names:
            raise VitcliError(
                f"the weights do not fit the config: the source {what} {names[0]}"
                + (f" and {len(names) - 1} more" if names[1:] else ""),
                "change the encoder's keys back, or train from fresh weights",
            )
    kept = bool(outputs and outputs.rows) and old.keys() == new.keys()
    kept = kept and all(old[key].shape[1:] == new[key].shape[1:] for key in new)
    if kept:
        assert outputs is not None
        theirs, ours = (list(places) for places in zip(*outputs.rows, strict=True))
        for key, tensor in new.items():
            tensor[ours] = old[key][theirs].to(tensor)
    encoder.load_state_dict({**encoder.state_dict(), **given, **new})
    return kept


def started(
    config: ShapesRun | ImagesRun,
    source: Model | None,
    classes: Sequence[str],
    say: Callable[[str], None],
) -> VisionEncoder:
    """The encoder before its first step; says which outputs of the weights it kept."""
    given = config.train.output_names
    if source is None:
        if given:
            raise VitcliError(
                "--classes: needs the weights whose outputs it names", "add --weights SOURCE"
            )
        return start_encoder(config.encoder, config.train)
    names, outputs = given or source.config.classes, source.config.encoder.head_out
    if given and len(given) != (outputs or 0):
        raise VitcliError(
            f"--classes: wrong number of names (got {len(given)}, expected "
            f"{outputs or 0}, one per output of the weights)",
            "write one line per output; leave it empty for an output that is not a class here",
        )
    mapped = map_outputs(names, classes) if names and len(names) == outputs else None
    if mapped is not None:
        say(f"classifier: {mapped.line()}")
    elif outputs:
        say(
            f"classifier: new for {len(classes)} classes; the weights have {outputs} outputs "
            "without names (--classes FILE names them)"
        )
    return start_encoder(config.encoder, config.train, source.encoder, mapped)


class Teacher(nn.Module):
    """A trained classifier that labels a student's images.

    Args:
        outputs: its output of each of the student's classes.
        preprocess: how the student's images are normalized; the teacher reads them with its own
            mean and standard deviation, and resized where its input size is another.
    """

    def __init__(self, model: Model, outputs: Sequence[int], preprocess: PreprocessConfig) -> None:
        super().__init__()
        self.encoder = model.encoder.eval().requires_grad_(False)
        self.size = model.input_size
        self.sha256 = weights_digest(self.encoder)
        (mean, scale), (its_mean, its_scale) = map(channels, (preprocess, model.preprocessing))
        self.gain = (its_scale / scale).to(model.device)  # (3, 1, 1)
        self.shift = ((mean - its_mean) * its_scale).to(model.device)
        self.outputs = torch.tensor(outputs, device=model.device)

    def line(self, train: TrainConfig) -> str:
        """What is distilled, in a line."""
        height, width = self.size
        soft = train.distillation == "soft"
        return (
            f"teacher: {train.teacher} (sha256 {self.sha256[:12]}), reads {height}x{width}; "
            f"{train.distillation} distillation, alpha {train.distillation_alpha:g}"
            + (f", temperature {train.distillation_temperature:g}" if soft else "")
        )

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) as the student reads them -> logits (B, K)."""
        if images.shape[-2:] != self.size:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        logits: Tensor = self.encoder(images * self.gain + self.shift).output
        return logits[:, self.outputs]


def load_teacher(
    train: TrainConfig, classes: Sequence[str], preprocess: PreprocessConfig, device: torch.device
) -> Teacher:
    """The teacher of a run, its outputs mapped to the run's classes by name."""
    assert train.teacher is not None
    subject = f"train.teacher: {train.teacher}"
    model = load_model(ModelRequest(weights=train.teacher, device=str(device)), by_library=True)
    with torch.no_grad():
        zeros = torch.zeros(1, 3, *model.input_size, device=model.device)
        logits = model.encoder(zeros).output
    names = None if logits is None or logits.ndim != 2 else output_names(model, logits.shape[1])
    if names is None:
        raise VitcliError(
            f"{subject}: is not a classifier whose outputs have names",
            "name a run of vitcli train, or write the names into the teacher's config (id2label or "
            "label_names in config.json, classes in config.yaml)",
        )
    names = tuple(map(class_name, names))
    if missing := class_order(set(classes) - set(names)):
        raise VitcliError(
            f"{subject}: has no output for {first_names(missing)}",
            "train a teacher on the same classes",
        )
    if not all_finite(logits):
        raise VitcliError(f"{subject}: gives values that are not finite", "choose another teacher")
    teacher = Teacher(model, [names.index(name) for name in classes], preprocess)
    if train.teacher_sha256 not in (None, teacher.sha256):
        raise VitcliError(
            f"{subject}: has other weights than when the run began (got sha256 "
            f"{teacher.sha256[:12]}, expected {train.teacher_sha256[:12]})",
            "restore the teacher's weights, or start another run with another --out",
        )
    return teacher


def output_names(model: Model, outputs: int) -> tuple[str, ...] | None:
    """The class of each output; None where nobody named them."""
    if not isinstance(model.encoder, LibraryEncoder):
        return model.config.classes
    backbone = model.encoder.backbone
    config = getattr(backbone.module, "config", None)
    names = {"id2label": getattr(config, "id2label", None), **backbone.prepared_by}
    return class_names(names, outputs)


def set_threads(models: Sequence[nn.Module], threads: int | None) -> None:
    """As configured; else one for small models on the CPU, where more only wait for each other."""
    small = sum(p.numel() for model in models for p in model.parameters()) < SMALL
    if threads or small:
        torch.set_num_threads(threads or 1)


class Stopped(BaseException):
    """A signal asked the run to end; it ends where a snapshot can be taken."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in place of obeying; the second one does not wait.

    At the end the signal is sent again, to whoever took it before.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def note(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            os.kill(os.getpid(), caught[0])


@dataclass(frozen=True)
class World:
    """This process among all: the first alone prints and writes."""

    rank: int = 0
    size: int = 1
    device: str | torch.device = "cpu"
    """Where the backend's collectives work: NCCL has none for tensors on the CPU."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of `count` items; the parts follow each other."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place, on whatever device `values` is."""
        if self.size > 1:
            there = values.to(self.device)
            dist.all_reduce(there)
            if there is not values:
                values.copy_(there)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank; over this process's own device, see `world`."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if self.size == 1:
            return model
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)


def local_device(device: torch.device) -> torch.device:
    """This process's own GPU, where torchrun started several on a machine."""
    launch = launched()
    if device.type != "cuda" or launch.size == 1:
        return device
    if device.index is not None:
        raise VitcliError(
            f"--device {device}: {launch.size} processes cannot share one GPU", "use --device cuda"
        )
    if launch.local_rank >= torch.cuda.device_count():
        raise VitcliError(
            f"process {launch.rank} has no GPU (got {torch.cuda.device_count()} on this machine)",
            f"torchrun --nproc-per-node {max(1, torch.cuda.device_count())} ...",
        )
    return torch.device("cuda", launch.local_rank)


@contextmanager
def world(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started; alone where there are none.

    `device` is this process's own, from `local_device`.
    """
    size = launched().size
    if size == 1:
        yield World()
        return
    on_gpu = device.type == "cuda"
    if on_gpu:  # object collectives and DDP's buffers use the current device
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise VitcliError(
            f"the {size} processes cannot connect: {reason}",
            "PYTHONSAFEPATH=1 torchrun --standalone --nproc-per-node N -m vitcli ...",
            exit_code=1,
        ) from error
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device if on_gpu else "cpu")
    finally:
        dist.destroy_process_group()
