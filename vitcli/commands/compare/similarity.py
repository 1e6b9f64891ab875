"""Similarity of two stacks of features: linear CKA of every pair of layers, and differences.

n examples in a minibatch, L layers, D channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitcli.images.preprocess import Box
from vitcli.nn.attention import Grid
from vitcli.stats import largest, largest_difference

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
        self.minibatches = 0
        self._sums: Terms | None = None
        self._changes: list[Terms] = []
        self._whole = True

    def add(
        self, a: Sequence[Tensor], b: Sequence[Tensor], groups: Sequence[int] | None = None
    ) -> None:
        """`centered_gram` of each layer of both stacks, over the same n examples.

        `groups` are the numbers of consecutive examples that belong together (the patches of an
        image), n in all; by default each example is one of its own. They are what `spread` leaves
        out, one at a time.
        """
        n = len(a[0])
        assert n >= MIN_EXAMPLES, n
        sizes = [1] * n if groups is None else list(groups)
        first, second = torch.stack(list(a)), torch.stack(list(b))  # (L, n, n)
        pairs = ((first, second), (first, None), (second, None))
        products = [_products(x, y) for x, y in pairs]
        here = tuple(product / (n * (n - 3)) for product in products)
        self._sums = here if self._sums is None else _add(self._sums, here)
        self.minibatches += 1
        start = 0
        for size in sizes:
            kept = n - size
            if kept >= MIN_EXAMPLES:
                part = slice(start, start + size)
                left = tuple(
                    _without(x, y, whole, part)
                    for (x, y), whole in zip(pairs, products, strict=True)
                )
                self._changes.append(_add(left, here, -1.0))
            elif size == n:  # the whole minibatch is one group
                self._changes.append(tuple(-x for x in here))
            else:
                self._whole = False  # too few examples would remain to estimate from
            start += size

    def value(self) -> Tensor:
        """(L of a, L of b) in float64; NaN where a layer is the same for every example."""
        assert self._sums is not None
        return _ratio(self._sums)

    def spread(self) -> Tensor | None:
        """(G, L of a, L of b): the values with each of G groups left out, for a jackknife.

        None with fewer than three groups, or where too little would remain without one.
        """
        if not self._whole or len(self._changes) < 3 or self._sums is None:
            return None
        return torch.stack([_ratio(_add(self._sums, change)) for change in self._changes])


Terms = tuple[Tensor, ...]
"""HSIC of a with b (L, M), of a with itself (L,), of b with itself (M,)."""


def jackknife_error(left_out: Tensor) -> Tensor:
    """(G, ...) estimates with each of G groups left out -> their standard errors (...).

    Efron and Stein 1981: the delete-one jackknife, sqrt((G - 1) / G * sum of squares).
    """
    n = len(left_out)
    squares: Tensor = (left_out - left_out.mean(0)).square().sum(0)
    return (squares * (n - 1) / n).sqrt()


def _products(x: Tensor, y: Tensor | None) -> Tensor:
    """Inner products of all pairs (L, M); with itself where there is no `y` (L,)."""
    flat = x.flatten(1)
    return flat.square().sum(1) if y is None else flat @ y.flatten(1).T


def _add(a: Terms, b: Terms, sign: float = 1.0) -> Terms:
    return tuple(x + sign * y for x, y in zip(a, b, strict=True))


def _ratio(terms: Terms) -> Tensor:
    cross, first, second = terms
    return cross / (first[:, None] * second[None]).sqrt()


def _without(x: Tensor, y: Tensor | None, whole: Tensor, part: slice) -> Tensor:
    """The unbiased HSIC of the examples outside `part`.

    Song et al. 2012, equation 5, on matrices that are U-centered already: their rows sum to zero,
    so the sums over what remains follow from the columns of what is left out.
    """
    m = x.shape[1] - (part.stop - part.start)
    rows = _products(x[:, part], None if y is None else y[:, part])
    corner = _products(x[:, part, part], None if y is None else y[:, part, part])
    both = (x, x if y is None else y)
    sums = [z[:, part, part].sum((1, 2)) for z in both]  # all that remains sums to the same
    out = [z[:, :, part].sum(-1) for z in both]  # (L, n): minus the row sums of what remains
    for o in out:
        o[:, part] = 0.0
    square = sums[0].square() if y is None else sums[0][:, None] * sums[1][None]
    cross = out[0].square().sum(1) if y is None else out[0] @ out[1].T
    trace = whole - 2 * rows + corner
    total = trace + square / ((m - 1) * (m - 2)) - 2 / (m - 2) * cross
    hsic: Tensor = total / (m * (m - 3))
    return hsic


@dataclass
class LayerDifference:
    """How far the same layer of two encoders is apart, accumulated over images.

    Where either side is not finite, every number of the layer is NaN: a hole has no size.
    """

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
        self.max_abs = largest((self.max_abs, largest_difference(a, b)))
        if math.isnan(self.max_abs):
            self.scale = self.cosine_min = self._cosine_sum = math.nan
            self._vectors += a[..., 0].numel()
            return
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
        if math.isnan(self.max_abs):
            return math.nan
        return self.max_abs / self.scale if self.scale else float(self.max_abs > 0)


class Pairing:
    """Which patch of B shows what a patch of A shows, where the two saw different crops."""

    def __init__(self) -> None:
        self.patches = self.paired = 0
        self.images = 0
        self.farthest = 0.0

    def add(self, a: Box, b: Box, grid: Grid) -> tuple[Tensor, Tensor]:
        """Places among A's patches, and the places of B's that hold their centers.

        All in order where the crops are the same to a thousandth of a patch; patches of A whose
        center B did not see are left out.
        """
        rows, columns = grid
        count = rows * columns
        self.patches += count
        high, wide = (a[3] - a[1]) / rows, (a[2] - a[0]) / columns
        if all(
            abs(x - y) <= 1e-3 * side for x, y, side in zip(a, b, (wide, high) * 2, strict=True)
        ):
            self.paired += count
            return torch.arange(count), torch.arange(count)
        self.images += 1
        y = a[1] + (torch.arange(rows, dtype=torch.float64) + 0.5) * high
        x = a[0] + (torch.arange(columns, dtype=torch.float64) + 0.5) * wide
        down, across = (y - b[1]) / (b[3] - b[1]) * rows, (x - b[0]) / (b[2] - b[0]) * columns
        row, column = down.floor().long(), across.floor().long()
        inside = ((row >= 0) & (row < rows))[:, None] & ((column >= 0) & (column < columns))[None]
        first = inside.flatten().nonzero()[:, 0]
        second = (row[:, None] * columns + column[None]).flatten()[first]
        self.paired += len(first)
        off = (down - row - 0.5).abs()[:, None].maximum((across - column - 0.5).abs()[None])
        self.farthest = max(self.farthest, float(off[inside].max()) if len(first) else 0.0)
        return first, second

    def in_words(self) -> str:
        if not self.images:
            return ""
        return (
            f"A and B crop {self.images} image{'s' * (self.images != 1)} differently: CKA "
            f"pairs the {self.paired:,} of {self.patches:,} patches in the common region, whose "
            f"centers are up to {self.farthest:.2f} patches apart"
        )
