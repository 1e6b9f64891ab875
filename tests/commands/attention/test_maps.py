from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_encoder
from vitcli.commands.attention import reductions as attention
from vitcli.commands.attention.maps import Rollout, attention_maps, default_query, fuse_heads
from vitcli.nn.hooks import explicit_attention, tapped


def test_rollout_of_three_tokens_by_hand() -> None:
    """Two blocks, A' = (A + I) / 2, and A'_2 A'_1 multiplied out on paper."""
    first = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.2, 0.6]]], dtype=torch.float64)
    second = torch.tensor([[[0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]]).double()
    # A'_1 = [.75 .25 0; 0 1 0; .1 .1 .8]    A'_2 = [.5 0 .5; .25 .75 0; .5 0 .5]
    by_hand = torch.tensor(
        [[0.425, 0.175, 0.4], [0.1875, 0.8125, 0.0], [0.425, 0.175, 0.4]], dtype=torch.float64
    )
    roll = Rollout()
    roll.add(first)
    roll.add(second)
    assert roll.matrix is not None
    assert (roll.matrix[0] - by_hand).abs().max() < 1e-15


def test_rollout_makes_fused_rows_sum_to_one_and_an_empty_row_keeps_itself() -> None:
    roll = Rollout()
    roll.add(torch.tensor([[[2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.1, 0.1, 0.2]]]).double())
    expected = [[0.75, 0.25, 0.0], [0.0, 1.0, 0.0], [0.125, 0.125, 0.75]]
    assert roll.matrix is not None
    assert (roll.matrix[0] - torch.tensor(expected).double()).abs().max() < 1e-15


def test_head_fusions() -> None:
    heads = [torch.tensor([0.2, 0.8]), torch.tensor([0.6, 0.4])]
    assert fuse_heads(heads, "mean").tolist() == pytest.approx([0.4, 0.6])
    assert fuse_heads(heads, "max").tolist() == pytest.approx([0.6, 0.8])
    assert fuse_heads(heads, "min").tolist() == pytest.approx([0.2, 0.4])


def whole_arrays(encoder: torch.nn.Module, images: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    with explicit_attention(encoder) as points, tapped((p, kept.append) for p in points):  # type: ignore[arg-type]
        encoder(images)
    return kept


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_maps_are_rows_of_the_attention_without_prefix_tokens(
    registers: int, fusion: str, images: Tensor
) -> None:
    encoder = tiny_encoder(registers=registers)
    first, second = whole_arrays(encoder, images)
    maps = attention_maps(encoder, images, (1, 2), fusion=fusion, rollout=True)
    prefix = 1 + registers
    assert maps.query == "cls"
    assert maps.heads.shape == (2, 2, 3, 3, 4)
    assert (maps.heads[1].flatten(-2) - second[:, :, 0, prefix:]).abs().max() < 1e-12
    reduce = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}[fusion]
    fused = reduce(second[:, :, 0, prefix:], dim=1)
    assert (maps.fused[1].flatten(-2) - fused).abs().max() < 1e-12

    result = torch.eye(13 + registers, dtype=torch.float64)
    for rows, shown in zip((first, second), maps.rollout, strict=True):  # type: ignore[arg-type]
        step = reduce(rows, dim=1)
        step = step / step.sum(-1, keepdim=True)
        result = (0.5 * step + 0.5 * torch.eye(13 + registers)) @ result
        assert (result.sum(-1) - 1).abs().max() < 1e-12
        assert (shown.flatten(-2) - result[:, 0, prefix:]).abs().max() < 1e-12


def test_without_cls_it_is_the_mean_over_patch_queries(images: Tensor) -> None:
    encoder = tiny_encoder(cls_token=False, pooling="mean", registers=2)
    assert default_query(encoder) == "patch"
    maps = attention_maps(encoder, images, (2,))
    rows = whole_arrays(encoder, images)[1][:, :, 2:, 2:].mean(2)
    assert (maps.heads[0].flatten(-2) - rows).abs().max() < 1e-12
    assert maps.rollout is None


def test_one_patch_as_query(images: Tensor) -> None:
    encoder = tiny_encoder(registers=2)
    maps = attention_maps(encoder, images, (1,), query="2,1")
    rows = whole_arrays(encoder, images)[0][:, :, 3 + 2 * 4 + 1, 3:]
    assert (maps.heads[0].flatten(-2) - rows).abs().max() < 1e-12


def test_small_parts_of_a_batch_give_the_same_maps(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = tiny_encoder()
    whole = attention_maps(encoder, images, (1, 2), rollout=True)
    monkeypatch.setattr(attention, "ROWS_AT_ONCE", 1)
    parts = attention_maps(encoder, images, (1, 2), rollout=True)
    assert (whole.heads - parts.heads).abs().max() < 1e-12
    assert whole.rollout is not None and parts.rollout is not None
    assert (whole.rollout - parts.rollout).abs().max() < 1e-12
