"""Which tokens each block lets see which: one boolean (N, N) mask, or None, per block."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

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

    Prefix tokens see and are seen by all; the blocks in `full_blocks` are not masked.
    """

    def __init__(self, window: int, full_blocks: Collection[int]) -> None:
        self.window = window
        self.full_blocks = frozenset(full_blocks)

    def __call__(
        self, grid: Grid, prefix_tokens: int, depth: int, device: torch.device
    ) -> list[Tensor | None]:
        rows, columns = (torch.arange(n, device=device) // self.window for n in grid)
        ids = (rows[:, None] * grid[1] + columns[None]).flatten()  # (N,)
        tokens = prefix_tokens + len(ids)
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
        mask[prefix_tokens:, prefix_tokens:] = ids[:, None] == ids[None]
        return [None if block in self.full_blocks else mask for block in range(depth)]


Mask = NoMask | CausalMask | WindowMask
