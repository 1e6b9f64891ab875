"""One transformer block, with its norms before or after the residual sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitcli.nn.attention import MultiHeadSelfAttention, Part, Rotation, identity


class DropPath(nn.Module):
    """Drops a residual branch for whole samples while training (Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


class Block(nn.Module):
    """Pre-norm: x + scale(branch(norm(x))), attention first, then feed-forward."""

    def __init__(
        self,
        attention: MultiHeadSelfAttention,
        feed_forward: nn.Module,
        norm1: nn.Module,
        norm2: nn.Module,
        scale1: nn.Module,
        scale2: nn.Module,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = norm1
        self.attention = attention
        self.scale1 = scale1
        self.norm2 = norm2
        self.feed_forward = feed_forward
        self.scale2 = scale2
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, rotate: Rotation = identity, attn_mask: Tensor | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = x + self.drop_path(self.scale1(self.attention(self.norm1(x), rotate, attn_mask)))
        x = x + self.drop_path(self.scale2(self.feed_forward(self.norm2(x))))
        return x


class PostNormBlock(Block):
    """Post-norm, as in the original Transformer: norm(x + scale(branch(x)))."""

    def forward(
        self, x: Tensor, rotate: Rotation = identity, attn_mask: Tensor | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = self.norm1(x + self.drop_path(self.scale1(self.attention(x, rotate, attn_mask))))
        y: Tensor = self.norm2(x + self.drop_path(self.scale2(self.feed_forward(x))))
        return y


BLOCKS: dict[str, type[Block]] = {"pre": Block, "post": PostNormBlock}


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
    """fc2(norm(activation(fc1(x)))): (B, N, D) -> (B, N, M) -> (B, N, D).

    Args:
        norm: on the M channels before `fc2` (EVA-02; Shleifer et al. 2021, NormFormer); None for
            none, as nearly everywhere.
    """

    maps_in = 1

    def __init__(
        self,
        hidden: int,
        mlp_hidden: int,
        activation: nn.Module,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, self.maps_in * mlp_hidden, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.Identity() if norm is None else norm
        self.fc2 = nn.Linear(mlp_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(self.norm(self.dropout(self.activation(self.fc1(x)))))
        return y


class GatedFeedForward(FeedForward):
    """fc2(norm(activation(gate) * up)), with gate and up the halves of one projection.

    Shazeer 2020, "GLU Variants Improve Transformer"; the first half of `fc1` is the gate.
    """

    maps_in = 2

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)  # 2 x (B, N, M)
        y: Tensor = self.fc2(self.norm(self.dropout(self.activation(gate) * up)))
        return y


FEED_FORWARDS: dict[str, type[FeedForward]] = {
    "plain": FeedForward,
    "gated": GatedFeedForward,
}


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "rmsnorm": lambda width, eps: nn.RMSNorm(width, eps=eps),
}


class LayerScale(Part):
    """A learned factor per channel on a branch's output (Touvron et al. 2021, CaiT, section 2)."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def reset(self, std: float, generator: torch.Generator) -> None:
        self.gamma.fill_(self.initial)

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
