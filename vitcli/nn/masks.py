"""Which tokens each block lets see which: one boolean (N, N) mask, or None, per block."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional as F

from vitcli.nn.positions import Grid


class NoMask:
    """Every token sees every token."""

    def __call__(
        self, grid: Grid, prefix_tokens: int, depth: int, device: torch.device
    ) -> list[Tensor | None]:
        return [None] * depth


class CausalMask:
    """Token i sees tokens 0 .. i, so that the blocks serve as decoder blocks."""

    def __call__(
        self, grid: Grid, prefix_tokens: int, depth: int, device: torch.device
    ) -> list[Tensor | None]:
        tokens = prefix_tokens + grid[0] * grid[1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
        return [mask] * depth


class WindowMask:
    """Patches see their own square window, aligned to the top-left corner (Qwen2.5-VL).

    With a `shift`, windows of every second block (the 2nd, 4th, ...) begin `shift` patches further
    down and right, and those cut off at the top and left are windows of their own (Swin: Liu et
    al. 2021, figure 4, with its masks). Prefix tokens see and are seen by all; the blocks in
    `full_blocks`, from 0, are not masked.
    """

    def __init__(self, window: int, full_blocks: Collection[int], shift: int = 0) -> None:
        self.window = window
        self.full_blocks = frozenset(full_blocks)
        self.shift = shift

    def __call__(
        self, grid: Grid, prefix_tokens: int, depth: int, device: torch.device
    ) -> list[Tensor | None]:
        plain = self._mask(grid, prefix_tokens, 0, device)
        moved = self._mask(grid, prefix_tokens, self.shift, device) if self.shift else plain
        return [
            None if block in self.full_blocks else moved if block % 2 else plain
            for block in range(depth)
        ]

    def _mask(self, grid: Grid, prefix_tokens: int, shift: int, device: torch.device) -> Tensor:
        first = self.window - shift if shift else 0
        rows, columns = ((torch.arange(n, device=device) + first) // self.window for n in grid)
        across = grid[1] + 1  # windows along a row, at most
        ids = (rows[:, None] * across + columns[None]).flatten()  # (N,)
        return _for_patches(ids[:, None] == ids[None], prefix_tokens)


class NeighborhoodMask:
    """Each patch sees its k nearest patches, itself among them, by the distance of their centers.

    Of patches at the same distance those that come first row by row are taken. Prefix tokens see
    and are seen by all. Attention to the k nearest points is that of Point Transformer (Zhao et
    al. 2021), here on the grid of patches.
    """

    def __init__(self, neighbors: int) -> None:
        self.neighbors = neighbors

    def __call__(
        self, grid: Grid, prefix_tokens: int, depth: int, device: torch.device
    ) -> list[Tensor | None]:
        rows, columns = (torch.arange(n, device=device) for n in grid)
        centers = torch.cartesian_prod(rows, columns)  # (N, 2)
        patches = len(centers)
        squared = (centers[:, None] - centers[None]).square().sum(-1)
        order = squared * patches + torch.arange(patches, device=device)  # no two are equal
        nearest = order.topk(min(self.neighbors, patches), largest=False).indices  # (N, k)
        seen = torch.zeros_like(order, dtype=torch.bool).scatter_(1, nearest, True)
        return [_for_patches(seen, prefix_tokens)] * depth


def _for_patches(seen: Tensor, prefix_tokens: int) -> Tensor:
    """A mask (N, N) among patches, with prefix tokens that see and are seen by all."""
    return F.pad(seen, (prefix_tokens, 0, prefix_tokens, 0), value=True)


Mask = NoMask | CausalMask | WindowMask | NeighborhoodMask
