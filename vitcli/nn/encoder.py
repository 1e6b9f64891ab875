"""The whole encoder: front end, blocks, pooling, head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from vitcli.nn.attention import join_masks
from vitcli.nn.frontend import VisionFrontEnd
from vitcli.nn.masks import Mask
from vitcli.nn.positions import Grid
from vitcli.nn.vit import ViT


class EncoderOutput(NamedTuple):
    """What an encoder answers. P prefix tokens stand before the N patches in every token tensor."""

    tokens: Tensor
    """(B, P+N, D) after the final norm, where there is one."""
    tokens_before_norm: Tensor
    """(B, P+N, D) as the last block left them."""
    pooled: Tensor | None
    """(B, D), (B, 2D) for CLS + mean, None without pooling."""
    output: Tensor | None
    """The head's output, None without a head."""


class VisionEncoder(nn.Module):
    def __init__(
        self,
        front_end: VisionFrontEnd,
        vit: ViT,
        mask: Mask,
        pooling: nn.Module,
        pool_norm: nn.Module,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.front_end = front_end
        self.vit = vit
        self.mask = mask
        self.pooling = pooling
        self.pool_norm = pool_norm
        self.head = head

    @property
    def prefix_tokens(self) -> int:
        return self.front_end.prefix_tokens

    def block_masks(
        self, grid: Grid, tokens: Tensor, attn_mask: Tensor | None = None
    ) -> list[Tensor | None]:
        """The position bias, the config's mask and the caller's, joined, one for each block."""
        prefix, depth = self.prefix_tokens, len(self.vit.blocks)
        common = join_masks(self.front_end.position.bias(grid, prefix, tokens), attn_mask)
        masks = self.mask(grid, prefix, depth, tokens.device)
        distinct = {id(mask): mask for mask in masks}
        joined = {key: join_masks(common, mask) for key, mask in distinct.items()}
        return [joined[id(mask)] for mask in masks]

    def forward(self, images: Tensor, attn_mask: Tensor | None = None) -> EncoderOutput:
        """(B, C, height, width) -> EncoderOutput; `attn_mask` as in MultiHeadSelfAttention."""
        grid, prefix = self.front_end.grid(images), self.prefix_tokens
        x = self.front_end(images)  # (B, P+N, D)
        rotate = self.front_end.position.rotation(grid, prefix, x)
        last = self.vit.run_blocks(x, rotate, self.block_masks(grid, x, attn_mask))
        tokens = self.vit.norm(last)
        first, patches = tokens.tensor_split([prefix], dim=1)  # (B, P, D), (B, N, D)
        pooled = self.pooling(first, patches)
        pooled = None if pooled is None else self.pool_norm(pooled)
        return EncoderOutput(tokens, last, pooled, self.head(pooled, first, patches, grid))
