"""One transformer block, with its norms before or after the residual sums."""

from __future__ import annotations

from torch import Tensor, nn

from vitcli.nn.attention import MultiHeadSelfAttention, Rotation, identity


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
