"""AdamW, and which parameters it decays."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from vitcli.config.training import TrainConfig
from vitcli.nn.frontend import VisionFrontEnd
from vitcli.nn.pooling import MapPooling
from vitcli.nn.positions import LearnedPosition


def undecayed_names(model: nn.Module) -> set[str]:
    """Norms, biases and LayerScale (all of rank 1), tokens, probes and position tables."""
    names = {name for name, p in model.named_parameters() if p.ndim <= 1}
    for prefix, module in model.named_modules():
        own: Iterator[str]
        match module:
            case VisionFrontEnd():
                own = (f"prefix.{kind}" for kind in module.prefix)
            case LearnedPosition():
                own = iter(["table"])
            case MapPooling():
                own = iter(["probe"])
            case _:
                continue
        names |= {f"{prefix}.{name}" if prefix else name for name in own}
    return names


def make_optimiser(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters in two groups: decayed and not (in this order)."""
    without = undecayed_names(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for name, p in named if name not in without],
            "weight_decay": train.weight_decay,
        },
        {"params": [p for name, p in named if name in without], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=train.betas,
        eps=train.eps,
        fused=named[0][1].device.type in ("cpu", "cuda"),
    )
