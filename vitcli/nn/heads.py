"""What stands after pooling: each takes the pooled vector and the tokens, and uses what it needs.

Shapes: pooled (B, D) or None, prefix (B, P, D), patches (B, N, D) -> (B, out) or (B, N/4, out).
"""

from __future__ import annotations

from torch import Tensor, nn

from vitcli.nn.positions import Grid


class NoHead(nn.Module):
    def forward(
        self, pooled: Tensor | None, prefix: Tensor, patches: Tensor, grid: Grid
    ) -> Tensor | None:
        return None


class LinearHead(nn.Module):
    """A classifier (with bias) or a projection (without)."""

    def __init__(self, width: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out, bias=bias)

    def forward(
        self, pooled: Tensor | None, prefix: Tensor, patches: Tensor, grid: Grid
    ) -> Tensor | None:
        y: Tensor = self.linear(pooled)
        return y


class TanhHead(nn.Module):
    """tanh(Linear(pooled)), the pooler that BERT and Hugging Face's ViT carry."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(
        self, pooled: Tensor | None, prefix: Tensor, patches: Tensor, grid: Grid
    ) -> Tensor | None:
        y: Tensor = self.linear(pooled)
        return y.tanh()


class TanhLinearHead(nn.Module):
    """A classifier on tanh(Linear(pooled)), as the first ViTs had (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.pre_logits = nn.Linear(width, width)
        self.linear = nn.Linear(width, out)

    def forward(
        self, pooled: Tensor | None, prefix: Tensor, patches: Tensor, grid: Grid
    ) -> Tensor | None:
        y: Tensor = self.linear(self.pre_logits(pooled).tanh())
        return y


class DistilledHead(nn.Module):
    """The mean of a classifier on CLS and one on the distillation token (Touvron et al. 2021)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.cls = nn.Linear(width, out)
        self.dist = nn.Linear(width, out)

    def forward(
        self, pooled: Tensor | None, prefix: Tensor, patches: Tensor, grid: Grid
    ) -> Tensor | None:
        y: Tensor = (self.cls(prefix[:, 0]) + self.dist(prefix[:, 1])) / 2
        return y


class MergerHead(nn.Module):
    """Each 2x2 cell of patches to one vector of the language model's width (Qwen2-VL).

    Cells row by row; within a cell top-left, top-right, bottom-left, bottom-right.
    """

    def __init__(self, width: int, out: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.fc1 = nn.Linear(4 * width, 4 * width)
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(4 * width, out)

    def forward(
        self, pooled: Tensor | None, prefix: Tensor, patches: Tensor, grid: Grid
    ) -> Tensor | None:
        rows, columns = grid
        cells = self.norm(patches).unflatten(1, (rows // 2, 2, columns // 2, 2))
        cells = cells.transpose(2, 3).flatten(3).flatten(1, 2)  # (B, N/4, 4D)
        y: Tensor = self.fc2(self.activation(self.fc1(cells)))
        return y
