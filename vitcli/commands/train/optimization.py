"""How a batch becomes an update: a teacher's loss, AdamW, its schedule, the average.

B images, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.checkpoints.adapters import adapters
from vitcli.commands.train.result import AuditRow
from vitcli.config.training import TrainConfig
from vitcli.errors import VitcliError
from vitcli.nn.attention import decayed_names
from vitcli.nn.encoder import VisionEncoder
from vitcli.stats import all_finite

LINGERING = 0.1
"""A share of the first weights in the average that a validation mentions."""


def distillation_loss(
    logits: Tensor, labels: Tensor, teacher: Tensor, train: TrainConfig
) -> Tensor:
    """The loss of DeiT's equation 2 (soft) or 3 (hard), mean over images.

    (1 - alpha) CE(cls, labels) + alpha CE(dist, argmax teacher), or with the temperature t
    (1 - alpha) CE(cls, labels) + alpha t^2 KL(softmax(teacher / t), softmax(dist / t)).
    The teacher's labels are not smoothed. (DeiT's published code divides the KL by K besides.)

    Args:
        logits: (2, B, K), of the classifiers on CLS and on the distillation token.
        labels: (B), or (B, K) of mixed images.
        teacher: (B, K), the teacher's logits.
    """
    own, imitated = logits
    smoothing = 0.0 if labels.ndim == 2 else train.label_smoothing
    base = F.cross_entropy(own, labels, label_smoothing=smoothing)
    if train.distillation == "hard":
        copied = F.cross_entropy(imitated, teacher.argmax(1))
    else:
        t = train.distillation_temperature
        its, mine = (F.log_softmax(values / t, 1) for values in (teacher, imitated))
        copied = t * t * F.kl_div(mine, its, reduction="batchmean", log_target=True)
    return (1 - train.distillation_alpha) * base + train.distillation_alpha * copied


def make_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters in two groups: decayed and not (in this order)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = decayed_names(model)
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": train.weight_decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
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


def average_decay(decay: float, update: int) -> float:
    """Of the average at its update `update`, from 0: the first copies the weights."""
    return min(decay, (1 + update) / (10 + update)) if update else 0.0


def first_weights_share(decay: float, updates: int) -> float:
    """How much of an average is still the weights that its first update copied."""
    share = 1.0
    for update in range(1, updates):
        share *= average_decay(decay, update)
        if share <= LINGERING:
            break
    return share


def trained_names(encoder: VisionEncoder, train: TrainConfig) -> set[str]:
    """The parameters that the recipe trains, whatever their `requires_grad` says."""
    names = {name for name, _ in encoder.named_parameters()}
    head = {name for name in names if name.startswith("head.")}
    if train.lora.heads:
        added = {f"{name}.{part}" for name, _ in adapters(encoder) for part in ("down", "up")}
        return added | head if train.lora.train_head else added
    return head if train.freeze == "encoder" else names


def audit(model: nn.Module, expected: set[str], still: Collection[str] = ()) -> list[AuditRow]:
    """One row for each parameter after a backward pass; `expected` are the names to be trained.

    `still` are those of them whose gradient may be zero.

    Raises:
        VitcliError: a gradient on a parameter that is not expected, or none (or a zero one) on
            one that is (exit code 1).
    """
    rows = []
    for name, p in model.named_parameters():
        norm = None if p.grad is None else float(p.grad.norm())
        rows.append(AuditRow(name, p.numel(), name in expected, norm))
    leaks = [r.name for r in rows if not r.trainable and r.gradient_norm is not None]
    dry = [r for r in rows if r.trainable and not r.gradient_norm]
    stuck = [r.name for r in dry if r.gradient_norm is None or r.name not in still]
    for names, what, should, hint in (
        (leaks, "a gradient", "be frozen", "remove the code that unfreezes parameters of this run"),
        (stuck, "no gradient", "train", "choose a pooling and a head that use the adapted layer"),
    ):
        if names:
            more = f", and {len(names) - 1} more" if names[1:] else ""
            raise VitcliError(
                f"gradient audit: {what} reaches {names[0]}, which should {should}{more}",
                hint,
                exit_code=1,
            )
    return rows


@torch.no_grad()
def first_bad_layer(model: nn.Module, images: Tensor) -> str | None:
    """The first module, in the order of the forward pass, that gives NaN or infinity.

    If its parameters are the cause, they are named instead; if the forward pass is sound, the
    parameter nearest the loss whose gradient is not finite, or the one with the largest gradient
    where only the norm overflows; None without gradients.
    """
    bad: list[str] = []

    def note(name: str, _: nn.Module, __: object, output: object) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        if not all(all_finite(p) for p in parts if isinstance(p, Tensor)):
            bad.append(name)  # modules come in the order in which they finish

    modules = [(name, module) for name, module in model.named_modules() if name]
    handles = [m.register_forward_hook(partial(note, name)) for name, m in modules]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    if bad:
        own = model.get_submodule(bad[0]).named_parameters(prefix=bad[0])
        return next((name for name, p in own if not all_finite(p)), f"{bad[0]} (output)")
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not all_finite(gradient)]
    if broken:
        return f"{broken[-1]} (gradient)"
    if not gradients:
        return None
    # Every entry is finite and only their sum of squares is not: name the largest.
    largest = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    return f"{largest} (largest gradient)"
