"""One vector for an image, from its tokens after the final norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitcli.nn.attention import FusedAttention


class ClsPooling(nn.Module):
    """The CLS token."""

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor | None:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, D)."""
        return prefix[:, 0]


class MeanPooling(nn.Module):
    """The mean over patches; prefix tokens are left out."""

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor | None:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, D)."""
        return patches.mean(dim=1)


class ClsMeanPooling(nn.Module):
    """CLS and the mean over patches side by side, as DINOv2's linear probe reads them."""

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor | None:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, 2D)."""
        return torch.cat([prefix[:, 0], patches.mean(dim=1)], dim=-1)


class MapPooling(nn.Module):
    """Multi-head attention pooling: a learned probe attends over the patches.

    Zhai et al. 2022, "Scaling Vision Transformers", section 3.2, as SigLIP ships it: no residual
    from the probe and no norm before the attention; y = a + MLP(norm(a)).
    """

    def __init__(self, hidden: int, heads: int, norm: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.probe = nn.Parameter(torch.empty(1, hidden))
        self.q = nn.Linear(hidden, hidden)
        self.kv = nn.Linear(hidden, 2 * hidden)
        self.attend = FusedAttention()
        self.proj = nn.Linear(hidden, hidden)
        self.norm = norm
        self.feed_forward = feed_forward

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor | None:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, D)."""
        probe = self.q(self.probe).expand(patches.shape[0], 1, -1)  # (B, 1, D)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (probe, *self.kv(patches).chunk(2, dim=-1))
        )  # (B, H, 1 or N, d)
        a = self.proj(self.attend(q, k, v, None).transpose(1, 2).flatten(-2))  # (B, 1, D)
        y: Tensor = a + self.feed_forward(self.norm(a))
        return y[:, 0]


class NoPooling(nn.Module):
    """No pooled vector: the tokens are the answer."""

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor | None:
        return None
