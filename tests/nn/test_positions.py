from __future__ import annotations

import math

import pytest
import torch

from tests.conftest import tiny_encoder
from vitcli.nn.positions import (
    AlibiPosition,
    LearnedPosition,
    RopePosition,
    SinCosPosition,
    alibi_slopes,
    sincos_table,
)


def test_sincos_table_in_closed_form() -> None:
    table = sincos_table(16, (3, 5))
    for row in range(3):
        for column in range(5):
            values = table[row * 5 + column].tolist()
            expected = [
                f(axis * 10000 ** (-j / 4))
                for axis in (column, row)
                for f in (math.sin, math.cos)
                for j in range(4)
            ]
            assert values == pytest.approx(expected, abs=1e-7)


def test_sincos_prefix_rows_are_zero_and_nothing_is_trained() -> None:
    position = SinCosPosition(16, (3, 5), prefix_rows=1)
    position.reset(0.02, torch.Generator())
    assert position.table[0].abs().max() == 0
    assert position.table[1:].abs().max() > 0.9
    assert not position.table.requires_grad


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("coordinates, theta", [("index", 10000.0), ("reference", 50.0)])
def test_rope_scores_depend_on_the_offset_alone(
    layout: str, coordinates: str, theta: float
) -> None:
    grid = (5, 6)
    rope = RopePosition(16, theta, coordinates, layout, reference_grid=(16, 16))
    q, k = torch.randn(2, 16, dtype=torch.float64)
    rotate = rope.rotation(grid, 0, q)
    turned_q, turned_k = (rotate(t.expand(1, 1, 30, 16))[0, 0].unflatten(0, grid) for t in (q, k))
    for rows, columns in [(0, 1), (1, 0), (2, 3)]:
        scores = (turned_q[: 5 - rows, : 6 - columns] * turned_k[rows:, columns:]).sum(-1)
        assert (scores - scores[0, 0]).abs().max() < 1e-12
    assert (turned_q * turned_k).sum(-1).sub(q @ k).abs().max() < 1e-12
    other = (turned_q[0, 0] * turned_k[0, 3]).sum()
    assert (other - (turned_q[0, 0] * turned_k[3, 0]).sum()).abs() > 1e-3, "axes must differ"


def test_rope_keeps_the_prefix_and_every_length() -> None:
    rope = RopePosition(16, 100.0, "centered", "half", reference_grid=(16, 16))
    x = torch.randn(2, 3, 2 + 12, 16)
    turned = rope.rotation((3, 4), 2, x)(x)
    assert torch.equal(turned[:, :, :2], x[:, :, :2])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-6)
    assert not torch.allclose(turned[:, :, 2:], x[:, :, 2:], atol=1e-2)


def test_rope_angles_of_dinov3_in_closed_form() -> None:
    rope = RopePosition(16, 100.0, "centered", "half", reference_grid=(16, 16))
    angles = rope.angles((3, 4))
    row, column = 2, 1
    y, x = (row + 0.5) / 3 * 2 - 1, (column + 0.5) / 4 * 2 - 1
    expected = [2 * math.pi * c * 100 ** (-4 * j / 16) for c in (y, x) for j in range(4)]
    assert angles[row * 4 + column].tolist() == pytest.approx(expected, abs=1e-12)


def test_alibi_slopes_of_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16) == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    # 12 heads in the authors' code: the series of 8, then the odd terms of the series of 16
    between = [2 ** (-i / 2) for i in (1, 3, 5, 7)]
    assert alibi_slopes(12) == pytest.approx([2.0**-i for i in range(1, 9)] + between)


def test_alibi_is_minus_slope_times_distance() -> None:
    bias = AlibiPosition(8).bias((3, 4), 2, torch.zeros(1, dtype=torch.float64))
    assert bias.shape == (8, 14, 14)
    assert bias[:, :2].abs().max() == 0 and bias[:, :, :2].abs().max() == 0
    assert torch.equal(bias, bias.mT)
    first, last = 2, 2 + 11  # patches (0, 0) and (2, 3)
    assert bias[0, first, last].item() == pytest.approx(-0.5 * math.hypot(2, 3))
    assert bias[7, first, first + 1].item() == pytest.approx(-(2.0**-8))


def test_a_table_at_its_own_grid_is_untouched() -> None:
    position = LearnedPosition(8, (3, 4), 1, resize="bicubic_offset")
    with torch.no_grad():
        position.table.normal_()
    assert torch.equal(position.patch_rows((3, 4)), position.table[1:])


@pytest.mark.parametrize(
    "rule",
    ["bicubic", "bicubic_antialias", "bicubic_align_corners", "bilinear_antialias"],
)
def test_resizing_keeps_a_constant_table(rule: str) -> None:
    position = LearnedPosition(8, (3, 4), 1, resize=rule)
    with torch.no_grad():
        position.table.fill_(2.5)
    assert torch.allclose(position.patch_rows((7, 5)), torch.full((35, 8), 2.5))


def test_align_corners_resizing_keeps_the_corners() -> None:
    position = LearnedPosition(8, (3, 4), 0, resize="bicubic_align_corners")
    with torch.no_grad():
        position.table.normal_()
    large = position.patch_rows((9, 16)).unflatten(0, (9, 16))
    small = position.table.unflatten(0, (3, 4))
    for y, x in [(0, 0), (0, -1), (-1, 0), (-1, -1)]:
        assert torch.allclose(large[y, x], small[y, x], atol=1e-6)


def test_registers_get_no_rows_unless_asked(images: torch.Tensor) -> None:
    encoder = tiny_encoder(registers=3)
    assert encoder.front_end.position.table.shape == (1 + 12, 24)
    asked = tiny_encoder(registers=3, position_table={"prefix_rows": 4})
    assert asked.front_end.position.table.shape == (4 + 12, 24)
    tokens = encoder.front_end(images)
    assert torch.equal(tokens[0, 1:4], encoder.front_end.prefix["registers"])
    table = encoder.front_end.position.table
    assert torch.equal(tokens[0, 0], encoder.front_end.prefix["cls"][0] + table[0])
