"""What a run starts from: processes, encoder, classifier, trained parameters, optimizer, audit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitcli.build import build_encoder
from vitcli.checkpoints.adapters import adapt_heads, adapters
from vitcli.commands.train.inputs import derived_seed
from vitcli.commands.train.result import AuditRow
from vitcli.config.schema import EncoderConfig
from vitcli.config.training import TrainConfig, launched
from vitcli.config.variants import HEADS, POOLINGS
from vitcli.engines.timm_networks import TimmNetwork
from vitcli.errors import VitcliError
from vitcli.files import first_names
from vitcli.measures import all_finite
from vitcli.nn.attention import decayed_names
from vitcli.nn.encoder import VisionEncoder

SMALL = 5_000_000
"""Below this many parameters a second thread waits more than it works."""


def with_classifier(config: EncoderConfig, classes: int, distilled: bool = False) -> EncoderConfig:
    """The config with a classifier of `classes` outputs on its pooled vector.

    Args:
        distilled: with a second classifier on a distillation token.

    Raises:
        VitcliError: nothing is pooled, or there is no CLS token beside the distillation token.
    """
    if distilled and not config.cls_token:
        raise VitcliError(
            "a teacher needs a CLS token beside the distillation token",
            "add --set encoder.cls_token=true",
        )
    if distilled:
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

    Raises:
        VitcliError: the source has other parameters, adapters cannot go where they are to, or
            a classifier that does not train lacks a class.
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
        whole = kept and outputs is not None and not outputs.new
        if source is not None and not lora.train_head and not whole:
            raise VitcliError(
                f"--lora: the weights have no output for {_lacking(outputs)}",
                "add --train-head, or name the outputs of the weights with --classes FILE",
            )
        try:
            seed = derived_seed(train.seed, "adapters")
            adapt_heads(encoder, lora.places(), lora.on, lora.rank, lora.alpha, seed)
        except ValueError as error:
            raise VitcliError(f"--lora: {error}", "name another BLOCK:HEAD") from error
        encoder.head.requires_grad_(lora.train_head)
    return encoder


def _lacking(outputs: OutputMap | None) -> str:
    return f"the class {outputs.new[0]}" if outputs and outputs.new else "the classes by name"


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
    for index, name in enumerate(given):
        if name in place and name not in used:
            used.add(name)
            rows.append((index, place[name]))
    return OutputMap(
        tuple(rows),
        tuple(name for name in classes if name not in used),
        tuple(name for name in given if name and name not in place),
    )


def trained_names(encoder: VisionEncoder, train: TrainConfig) -> set[str]:
    """The parameters that the recipe trains, whatever their `requires_grad` says."""
    names = {name for name, _ in encoder.named_parameters()}
    head = {name for name in names if name.startswith("head.")}
    if train.lora.heads:
        added = {f"{name}.{part}" for name, _ in adapters(encoder) for part in ("down", "up")}
        return added | head if train.lora.train_head else added
    return head if train.freeze == "encoder" else names


@torch.no_grad()
def copy_weights(
    source: VisionEncoder, encoder: VisionEncoder, outputs: OutputMap | None = None
) -> bool:
    """All of `source`, its positions converted to the encoder's grid; of the classifier the
    outputs that are mapped, never one for its shape alone. Whether any output was kept.

    Raises:
        VitcliError: a parameter is missing, left over or of another shape.
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


def set_threads(models: Sequence[nn.Module], threads: int | None) -> None:
    """As configured; else one for small models on the CPU, where more only wait for each other."""
    small = sum(p.numel() for model in models for p in model.parameters()) < SMALL
    if threads or small:
        torch.set_num_threads(threads or 1)


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters in two groups: decayed and not (in this order)."""
    decayed = decayed_names(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for name, p in named if name in decayed],
            "weight_decay": train.weight_decay,
        },
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        fused=named[0][1].device.type in ("cpu", "cuda"),
    )


def warmup_steps(warmup: float | int, total: int) -> int:
    """Steps of warm-up: a fraction of `total` below 1, else a number of steps, at most `total`."""
    return min(round(warmup * total) if warmup < 1 else int(warmup), total)


def learning_rate(
    step: int, total: int, peak: float, warmup: int = 0, schedule: str = "cosine", end: float = 0.0
) -> float:
    """The rate of update `step`, 0 .. total - 1.

    Update k of the warm-up has peak (k + 1) / warmup, so none is wasted at zero. Then
    end + (peak - end) (1 + cos(pi t)) / 2 with t = (step - warmup) / (total - warmup), which would
    reach `end` at step `total` (Loshchilov and Hutter 2017, equation 5, without restarts).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    t = (step - warmup) / (total - warmup)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * t))


def audit(model: nn.Module, expected: set[str], still: Collection[str] = ()) -> list[AuditRow]:
    """One row for each parameter after a backward pass; `expected` are the names to be trained.

    `still` are those of them whose gradient may be zero.

    Raises:
        VitcliError: a gradient on a parameter that is not expected, or none (or a zero one) on
            one that is (exit code 1).
    """
    rows = [
        AuditRow(
            name,
            p.numel(),
            name in expected,
            None if p.grad is None else float(p.grad.norm()),
        )
        for name, p in model.named_parameters()
    ]
    leaks = [r.name for r in rows if not r.trainable and r.gradient_norm is not None]
    dry = [
        r.name
        for r in rows
        if r.trainable and not r.gradient_norm and (r.gradient_norm is None or r.name not in still)
    ]
    if leaks:
        raise VitcliError(
            f"gradient audit: a gradient reaches {leaks[0]}, which should be frozen"
            + (f", and {len(leaks) - 1} more" if leaks[1:] else ""),
            "remove the code that unfreezes parameters of this run",
            exit_code=1,
        )
    if dry:
        raise VitcliError(
            f"gradient audit: no gradient reaches {dry[0]}, which should train"
            + (f", and {len(dry) - 1} more" if dry[1:] else ""),
            "choose a pooling and a head that use the adapted layer",
            exit_code=1,
        )
    return rows


@contextmanager
def _watched(model: nn.Module, bad: list[str]) -> Iterator[None]:
    """Notes the modules whose output is not finite, in the order they finish."""
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: object, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if not all(all_finite(p) for p in parts if isinstance(p, Tensor)):
                bad.append(name)

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if name:
            watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def first_bad_layer(model: nn.Module, images: Tensor) -> str | None:
    """The first module, in the order of the forward pass, that gives NaN or infinity.

    If its parameters are the cause, they are named instead; if the forward pass is sound, the
    parameter nearest the loss whose gradient is not finite, or the one with the largest gradient
    where only the norm overflows; None without gradients.
    """
    bad: list[str] = []
    with _watched(model, bad):
        model(images)
    if bad:
        wrong = [
            name
            for name, p in model.get_submodule(bad[0]).named_parameters(prefix=bad[0])
            if not all_finite(p)
        ]
        return wrong[0] if wrong else f"{bad[0]} (output)"
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not all_finite(gradient)]
    if broken:
        return f"{broken[-1]} (gradient)"
    if not gradients:
        return None
    # Every entry is finite and only their sum of squares is not: name the largest.
    largest = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    return f"{largest} (largest gradient)"


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
    """This process's own GPU, where torchrun started several on a machine.

    Raises:
        VitcliError: one GPU is named for several processes, or there are too few.
    """
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

    Raises:
        VitcliError: the processes cannot meet.
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
