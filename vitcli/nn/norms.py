"""Normalisation and per-channel scaling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "rmsnorm": lambda width, eps: nn.RMSNorm(width, eps=eps),
}


class LayerScale(nn.Module):
    """A learned factor per channel on a branch's output (Touvron et al. 2021, CaiT, section 2)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PerHeadNorm(nn.Module):
    """One norm over the channels of each head, applied before the head split."""

    def __init__(self, norm: nn.Module, heads: int) -> None:
        super().__init__()
        self.norm = norm
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(-1, (self.heads, -1))  # (B, N, H, d)
        normed: Tensor = self.norm(split)
        return normed.flatten(-2)  # (B, N, D)
