from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vitcli.commands.compare.similarity import (
    LayerDifference,
    MinibatchCka,
    centered_gram,
    jackknife_error,
)


def hsic(k: Tensor, m: Tensor) -> Tensor:
    """The unbiased estimator as written out by Song et al. 2012, equation 5."""
    n = len(k)
    k, m, ones = k.clone().fill_diagonal_(0), m.clone().fill_diagonal_(0), torch.ones(n).double()
    return (
        torch.trace(k @ m)
        + (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
        - 2 / (n - 2) * (ones @ k @ m @ ones)
    ) / (n * (n - 3))


def features(*widths: int, n: int = 24, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, width, generator=generator).double() + 3 for width in widths]


def cka(*minibatches: tuple[list[Tensor], list[Tensor]]) -> Tensor:
    total = MinibatchCka()
    for a, b in minibatches:
        total.add([centered_gram(x) for x in a], [centered_gram(x) for x in b])
    return total.value()


def test_one_minibatch_is_the_formula_of_the_paper() -> None:
    a, b = features(5, 9), features(7, seed=1)
    b[0] = b[0] + 2 * a[0][:, :1]
    for i, x in enumerate(a):
        k, m = x @ x.T, b[0] @ b[0].T
        expected = hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt()
        assert float(cka((a, b))[i, 0]) == pytest.approx(float(expected), abs=1e-12)


def test_minibatches_sum_the_three_terms_before_dividing() -> None:
    halves = [(features(6, seed=s), features(4, seed=s + 9)) for s in (1, 2)]
    terms = []
    for (x,), (y,) in halves:
        k, m = x @ x.T, y @ y.T
        terms.append(torch.stack([hsic(k, m), hsic(k, k), hsic(m, m)]))
    cross, first, second = torch.stack(terms).mean(0)
    expected = float(cross / (first * second).sqrt())
    assert float(cka(*halves)[0, 0]) == pytest.approx(expected, abs=1e-12)


def test_cka_is_one_for_rotated_and_scaled_features() -> None:
    (x,) = features(8)
    rotation = torch.linalg.qr(torch.randn(8, 8).double())[0]
    assert float(cka(([x], [3 * x @ rotation + 1]))) == pytest.approx(1.0, abs=1e-12)


def test_cka_of_independent_features_is_near_zero_where_the_biased_form_is_not() -> None:
    """512 channels and 32 examples: the biased estimator says above 0.9 (Nguyen et al. 2021)."""
    values = [
        float(cka((features(512, n=32, seed=2 * s), features(512, n=32, seed=2 * s + 1))))
        for s in range(8)
    ]
    assert abs(sum(values) / 8) < 0.02
    x, y = features(512, n=32)[0], features(512, n=32, seed=1)[0]
    x, y = x - x.mean(0), y - y.mean(0)
    k, m = x @ x.T, y @ y.T
    assert float((k * m).sum() / (k.norm() * m.norm())) > 0.9


def test_a_layer_that_never_varies_has_no_cka() -> None:
    constant = torch.ones(6, 4).double()
    assert cka(([constant], features(4, n=6))).isnan().all()


def test_differences() -> None:
    difference = LayerDifference("block 1")
    a = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    b = torch.tensor([[3.0, 4.0], [2.0, 0.0]])
    difference.add(a, a)
    difference.add(a, b)
    assert difference.max_abs == 2.0
    assert difference.scale == 4.0
    assert difference.relative == 0.5
    assert difference.cosine == pytest.approx(0.75, abs=1e-15)
    assert difference.cosine_min == 0.0


def test_equal_features_have_a_cosine_of_exactly_one() -> None:
    difference = LayerDifference("input")
    x = torch.randn(5, 300)
    difference.add(x, x.clone())
    assert (difference.max_abs, difference.cosine, difference.cosine_min) == (0.0, 1.0, 1.0)


def test_what_is_left_without_a_group_is_the_estimate_from_the_rest() -> None:
    a, b = features(5, 9, n=12), features(4, 6, 3, n=12, seed=1)
    sizes, start = [3, 4, 2, 3], 0
    total = MinibatchCka()
    total.add([centered_gram(x) for x in a], [centered_gram(x) for x in b], sizes)
    left_out = total.spread()
    assert left_out is not None and left_out.shape == (4, 2, 3)
    for size, value in zip(sizes, left_out, strict=True):
        rest = [i for i in range(12) if not start <= i < start + size]
        start += size
        assert (cka(([x[rest] for x in a], [x[rest] for x in b])) - value).abs().max() < 1e-12


def test_a_minibatch_that_is_one_group_is_left_out_whole() -> None:
    halves = [(features(6, n=5, seed=s), features(4, n=5, seed=s + 9)) for s in (1, 2, 3)]
    total = MinibatchCka()
    for a, b in halves:
        total.add([centered_gram(x) for x in a], [centered_gram(x) for x in b], [5])
    left_out = total.spread()
    assert left_out is not None
    assert (left_out[1] - cka(halves[0], halves[2])).abs().max() < 1e-12


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    x = torch.randn(9, generator=torch.Generator().manual_seed(0)).double()
    means = torch.stack([x[torch.arange(9) != i].mean() for i in range(9)])
    assert float(jackknife_error(means)) == pytest.approx(float(x.std()) / 3, rel=1e-12)


@pytest.mark.parametrize("first", [True, False])
def test_a_hole_stays_whatever_comes_before_or_after(first: bool) -> None:
    sound, hole = torch.ones(2, 3), torch.tensor([[1.0, 2.0, float("nan")], [1.0, 1.0, 1.0]])
    difference = LayerDifference("norm")
    for a, b in [(sound, hole), (sound, sound)] if first else [(sound, sound), (hole, sound)]:
        difference.add(a, b)
    assert all(
        math.isnan(value) for value in (difference.max_abs, difference.relative, difference.cosine)
    )
