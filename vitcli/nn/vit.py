"""The stack of blocks and its final norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from vitcli.nn.attention import Rotation, identity
from vitcli.nn.block import Block


class ViT(nn.Module):
    """Blocks one after another, then a norm (`nn.Identity` where there is none)."""

    def __init__(self, blocks: Sequence[Block], norm: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(
        self,
        x: Tensor,
        rotate: Rotation = identity,
        attn_mask: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D); `attn_mask` is one for all blocks or one per block."""
        y: Tensor = self.norm(self.run_blocks(x, rotate, attn_mask))
        return y

    def run_blocks(
        self,
        x: Tensor,
        rotate: Rotation = identity,
        attn_mask: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """The tokens before the final norm."""
        masks = (
            [attn_mask] * len(self.blocks)
            if isinstance(attn_mask, Tensor) or attn_mask is None
            else attn_mask
        )
        for block, mask in zip(self.blocks, masks, strict=True):
            x = cast(Block, block)(x, rotate, mask)
        return x
