from __future__ import annotations

import pytest
import torch

from tests.conftest import randomize, tiny_config, tiny_encoder
from vitcli.build import build_block
from vitcli.nn.attention import ExplicitAttention, FusedAttention, join_masks
from vitcli.nn.encoder import explicit_attention, hooked

N = 13
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()
ADDITIVE = torch.randn(3, N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "mask", [None, CAUSAL, ADDITIVE, ADDITIVE.masked_fill(~CAUSAL, float("-inf"))]
)
def test_both_ways_to_attend_agree(mask: torch.Tensor | None) -> None:
    q, k, v = torch.randn(3, 2, 3, N, 8, dtype=torch.float64)
    fused = FusedAttention()(q, k, v, mask)
    explicit = ExplicitAttention()(q, k, v, mask)
    assert (fused - explicit).abs().max() < 1e-14


@pytest.mark.parametrize("position", ["learned", "rope2d", "alibi2d"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_whole_encoder_agrees_on_both_ways(
    position: str, mask: str, images: torch.Tensor
) -> None:
    encoder = tiny_encoder(position=position, attention={"mask": mask}, registers=2)
    fused = encoder(images).tokens
    with explicit_attention(encoder):
        explicit = encoder(images).tokens
    assert (fused - explicit).abs().max() < 1e-12
    assert torch.equal(encoder(images).tokens, fused), "the fused path must come back"


def test_attention_rows_sum_to_one_along_the_keys(images: torch.Tensor) -> None:
    encoder = tiny_encoder(position="alibi2d")
    sums = []
    with (
        explicit_attention(encoder) as probabilities,
        hooked((module, lambda rows: sums.append(rows.sum(-1))) for module in probabilities),
    ):
        encoder(images)
    assert len(sums) == 2
    assert all(s.shape == (2, 3, N) and (s - 1).abs().max() < 1e-12 for s in sums)


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_a_causal_block_is_a_decoder_block(norm_placement: str) -> None:
    block = build_block(tiny_config(norm_placement=norm_placement)).float()
    randomize(block)
    x = torch.randn(1, N, 24)
    before = block(x, attn_mask=CAUSAL)
    for j in range(N):
        changed = x.clone()
        changed[:, j] += 1
        after = block(changed, attn_mask=CAUSAL)
        assert torch.equal(after[:, :j], before[:, :j])
        assert not torch.equal(after[:, j], before[:, j])


def test_the_causal_config_masks_every_block() -> None:
    encoder = tiny_encoder(attention={"mask": "causal"}, pooling="none")
    images = torch.randn(1, 3, 24, 32, dtype=torch.float64)
    before = encoder(images).tokens
    images[..., 16:, 24:] += 1  # the last patch
    after = encoder(images).tokens
    assert torch.equal(after[:, :-1], before[:, :-1])
    assert not torch.equal(after[:, -1], before[:, -1])


def test_masks_join_by_intersection_and_by_sum() -> None:
    low = torch.zeros(2, 2)
    boolean = torch.tensor([[True, False], [True, True]])
    expected = torch.tensor([[0.0, float("-inf")], [0.0, 0.0]])
    assert join_masks(None, None) is None
    assert join_masks(boolean, None) is boolean
    assert torch.equal(join_masks(low, boolean), expected)
    assert torch.equal(join_masks(boolean, low), expected)
    assert torch.equal(join_masks(boolean, boolean.T), boolean & boolean.T)
    assert torch.equal(join_masks(low + 1, low + 2), low + 3)


def test_a_caller_mask_reaches_the_attention(images: torch.Tensor) -> None:
    encoder = tiny_encoder()
    own = torch.eye(N, dtype=torch.bool)  # each token alone
    lonely = encoder(images, attn_mask=own).tokens
    images[..., 16:, 24:] += 1
    after = encoder(images, attn_mask=own).tokens
    assert torch.equal(lonely[:, :-1], after[:, :-1])
    assert not torch.equal(encoder(images).tokens[:, :-1], after[:, :-1])


@pytest.mark.parametrize("scope, count", [("none", 0), ("width", 4 * 24), ("head", 4 * 8)])
def test_qk_norm_parameters(scope: str, count: int) -> None:
    block = build_block(tiny_config(attention={"qk_norm": scope}))
    norms = [block.attention.q_norm, block.attention.k_norm]
    assert sum(p.numel() for m in norms for p in m.parameters()) == count


def test_keys_without_bias_equal_keys_with_zero_bias(images: torch.Tensor) -> None:
    without = tiny_encoder(attention={"qkv_bias": "qv"})
    full = tiny_encoder()
    state = without.state_dict()
    for i in range(2):
        root = f"vit.blocks.{i}.attention.qkv."
        q, v = state.pop(root + "q_bias"), state.pop(root + "v_bias")
        state[root + "bias"] = torch.cat([q, torch.zeros_like(q), v])
    full.load_state_dict(state)
    assert (without(images).tokens - full(images).tokens).abs().max() < 1e-14
