"""Fresh weights: their distribution, and that a seed decides them."""

import math

import pytest
import torch

from tests.conftest import tiny_config
from vitcli.build import allocate, build_encoder, build_meta
from vitcli.nn.attention import trunc_normal


def test_truncated_normal_matches_its_closed_form():
    """At std 2 the cut at +-2 is one sigma: variance s^2 (1 - 2 phi(1) / (2 Phi(1) - 1))."""
    draws = torch.empty(400, 500)
    trunc_normal(draws, 2.0, torch.Generator().manual_seed(0))
    density = math.exp(-0.5) / math.sqrt(2 * math.pi)
    variance = 4 * (1 - 2 * density / math.erf(1 / math.sqrt(2)))
    assert draws.abs().max() <= 2
    assert draws.mean().item() == pytest.approx(0, abs=0.01)
    assert draws.var().item() == pytest.approx(variance, rel=0.01)
    assert (draws.abs() == 2).float().mean() < 1e-4  # drawn again, not clamped


def test_a_narrow_normal_is_not_cut():
    draws = torch.empty(200_000)
    trunc_normal(draws, 0.02, torch.Generator().manual_seed(0))
    assert draws.std().item() == pytest.approx(0.02, rel=0.01)


def test_xavier_draws_q_k_v_as_one_matrix_as_torchs_own_attention_does():
    """Bound sqrt(6 / (D + 3 D)); three matrices of D x D would have sqrt(2) times that."""
    theirs = torch.nn.MultiheadAttention(192, 3).in_proj_weight
    encoder = build_encoder(tiny_config(hidden=192, init="xavier_uniform"))
    ours = encoder.get_parameter("vit.blocks.0.attention.qkv.weight")
    bound = math.sqrt(6 / (4 * 192))
    for weight in (ours, theirs):
        assert weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=1e-2)


def test_the_seed_decides_every_parameter():
    config = tiny_config(registers=2)
    first, again, other = (build_encoder(config, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(
        first["vit.blocks.1.feed_forward.fc1.weight"], other["vit.blocks.1.feed_forward.fc1.weight"]
    )


def test_allocating_leaves_nothing_on_the_meta_device():
    meta = build_meta(tiny_config(registers=1, dist_token=True))
    shapes = {key: value.shape for key, value in meta.state_dict().items()}
    encoder = allocate(meta)
    assert {key: value.shape for key, value in encoder.state_dict().items()} == shapes
    assert all(p.device.type == "cpu" for p in encoder.parameters())
    assert not list(encoder.buffers())  # allocate would not see one
