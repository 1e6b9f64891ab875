"""Multi-head self-attention, and the two ways to attend.

B batch, N tokens, D hidden, H heads, d = D / H channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.nn.parameters import Part

Rotation = Callable[[Tensor], Tensor]
"""Turns queries or keys (B, H, N, d) by their positions."""


def identity(x: Tensor) -> Tensor:
    return x


def join_masks(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Both masks in one: booleans (True attends) are intersected, additive ones are summed."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == torch.bool and second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool:
        return second.masked_fill(~first, float("-inf"))
    if second.dtype == torch.bool:
        return first.masked_fill(~second, float("-inf"))
    return first + second


class FusedAttention(nn.Module):
    """torch's scaled_dot_product_attention: the probabilities are never stored."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d); mask (.., N, N), boolean or additive."""
        rate = self.dropout if self.training else 0.0
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)


class ExplicitAttention(nn.Module):
    """The same result by the formula softmax(q k^T / sqrt(d) + mask) v.

    A forward hook on `probabilities` sees the (B, H, N, N) rows of each call.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.probabilities = nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d); mask (.., N, N), boolean or additive."""
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, N, N)
        if mask is not None:
            logits = (
                logits.masked_fill(~mask, float("-inf"))
                if mask.dtype == torch.bool
                else logits + mask.to(logits.dtype)
            )
        rows = self.probabilities(logits.softmax(dim=-1))
        out: Tensor = self.dropout(rows) @ v
        return out


ATTENDS: dict[str, type[FusedAttention] | type[ExplicitAttention]] = {
    "fused": FusedAttention,
    "explicit": ExplicitAttention,
}


class ChannelAttention(Part):
    """Softmax over channels in place of tokens: each head mixes its d channels, linear in N.

    Cross-covariance attention (El-Nouby et al. 2021, XCiT, equation 2), which Restormer's
    transposed attention is too: queries and keys of unit length over the tokens, a learned
    temperature per head. There are no (N, N) weights, so masks and positions do not act on it.
    """

    def __init__(self, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(heads, 1, 1))
        self.dropout = nn.Dropout(dropout)

    def reset(self, std: float, generator: torch.Generator) -> None:
        self.temperature.fill_(1.0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d); `mask` is None."""
        q, k = (F.normalize(t, dim=-2) for t in (q, k))  # over the tokens
        rows = (q.mT @ k * self.temperature).softmax(dim=-1)  # (B, H, d, d)
        out: Tensor = v @ self.dropout(rows).mT
        return out


class QueryValueBiasLinear(Part):
    """A fused q, k, v projection whose keys have no bias (DINOv3)."""

    matrices = ("weight",)

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.q_bias = nn.Parameter(torch.empty(hidden))
        self.v_bias = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        return F.linear(x, self.weight, bias)


QKV_PROJECTIONS: dict[str, Callable[[int], nn.Module]] = {
    "qkv": lambda hidden: nn.Linear(hidden, 3 * hidden),
    "qv": QueryValueBiasLinear,
    "none": lambda hidden: nn.Linear(hidden, 3 * hidden, bias=False),
}


class MultiHeadSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over H heads (Vaswani et al. 2017, section 3.2).

    Args:
        qkv: projection D -> 3D; rows [0:D] are q, then k, then v, heads contiguous within each.
        q_norm, k_norm: applied to (B, N, D) before the head split.
        attend: FusedAttention or ExplicitAttention.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        qkv: nn.Module,
        attend: nn.Module,
        q_norm: nn.Module,
        k_norm: nn.Module,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = qkv
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.attend = attend
        self.proj = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, rotate: Rotation = identity, attn_mask: Tensor | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D).

        `attn_mask` is (N, N) or broadcastable to (B, H, N, N): boolean (True attends) or additive.
        """
        q, k, v = self.qkv(x).chunk(3, dim=-1)  # 3 x (B, N, D)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.q_norm(q), self.k_norm(k), v)
        )  # 3 x (B, H, N, d)
        out = self.attend(rotate(q), rotate(k), v, attn_mask)  # (B, H, N, d)
        y: Tensor = self.dropout(self.proj(out.transpose(1, 2).flatten(-2)))  # (B, N, D)
        return y
