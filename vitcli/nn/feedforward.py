"""The feed-forward half of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), the approximation that OpenAI's CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "silu": nn.SiLU,
}


class FeedForward(nn.Module):
    """fc2(activation(fc1(x))): (B, N, D) -> (B, N, M) -> (B, N, D)."""

    def __init__(
        self, hidden: int, mlp_hidden: int, activation: nn.Module, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, mlp_hidden)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.dropout(self.activation(self.fc1(x))))
        return y


class GatedFeedForward(nn.Module):
    """fc2(activation(gate) * up), with gate and up the halves of one projection.

    Shazeer 2020, "GLU Variants Improve Transformer"; the first half of `fc1` is the gate.
    """

    def __init__(
        self, hidden: int, mlp_hidden: int, activation: nn.Module, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, 2 * mlp_hidden)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)  # 2 x (B, N, M)
        y: Tensor = self.fc2(self.dropout(self.activation(gate) * up))
        return y


FEED_FORWARDS: dict[str, type[FeedForward] | type[GatedFeedForward]] = {
    "plain": FeedForward,
    "gated": GatedFeedForward,
}
