"""AdamW, and which parameters it decays."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import nn

from vitcli.commands.train.result import AuditRow
from vitcli.config.training import TrainConfig
from vitcli.errors import VitcliError
from vitcli.nn.parameters import decayed_names


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
            "no other code may unfreeze parameters of this run",
            exit_code=1,
        )
    if dry:
        raise VitcliError(
            f"gradient audit: no gradient reaches {dry[0]}, which should train"
            + (f", and {len(dry) - 1} more" if dry[1:] else ""),
            "is the adapted layer cut off from the loss (pooling, head)?",
            exit_code=1,
        )
    return rows
