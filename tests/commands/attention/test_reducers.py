"""Entropies, distances and masses of attention whose values are known by hand."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import TINY, tiny_config, tiny_encoder
from vitcli.build import build_encoder
from vitcli.checkpoints.adapters import adapt_heads, adapters
from vitcli.commands.attention import reducers as attention
from vitcli.commands.attention.reducers import (
    FIELDS,
    AttentionSamples,
    HeadReducer,
    observe_attention,
    patch_distances,
    patch_index,
    row_entropy,
)
from vitcli.config.request import load_config, preset_names
from vitcli.config.schema import EncoderConfig, ModelConfig
from vitcli.errors import VitcliError
from vitcli.nn.encoder import VisionEncoder, explicit_attention, hooked


def field(samples: AttentionSamples, name: str) -> Tensor:
    return samples.heads[..., FIELDS.index(name)]


@torch.no_grad()
def make_uniform(encoder: VisionEncoder) -> VisionEncoder:
    """Queries of zero: every logit is the same."""
    for block in encoder.vit.blocks:
        projection = block.attention.qkv
        rows = projection.weight.shape[1]
        projection.weight[:rows] = 0
        projection.bias[:rows] = 0
    return encoder


def test_entropy_of_rows_known_by_hand() -> None:
    rows = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25] * 4])
    assert row_entropy(rows).tolist() == pytest.approx([0.0, math.log(2), math.log(4)], abs=1e-15)


@pytest.mark.parametrize("tokens", [3, 197, 1370])
def test_uniform_attention_has_entropy_log_n_although_float32_rounds(tokens: int) -> None:
    rows = torch.full((2, tokens, tokens), 1 / tokens)
    assert (row_entropy(rows) - math.log(tokens)).abs().max() < 1e-14


@pytest.mark.parametrize("registers", [0, 4])
def test_a_uniform_encoder(registers: int, images: Tensor) -> None:
    encoder = make_uniform(tiny_encoder(registers=registers)).float()
    seen = observe_attention(encoder, images.float())
    n, heads = 13 + registers, (2, 2, 3)
    assert seen.tokens == n and seen.grid == (3, 4)
    for name in ("entropy", "entropy_cls", "entropy_patches"):
        assert field(seen, name).shape == heads
        assert (field(seen, name) - math.log(n)).abs().max() < 1e-12
    assert (field(seen, "cls_on_cls") - 1 / n).abs().max() < 1e-7
    assert (field(seen, "cls_on_patches") - 12 / n).abs().max() < 1e-6
    if registers:
        assert (field(seen, "cls_on_registers") - 4 / n).abs().max() < 1e-7
        assert (field(seen, "entropy_registers") - math.log(n)).abs().max() < 1e-12
    else:
        assert field(seen, "entropy_registers").isnan().all()
    # Mean distance between two of 3 x 4 patches of 8 px, prefix tokens apart.
    corners = [(8.0 * r, 8.0 * c) for r in range(3) for c in range(4)]
    mean = sum(math.dist(a, b) for a in corners for b in corners) / 144
    assert (field(seen, "distance") - mean).abs().max() < 1e-5


def reference(encoder: VisionEncoder, images: Tensor) -> Tensor:
    """Entropy of every row by torch.distributions, (L, B, H, N)."""
    kept: list[Tensor] = []
    with explicit_attention(encoder) as points, hooked((p, kept.append) for p in points):
        encoder(images)
    return torch.stack([torch.distributions.Categorical(probs=rows).entropy() for rows in kept])


VARIANTS: list[dict[str, Any]] = [
    {"position": "rope2d"},
    {"position": "alibi2d", "registers": 2},
    {"attention": {"mask": "causal"}},
    {"attention": {"mask": "window", "window": 2, "full_blocks": [1]}},
    {"attention": {"qk_norm": "head"}},
    {"attention": {"qk_norm": "width", "qk_norm_kind": "rmsnorm"}, "norm": "rmsnorm"},
    {"norm_placement": "post"},
    {"cls_token": False, "pooling": "map"},
    {"dist_token": True, "registers": 3},
    {"attention": {"mask": "causal"}, "position": "alibi2d"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_reduced_rows_equal_the_whole_array(changes: dict[str, Any], images: Tensor) -> None:
    encoder = tiny_encoder(**changes)
    seen = observe_attention(encoder, images)
    expected = reference(encoder, images)
    assert field(seen, "row_sum_error").max() < 1e-12
    assert (field(seen, "entropy") - expected.mean(-1)).abs().max() < 1e-12
    prefix = encoder.prefix_tokens
    patches = expected[..., prefix:].mean(-1)
    assert (field(seen, "entropy_patches") - patches).abs().max() < 1e-12
    if "cls" in encoder.front_end.prefix:
        assert (field(seen, "entropy_cls") - expected[..., 0]).abs().max() < 1e-12
        shares = [field(seen, f"cls_on_{kind}").nan_to_num() for kind in attention.MASS_KINDS]
        assert (sum(shares) - 1).abs().max() < 1e-12
    else:
        assert field(seen, "entropy_cls").isnan().all()


def test_no_array_of_probabilities_outlives_its_layer_and_one_head_exists_at_a_time(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = tiny_encoder(depth=3)
    seen: list[weakref.ref[Tensor]] = []
    at_once: list[int] = []
    after_each_block: list[int] = []
    reduce = HeadReducer.__call__

    def alive() -> int:
        return sum(made() is not None for made in seen)

    def watch(self: HeadReducer, rows: Tensor) -> None:
        assert rows.shape == (2, 1, 13, 13)
        seen.append(weakref.ref(rows))
        reduce(self, rows)
        at_once.append(alive())

    monkeypatch.setattr(HeadReducer, "__call__", watch)
    blocks = [(block, lambda _: after_each_block.append(alive())) for block in encoder.vit.blocks]
    with hooked(blocks):
        observe_attention(encoder, images)
    assert len(seen) == 9 and set(at_once) == {1}
    assert after_each_block == [0, 0, 0]


def test_an_adapter_is_seen(images: Tensor) -> None:
    encoder = tiny_encoder()
    plain = observe_attention(encoder, images)
    adapt_heads(encoder, [(1, 2)])
    with torch.no_grad():
        for _, adapter in adapters(encoder):
            adapter.up.fill_(0.3)
    encoder.double()
    adapted = observe_attention(encoder, images)
    expected = reference(encoder, images).mean(-1)
    assert (field(adapted, "entropy") - expected).abs().max() < 1e-12
    changed = (field(adapted, "entropy") - field(plain, "entropy")).abs() > 1e-9
    assert changed[1, :, 2].all() and not changed[0].any() and not changed[1, :, :2].any()


def structures() -> dict[str, EncoderConfig]:
    """A preset for each way that presets are put together, narrow and of two blocks."""
    found = {}
    for name in preset_names():
        config = load_config(ModelConfig, name).encoder
        changes = {
            "hidden": 48,
            "heads": 4,
            "mlp_hidden": 64,
            "depth": 2,
            "image_size": (64, 64),
            "patch_size": 16,
            "head_out": config.head_out and 8,
            "attention": config.attention.model_copy(update={"full_blocks": ()}),
        }
        small = config.model_copy(update=changes)
        found.setdefault(str(small), (name, small))
    return dict(found.values())


STRUCTURES = structures()


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_preset(name: str) -> None:
    images = torch.randn(1, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    encoder = build_encoder(STRUCTURES[name])
    seen = observe_attention(encoder, images)
    assert field(seen, "row_sum_error").max() < 1e-6
    entropy = field(seen, "entropy")
    assert (entropy - reference(encoder, images).mean(-1)).abs().max() < 1e-5
    assert (entropy >= 0).all() and (entropy <= math.log(seen.tokens)).all()


def test_a_causal_row_sees_only_what_came_before(images: Tensor) -> None:
    encoder = tiny_encoder(attention={"mask": "causal"}).float()
    kept: list[Tensor] = []
    with (
        explicit_attention(encoder, head_by_head=True) as points,
        hooked((p, lambda rows: kept.append(row_entropy(rows))) for p in points),
    ):
        encoder(images.float())
    limit = torch.arange(1, 14, dtype=torch.float64).log()
    assert all((rows <= limit + 1e-12).all() for rows in kept)
    assert all(rows[..., 0].abs().max() < 1e-12 for rows in kept)


def test_heads_are_seen_one_at_a_time_and_in_order(images: Tensor) -> None:
    encoder = tiny_encoder(position="alibi2d")
    whole: list[Tensor] = []
    single: list[Tensor] = []
    with explicit_attention(encoder) as points, hooked((p, whole.append) for p in points):
        expected = encoder(images).tokens
    with (
        explicit_attention(encoder, head_by_head=True) as points,
        hooked((p, single.append) for p in points),
    ):
        tokens = encoder(images).tokens
    assert [rows.shape for rows in single] == [(2, 1, 13, 13)] * 6
    assert (torch.cat(single[3:], dim=1) - whole[1]).abs().max() < 1e-14
    assert (tokens - expected).abs().max() < 1e-12


def test_small_parts_of_a_batch_give_the_same(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = tiny_encoder()
    whole = observe_attention(encoder, images)
    monkeypatch.setattr(attention, "ROWS_AT_ONCE", 1)
    parts = observe_attention(encoder, images)
    assert (whole.heads - parts.heads).nan_to_num().abs().max() < 1e-12
    assert torch.equal(whole.patch_norms, parts.patch_norms)


def test_patch_norms_are_those_that_each_block_leaves(images: Tensor) -> None:
    encoder = tiny_encoder(registers=2)
    last = encoder(images).tokens_before_norm[:, 3:].norm(dim=-1)
    assert (observe_attention(encoder, images).patch_norms[-1] - last).abs().max() < 1e-5


def test_queries(images: Tensor) -> None:
    encoder = tiny_encoder(registers=2)
    rows = reference(encoder, images)
    for query, expected in {
        "cls": rows[..., 0],
        "patch": rows[..., 3:].mean(-1),
        "1,2": rows[..., 3 + 6],
    }.items():
        assert (
            field(observe_attention(encoder, images, query), "entropy") - expected
        ).abs().max() < 1e-12


def test_distance_of_one_patch_query(images: Tensor) -> None:
    encoder = make_uniform(tiny_encoder(registers=1))
    seen = field(observe_attention(encoder, images, "0,0"), "distance")
    mean = sum(math.hypot(8 * r, 8 * c) for r in range(3) for c in range(4)) / 12
    assert (seen - mean).abs().max() < 1e-9


def test_distances_are_between_centers_of_a_wide_grid() -> None:
    distances = patch_distances((2, 3), 14)
    assert distances[0].tolist() == pytest.approx([0, 14, 28, 14, 14 * 2**0.5, 14 * 5**0.5])
    assert torch.equal(distances, distances.T)


@pytest.mark.parametrize("text", ["3", "3,4", "-1,0", "a,b", "0,0,0", "dog"])
def test_a_query_outside_the_grid_is_told(text: str) -> None:
    with pytest.raises(VitcliError):
        patch_index(text, (3, 4))


def test_no_cls_query_without_cls(images: Tensor) -> None:
    encoder = tiny_encoder(cls_token=False, pooling="mean")
    with pytest.raises(VitcliError, match="does not have a CLS token"):
        observe_attention(encoder, images, "cls")


def test_attention_that_is_not_finite_names_the_block(images: Tensor) -> None:
    encoder = tiny_encoder()
    with torch.no_grad():
        encoder.vit.blocks[1].attention.qkv.weight.fill_(math.inf)
    with pytest.raises(VitcliError, match="block 2"):
        observe_attention(encoder, images)


def test_the_fused_path_is_back_afterwards(images: Tensor) -> None:
    encoder = tiny_encoder()
    before = [block.attention.attend for block in encoder.vit.blocks]
    observe_attention(encoder, images)
    assert [block.attention.attend for block in encoder.vit.blocks] == before


def test_bfloat16_is_measured(images: Tensor) -> None:
    encoder = build_encoder(tiny_config()).bfloat16()
    seen = observe_attention(encoder, images.bfloat16())
    assert field(seen, "entropy").max() <= math.log(13)
    assert TINY["depth"] == len(seen.heads)
