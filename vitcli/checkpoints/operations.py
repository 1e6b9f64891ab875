"""How foreign tensors become ours; each is linear algebra bookkeeping that loses nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitcli.checkpoints.family import From


def joined(*parts: Tensor) -> Tensor:
    """torch.cat; by hand for shapes alone, where torch.cat imports its compiler for a second."""
    if parts[0].device.type != "meta":
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError("parts of different widths")
    return parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])


def fused(*sources: str) -> From:
    """Matrices or vectors one below the other: q, k and v, or gate and up."""
    return From(sources, joined)


def rows(*sources: str) -> From:
    """Tokens or tables of any number of leading axes as (rows, D), one below the other."""
    return From(sources, lambda *parts: joined(*(p.reshape(-1, p.shape[-1]) for p in parts)))


def third(index: int, source: str) -> From:
    """One of q, k, v out of a fused projection."""
    return From((source,), lambda t: t.chunk(3)[index])


def last_two_thirds(source: str) -> From:
    """k and v out of a fused projection."""
    return From((source,), lambda t: t[t.shape[0] // 3 :])


def transposed(source: str) -> From:
    """A matrix stored for multiplication from the right, (in, out)."""
    return From((source,), lambda t: t.T)


def summed_over_frames(source: str) -> From:
    """A Conv3d weight (D, C, T, p, p) on T equal frames, as a Conv2d weight (D, C, p, p)."""
    return From((source,), lambda t: t.sum(dim=2), rounds=True)


def conv_from_linear(source: str) -> From:
    """A linear map of flattened RGB patches (row, column, channel) as a Conv2d weight."""

    def make(t: Tensor) -> Tensor:
        side = math.isqrt(t.shape[1] // 3)
        return t.reshape(-1, side, side, 3).permute(0, 3, 1, 2)

    return From((source,), make)
