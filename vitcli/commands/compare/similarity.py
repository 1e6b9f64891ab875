"""How alike two stacks of features are: linear CKA of every pair of layers, and plain differences.

n examples in a minibatch, L layers, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXAMPLES = 4
"""The unbiased estimator divides by n - 3."""


def centered_gram(features: Tensor) -> Tensor:
    """(n, D) -> the U-centered Gram matrix (n, n) in float64, its diagonal zero.

    Song et al. 2012 give the unbiased estimator of HSIC; Szekely and Rizzo 2014, section 3, write
    it as the inner product of such matrices divided by n (n - 3).
    """
    n = len(features)
    x = features.flatten(1).double()
    x = x - x.mean(0)  # changes nothing but rounding
    gram = (x @ x.T).fill_diagonal_(0.0)
    rows = gram.sum(1) / (n - 2)
    centered = gram - rows[:, None] - rows[None] + rows.sum() / (n - 1)
    return centered.fill_diagonal_(0.0)


class MinibatchCka:
    """Linear CKA between all layers of two stacks, from minibatches of at least four examples.

    Kornblith et al. 2019, equation 4 with the unbiased HSIC; its three terms are summed over
    minibatches before the division (Nguyen, Raghu and Kornblith 2021, equation 2), so that memory
    does not grow with the number of examples.
    """

    def __init__(self) -> None:
        self.cross: Tensor | float = 0.0
        self.own: tuple[Tensor | float, Tensor | float] = (0.0, 0.0)
        self.minibatches = 0

    def add(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """`centered_gram` of each layer of both stacks, over the same n examples."""
        n = len(a[0])
        assert n >= MIN_EXAMPLES, n
        first, second = (torch.stack(list(grams)).flatten(1) for grams in (a, b))  # (L, n * n)
        scale = n * (n - 3)
        self.cross = self.cross + first @ second.T / scale
        self.own = (
            self.own[0] + first.square().sum(1) / scale,
            self.own[1] + second.square().sum(1) / scale,
        )
        self.minibatches += 1

    def value(self) -> Tensor:
        """(L of a, L of b) in float64; NaN where a layer is the same for every example."""
        first, second = self.own
        assert isinstance(self.cross, Tensor)
        assert isinstance(first, Tensor) and isinstance(second, Tensor)
        return self.cross / (first[:, None] * second[None]).sqrt()


@dataclass
class LayerDifference:
    """How far the same layer of two encoders is apart, accumulated over images."""

    name: str
    max_abs: float = 0.0
    scale: float = 0.0
    """Largest absolute value of the first encoder's tokens."""
    cosine_min: float = 1.0
    _cosine_sum: float = 0.0
    _vectors: int = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Features of the same images and shape, (..., D)."""
        a, b = a.double(), b.double()
        self.max_abs = max(self.max_abs, float((a - b).abs().max()))
        self.scale = max(self.scale, float(a.abs().max()))
        lengths = a.norm(dim=-1) * b.norm(dim=-1)
        cosine = torch.where(lengths > 0, (a * b).sum(-1) / lengths, 1.0).clamp(-1.0, 1.0)
        # Equal vectors are at exactly 1, which rounding of the norms would miss.
        cosine = torch.where((a == b).all(-1), 1.0, cosine)
        self.cosine_min = min(self.cosine_min, float(cosine.min()))
        self._cosine_sum += float(cosine.sum())
        self._vectors += cosine.numel()

    @property
    def cosine(self) -> float:
        """Mean over tokens and images."""
        return self._cosine_sum / self._vectors

    @property
    def relative(self) -> float:
        """Largest absolute difference over the largest absolute value."""
        return self.max_abs / self.scale if self.scale else float(self.max_abs > 0)
