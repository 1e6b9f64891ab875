from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.conftest import tiny_encoder
from vitcli.checkpoints.adapters import (
    HeadAdapter,
    adapt_heads,
    adapter_state,
    adapters,
    add_adapter_state,
    merged_state,
)
from vitcli.nn.encoder import VisionEncoder, attentions, hooked

D, d = 24, 8


def head_outputs(encoder: VisionEncoder, layer: int, images: Tensor) -> Tensor:
    """(B, H, N, d) as the attention of a layer gives them, before the output projection."""
    seen: list[Tensor] = []
    with torch.no_grad(), hooked([(attentions(encoder)[layer].attend, seen.append)]):
        encoder(images)
    return seen[0]


def adapted(**how: object) -> VisionEncoder:
    encoder = tiny_encoder(head="linear", head_out=4)
    adapt_heads(encoder, [(1, 2)], **{"rank": 3, "alpha": 6.0} | how)  # type: ignore[arg-type]
    return encoder


def shake(encoder: VisionEncoder) -> None:
    for _, adapter in adapters(encoder):
        adapter.double()
        adapter.up.data.normal_(generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rank", [1, 3])
def test_parameters_of_a_head_are_3_r_D_plus_d_r(rank: int) -> None:
    encoder = adapted(rank=rank)
    assert sum(p.numel() for p in encoder.parameters() if p.requires_grad) == 3 * (
        rank * D + d * rank
    )


def test_a_fresh_adapter_changes_nothing(images: Tensor) -> None:
    base, encoder = tiny_encoder(head="linear", head_out=4), adapted().double()
    assert encoder(images).output.equal(base(images).output)


def test_only_the_adapted_head_moves_and_the_others_keep_every_bit(images: Tensor) -> None:
    base, encoder = tiny_encoder(head="linear", head_out=4), adapted()
    shake(encoder)
    before, after = head_outputs(base, 1, images), head_outputs(encoder, 1, images)
    assert after[:, :2].equal(before[:, :2])
    assert not torch.allclose(after[:, 2], before[:, 2])
    assert head_outputs(encoder, 0, images).equal(head_outputs(base, 0, images))


def test_output_is_x_times_w_plus_alpha_over_r_b_a(images: Tensor) -> None:
    encoder = adapted(parts=("q", "v"))
    shake(encoder)
    (_, adapter) = next(adapters(encoder))
    x = torch.randn(2, 5, D, dtype=torch.float64)
    weight = adapter.base.weight.clone()  # type: ignore[operator, union-attr]
    for k, third in enumerate((0, 2)):
        rows = slice(third * D + 2 * d, third * D + 3 * d)
        weight[rows] += 2.0 * adapter.up[k] @ adapter.down[k]
    expected = torch.nn.functional.linear(x, weight, adapter.base.bias)  # type: ignore[arg-type]
    assert torch.allclose(adapter(x), expected, rtol=0, atol=1e-12)
    assert torch.allclose(adapter.merged_weight(), weight, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bias", ["qkv", "qv", "none"])
def test_merging_gives_the_same_outputs(images: Tensor, bias: str) -> None:
    encoder = tiny_encoder(head="linear", head_out=4, attention={"qkv_bias": bias})
    plain = copy.deepcopy(encoder)
    adapt_heads(encoder, [(0, 1), (1, 0), (1, 2)], rank=2)
    shake(encoder)
    expected = encoder(images).output
    plain.load_state_dict(merged_state(encoder))
    assert torch.allclose(plain(images).output, expected, rtol=0, atol=1e-12)


def test_adapters_alone_are_added_to_another_copy_of_the_base(images: Tensor) -> None:
    encoder, base = adapted(), tiny_encoder(head="linear", head_out=4)
    shake(encoder)
    add_adapter_state(base, adapter_state(encoder))
    assert torch.allclose(base(images).output, encoder(images).output, rtol=0, atol=1e-12)


def test_adapters_of_another_encoder_are_refused() -> None:
    state = adapter_state(adapted())
    with pytest.raises(ValueError, match=r"has no vit\.blocks\.1\.attention\.qkv"):
        add_adapter_state(tiny_encoder(depth=1), state)
    with pytest.raises(ValueError, match="another width"):
        add_adapter_state(tiny_encoder(hidden=12), state)
    with pytest.raises(ValueError, match="not an adapter"):
        add_adapter_state(tiny_encoder(), tiny_encoder().state_dict())
    beyond = {key: t + 3 * D if key.endswith("rows") else t for key, t in state.items()}
    with pytest.raises(ValueError, match="other rows"):
        add_adapter_state(tiny_encoder(), beyond)


def test_impossible_places_are_refused() -> None:
    with pytest.raises(ValueError, match="no block 3"):
        adapt_heads(tiny_encoder(), [(2, 0)])
    with pytest.raises(ValueError, match="no head 4"):
        adapt_heads(tiny_encoder(), [(0, 3)])
    wide = tiny_encoder(attention={"qk_norm": "width"})
    with pytest.raises(ValueError, match="adapt v alone"):
        adapt_heads(wide, [(0, 0)])
    adapt_heads(wide, [(0, 0)], parts=("v",))


def test_the_base_is_frozen_and_the_adapter_gets_gradients(images: Tensor) -> None:
    encoder = adapted()
    shake(encoder)
    encoder(images).output.sum().backward()
    reached = {name for name, p in encoder.named_parameters() if p.grad is not None}
    assert reached == {"vit.blocks.1.attention.qkv.down", "vit.blocks.1.attention.qkv.up"}
    assert isinstance(attentions(encoder)[1].qkv, HeadAdapter)
