"""From pixels to the tokens that the first block reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitcli.nn.positions import Grid, NoPosition


class VisionFrontEnd(nn.Module):
    """Patch projection, prefix tokens in order, additive positions, and CLIP's norm if any.

    Args:
        prefix: how many tokens of each kind, in token order, for example
            `{"cls": 1, "registers": 4}`.
        norm: applied to all tokens at the end (`nn.Identity` for every family but CLIP).
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        patch_size: int,
        prefix: Mapping[str, int],
        position: NoPosition,
        norm: nn.Module,
        patch_bias: bool = True,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Conv2d(channels, hidden, patch_size, patch_size, bias=patch_bias)
        self.prefix = nn.ParameterDict(
            {kind: nn.Parameter(torch.empty(count, hidden)) for kind, count in prefix.items()}
        )
        self.prefix_tokens = sum(prefix.values())
        self.position = position
        self.norm = norm

    def grid(self, images: Tensor) -> Grid:
        """(rows, columns) of whole patches; trailing pixels are dropped."""
        height, width = images.shape[-2:]
        return height // self.patch_size, width // self.patch_size

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, P+N, D), patches row by row after the prefix tokens."""
        patches = self.projection(images).flatten(2).transpose(1, 2)  # (B, N, D)
        rows = [*self.prefix.values(), patches.new_empty(0, patches.shape[-1])]
        prefix = torch.cat(rows).expand(patches.shape[0], -1, -1)  # (B, P, D)
        prefix, patches = self.position.add(prefix, patches, self.grid(images))
        tokens: Tensor = self.norm(torch.cat([prefix, patches], dim=1))  # (B, P+N, D)
        return tokens
