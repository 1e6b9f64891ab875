"""One vector for an image, from its tokens after the final norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitcli.nn.attention import FusedAttention, Grid, Part, trunc_normal


class ClsPooling(nn.Module):
    """The CLS token."""

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, D)."""
        return prefix[:, 0]


class MeanPooling(nn.Module):
    """The mean over patches; prefix tokens are left out."""

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, D)."""
        return patches.mean(dim=1)


class ClsMeanPooling(nn.Module):
    """CLS and the mean over patches side by side, as DINOv2's linear probe reads them."""

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, 2D)."""
        return torch.cat([prefix[:, 0], patches.mean(dim=1)], dim=-1)


class ProbePooling(Part):
    """A learned probe attends over tokens: softmax(q k^T / sqrt(d)) v, projected; no residual.

    Args:
        q: what the probe passes through; `nn.Identity` for none.
        bias: of keys and values.
    """

    def __init__(self, hidden: int, heads: int, q: nn.Module, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.probe = nn.Parameter(torch.empty(1, hidden))
        self.q = q
        self.kv = nn.Linear(hidden, 2 * hidden, bias=bias)
        self.attend = FusedAttention()
        self.proj = nn.Linear(hidden, hidden)

    def reset(self, std: float, generator: torch.Generator) -> None:
        trunc_normal(self.probe, std, generator)

    def attended(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, 1, D)."""
        probe = self.q(self.probe).expand(tokens.shape[0], 1, -1)  # (B, 1, D)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (probe, *self.kv(tokens).chunk(2, dim=-1))
        )  # (B, H, 1 or T, d)
        y: Tensor = self.proj(self.attend(q, k, v, None).transpose(1, 2).flatten(-2))
        return y


class MapPooling(ProbePooling):
    """Multi-head attention pooling of the patches, or of all tokens: y = a + MLP(norm(a)).

    Zhai et al. 2022, "Scaling Vision Transformers", section 3.2, as SigLIP ships it: no norm before
    the attention.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        norm: nn.Module,
        feed_forward: nn.Module,
        reads_prefix: bool = False,
    ) -> None:
        super().__init__(hidden, heads, nn.Linear(hidden, hidden), bias=True)
        self.reads_prefix = reads_prefix
        self.norm = norm
        self.feed_forward = feed_forward

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, D)."""
        tokens = torch.cat([prefix, patches], dim=1) if self.reads_prefix else patches
        a = self.attended(tokens)
        y: Tensor = a + self.feed_forward(self.norm(a))
        return y[:, 0]


class QueryPooling(ProbePooling):
    """The probe is the query itself, over the patches (El-Nouby et al. 2024, AIMv2, section 3)."""

    def __init__(self, hidden: int, heads: int, bias: bool) -> None:
        super().__init__(hidden, heads, nn.Identity(), bias)

    def forward(self, prefix: Tensor, patches: Tensor) -> Tensor:
        """Prefix (B, P, D) and patches (B, N, D) -> (B, D)."""
        return self.attended(patches)[:, 0]


class NoPooling(nn.Module):
    """No pooled vector: the tokens are the answer."""

    def forward(self, prefix: Tensor, patches: Tensor) -> None:
        return None


class NoHead(nn.Module):
    def forward(self, pooled: object, prefix: Tensor, patches: Tensor, grid: Grid) -> None:
        return None


class LinearHead(nn.Module):
    """A classifier (with bias) or a projection (without)."""

    def __init__(self, width: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out, bias=bias)

    def forward(self, pooled: Tensor, prefix: Tensor, patches: Tensor, grid: Grid) -> Tensor:
        y: Tensor = self.linear(pooled)
        return y


class TanhHead(nn.Module):
    """tanh(Linear(pooled)), the pooler that BERT and Hugging Face's ViT carry."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pooled: Tensor, prefix: Tensor, patches: Tensor, grid: Grid) -> Tensor:
        y: Tensor = self.linear(pooled)
        return y.tanh()


class TanhLinearHead(nn.Module):
    """A classifier on tanh(Linear(pooled)), as the first ViTs had (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.pre_logits = nn.Linear(width, width)
        self.linear = nn.Linear(width, out)

    def forward(self, pooled: Tensor, prefix: Tensor, patches: Tensor, grid: Grid) -> Tensor:
        y: Tensor = self.linear(self.pre_logits(pooled).tanh())
        return y


class DistilledHead(nn.Module):
    """The mean of a classifier on CLS and one on the distillation token (Touvron et al. 2021)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.cls = nn.Linear(width, out)
        self.dist = nn.Linear(width, out)

    def forward(self, pooled: object, prefix: Tensor, patches: Tensor, grid: Grid) -> Tensor:
        on_cls, on_dist = self.both(prefix)
        y: Tensor = (on_cls + on_dist) / 2
        return y

    def both(self, tokens: Tensor) -> Tensor:
        """Tokens (B, P.., D), CLS and distillation first -> (2, B, K), the output on each."""
        return torch.stack([self.cls(tokens[:, 0]), self.dist(tokens[:, 1])])


class MergerHead(nn.Module):
    """Each 2x2 cell of patches to one vector of the language model's width (Qwen2-VL).

    Cells row by row; within a cell top-left, top-right, bottom-left, bottom-right. The norm is of
    each patch, or with `norm_joined` of the joined cell.
    """

    def __init__(self, width: int, out: int, norm: nn.Module, norm_joined: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.norm_joined = norm_joined
        self.fc1 = nn.Linear(4 * width, 4 * width)
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(4 * width, out)

    def forward(self, pooled: object, prefix: Tensor, patches: Tensor, grid: Grid) -> Tensor:
        rows, columns = grid
        cells = patches if self.norm_joined else self.norm(patches)
        cells = cells.unflatten(1, (rows // 2, 2, columns // 2, 2))
        cells = cells.transpose(2, 3).flatten(3).flatten(1, 2)  # (B, N/4, 4D)
        cells = self.norm(cells) if self.norm_joined else cells
        y: Tensor = self.fc2(self.activation(self.fc1(cells)))
        return y
