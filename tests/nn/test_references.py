"""Variants of the core against the modules of the libraries they come from, in float64.

Every parameter is random. 1e-6 where a reference computes its rotations or a resize in float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import randomize, tiny_config
from vitcli.build import build_block, build_encoder
from vitcli.nn.attention import ChannelAttention, MultiHeadSelfAttention, NeighborhoodMask
from vitcli.nn.encoder import VisionEncoder, explicit_attention
from vitcli.nn.positions import LearnedPosition, RelativePosition, RopePosition

pytestmark = pytest.mark.filterwarnings("ignore")
GRIDS = [(4, 4), (3, 5), (6, 2)]


def near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> bool:
    assert ours.shape == theirs.shape
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


@pytest.mark.parametrize("grid", [(4, 4), (2, 6), (6, 4)])
def test_a_table_with_rotations_is_qwen3_vls_tower(grid: tuple[int, int]) -> None:
    from transformers import Qwen3VLVisionConfig, Qwen3VLVisionModel

    theirs = Qwen3VLVisionModel(
        Qwen3VLVisionConfig(
            depth=2,
            hidden_size=32,
            num_heads=2,
            intermediate_size=48,
            out_hidden_size=16,
            patch_size=4,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        )
    ).double()
    randomize(theirs)
    encoder = build_encoder(
        tiny_config(
            image_size=16,
            patch_size=4,
            hidden=32,
            heads=2,
            mlp_hidden=48,
            activation="gelu_tanh",
            cls_token=False,
            final_norm=False,
            pooling="none",
            position="learned+rope2d",
            position_table={"resize": "bilinear_align_corners"},
            rope={"theta": 10000.0, "coordinates": "index"},
        )
    ).double()
    state = theirs.state_dict()
    names = {
        "attention.qkv": "attn.qkv",
        "attention.proj": "attn.proj",
        "feed_forward.fc1": "mlp.linear_fc1",
        "feed_forward.fc2": "mlp.linear_fc2",
    }
    ours = {
        "front_end.projection.weight": state["patch_embed.proj.weight"].sum(2),  # a still image
        "front_end.projection.bias": state["patch_embed.proj.bias"],
        "front_end.position.table": state["pos_embed.weight"],
    }
    for key in encoder.vit.state_dict():
        name = key
        for mine, other in names.items():
            name = name.replace(mine, other)
        ours[f"vit.{key}"] = state[name]
    encoder.load_state_dict(ours)
    rows, columns = grid
    image = torch.randn(1, 3, 4 * rows, 4 * columns, dtype=torch.float64)
    patches = image.unflatten(3, (columns, 4)).unflatten(2, (rows, 4))  # 1 3 r p c p
    frames = patches.permute(0, 2, 4, 1, 3, 5).unsqueeze(4).expand(-1, -1, -1, -1, 2, -1, -1)
    cells = frames.unflatten(1, (rows // 2, 2)).unflatten(3, (columns // 2, 2)).transpose(2, 3)
    with torch.no_grad():
        expected = theirs(cells.reshape(rows * columns, -1), torch.tensor([[1, rows, columns]]))
        tokens = encoder(image).tokens
    in_cells = tokens.unflatten(1, (rows // 2, 2, columns // 2, 2)).transpose(2, 3).reshape(-1, 32)
    assert near(in_cells, expected.last_hidden_state, 1e-6)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rotations_of_the_perception_encoder(grid: tuple[int, int], offset: float) -> None:
    from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

    theirs = RotaryEmbeddingCat(
        16,
        in_pixels=False,
        feat_shape=list(grid),
        ref_feat_shape=[24, 20],
        grid_offset=offset,
        grid_indexing="xy",
    )
    ours = RopePosition(
        16, 10000.0, "reference", "interleaved", (24, 20), offset=offset, first_axis="columns"
    )
    x = torch.randn(2, 3, grid[0] * grid[1], 16, dtype=torch.float64)
    assert near(ours.rotation(grid, 0, x)(x), apply_rot_embed_cat(x, theirs.get_embed()), 1e-6)


@pytest.mark.parametrize("side", [4, 19])
@pytest.mark.parametrize("grid", [*GRIDS, (19, 19), (25, 7)])
def test_bucketed_positions_are_those_of_idefics(side: int, grid: tuple[int, int]) -> None:
    """19 is a size at which float32 puts some patches into the bucket before their own."""
    from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionEmbeddings

    config = Idefics2VisionConfig(hidden_size=8, image_size=4 * side, patch_size=4)
    theirs = Idefics2VisionEmbeddings(config).double()
    randomize(theirs)
    ours = LearnedPosition(8, (side, side), 0, resize="buckets", resize_dtype=None).double()
    with torch.no_grad():
        ours.table.copy_(theirs.position_embedding.weight)
        image = torch.randn(1, 3, 4 * grid[0], 4 * grid[1], dtype=torch.float64)
        expected = theirs(image, torch.ones(1, *grid, dtype=torch.bool))
        patches = theirs.patch_embedding(image).flatten(2).mT
        _, added = ours.add(patches[:, :0], patches, grid)
    assert near(added, expected)


@pytest.mark.parametrize("grid", GRIDS)
def test_relative_biases_are_beits(grid: tuple[int, int]) -> None:
    """At its own size (4, 4) and, resized bilinearly as transformers does, at others."""
    from transformers import BeitConfig
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias

    config = BeitConfig(image_size=16, patch_size=4, num_attention_heads=3)
    blocks = [BeitRelativePositionBias(config).double() for _ in range(2)]
    ours = RelativePosition(3, 2, (4, 4), prefix_tokens=1, resize_dtype=None).double()
    like = torch.zeros(1, dtype=torch.float64)
    for theirs, table in zip(blocks, ours.tables, strict=True):
        randomize(theirs)
        table.data.copy_(theirs.relative_position_bias_table)
    for theirs, bias in zip(blocks, ours.block_biases(grid, 1, 2, like), strict=True):
        assert near(bias, theirs(grid)[0])


@pytest.mark.parametrize("prefix", [0, 1])
def test_relative_biases_are_timms(prefix: int) -> None:
    from timm.layers import RelPosBias

    theirs = RelPosBias((3, 5), 4, prefix_tokens=prefix).double()
    randomize(theirs)
    ours = RelativePosition(4, 1, (3, 5), prefix).double()
    ours.tables[0].data.copy_(theirs.relative_position_bias_table)
    (bias,) = ours.block_biases((3, 5), prefix, 1, theirs.relative_position_bias_table)
    assert torch.equal(bias, theirs.get_bias()[0])


def test_relative_tables_are_converted_as_they_are_resized_while_running() -> None:
    small = RelativePosition(3, 2, (4, 4), 1)
    large = RelativePosition(3, 2, (5, 7), 1)
    randomize(small)
    large.load_state_dict(large.converted(small))
    like = torch.zeros(1)
    pairs = zip(
        large.block_biases((5, 7), 1, 2, like), small.block_biases((5, 7), 1, 2, like), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(large.tables[0][-3:], small.tables[0][-3:]), "prefix rows are not resized"


def swin_like(registers: int = 0) -> VisionEncoder:
    encoder = build_encoder(
        tiny_config(
            image_size=32,
            patch_size=4,
            depth=2,
            cls_token=False,
            registers=registers,
            pooling="none",
            position="relative2d",
            attention={"mask": "window", "window": 4, "shift": 2},
        )
    ).double()
    randomize(encoder)
    return encoder


def test_shifted_windows_are_swins_two_blocks() -> None:
    """timm rolls the image, cuts windows and masks; here the mask alone says the same."""
    from timm.models.swin_transformer import SwinTransformerBlock

    encoder = swin_like()
    width, heads = 24, 3
    x = torch.randn(2, 64, width, dtype=torch.float64)
    theirs = x.unflatten(1, (8, 8))
    like = x[:1]
    with torch.no_grad():
        for index, block in enumerate(encoder.vit.blocks):
            swin = SwinTransformerBlock(
                width,
                (8, 8),
                heads,
                window_size=4,
                shift_size=2 * index,
                mlp_ratio=block.feed_forward.fc1.out_features / width,
            ).double()
            for mine, other in [
                (block.norm1, swin.norm1),
                (block.norm2, swin.norm2),
                (block.attention.qkv, swin.attn.qkv),
                (block.attention.proj, swin.attn.proj),
                (block.feed_forward.fc1, swin.mlp.fc1),
                (block.feed_forward.fc2, swin.mlp.fc2),
            ]:
                other.load_state_dict(mine.state_dict())
                other.eps = getattr(mine, "eps", None)
            table = encoder.front_end.position.tables[index].unflatten(0, (15, 15))
            window = table[4:11, 4:11].flatten(0, 1)  # the offsets within a window of 4
            swin.attn.relative_position_bias_table.copy_(window)
            theirs = swin.eval()(theirs)
        masks = list(encoder.block_masks((8, 8), like))
        ours = encoder.vit(x, attn_mask=masks, kept=(kept := {2: x}))
    assert near(kept[2], theirs.flatten(1, 2))
    assert near(ours, encoder.vit.norm(kept[2]))


def test_registers_are_seen_across_shifted_windows() -> None:
    masks = list(swin_like(registers=2).block_masks((8, 8), torch.zeros(1, 66, 24)))
    for mask in masks:
        assert torch.isfinite(mask[:, :2]).all() and torch.isfinite(mask[:, :, :2]).all()
        assert mask.isneginf().any()


@pytest.mark.parametrize("neighbors", [1, 4, 9, 100])
@pytest.mark.parametrize("grid", GRIDS)
def test_neighbors_by_brute_force(grid: tuple[int, int], neighbors: int) -> None:
    rows, columns = grid
    mask = NeighborhoodMask(neighbors)(grid, 1, 2, torch.device("cpu"))[1]
    places = [(r, c) for r in range(rows) for c in range(columns)]
    expected = torch.ones(len(places) + 1, len(places) + 1, dtype=torch.bool)
    for i, (r, c) in enumerate(places):
        ranked = sorted(
            range(len(places)),
            key=lambda j: ((places[j][0] - r) ** 2 + (places[j][1] - c) ** 2, j),
        )
        for j in range(len(places)):
            expected[1 + i, 1 + j] = j in ranked[:neighbors]
    assert torch.equal(mask, expected)
    assert mask.diagonal().all()


def test_a_neighborhood_attends_as_torchs_masked_product() -> None:
    encoder = build_encoder(
        tiny_config(depth=1, attention={"mask": "neighborhood", "neighbors": 5})
    ).double()
    randomize(encoder)
    images = torch.randn(1, 3, 24, 32, dtype=torch.float64)
    x = encoder.front_end(images)
    (mask,) = encoder.block_masks((3, 4), x)
    block = encoder.vit.blocks[0]
    with torch.no_grad():
        q, k, v = (
            t.unflatten(-1, (3, 8)).transpose(1, 2)
            for t in block.attention.qkv(block.norm1(x)).chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + block.attention.proj(out.transpose(1, 2).flatten(2))
        x = x + block.feed_forward(block.norm2(x))
        assert near(encoder(images).tokens_before_norm, x)


@pytest.mark.parametrize("tokens", [5, 50])
def test_channel_attention_is_xca(tokens: int) -> None:
    from timm.models.xcit import XCA

    theirs = XCA(24, 3, qkv_bias=True).double()
    ours = build_block(tiny_config(position="none", attention={"over": "channels"})).attention
    assert isinstance(ours, MultiHeadSelfAttention) and isinstance(ours.attend, ChannelAttention)
    ours.double()
    randomize(ours)
    state = {name.removeprefix("attend."): value for name, value in ours.state_dict().items()}
    theirs.load_state_dict(state)
    x = torch.randn(2, tokens, 24, dtype=torch.float64)
    with torch.no_grad():
        assert near(ours(x), theirs(x))


def test_channels_have_no_weights_between_tokens(images: Tensor) -> None:
    from vitcli.errors import VitcliError

    encoder = build_encoder(tiny_config(position="learned", attention={"over": "channels"}))
    assert all(b.attention.attend.temperature.eq(1).all() for b in encoder.vit.blocks)
    with (
        pytest.raises(VitcliError, match="attend over channels"),
        explicit_attention(encoder),
    ):
        pass
    assert isinstance(encoder.vit.blocks[0], nn.Module)


@pytest.mark.parametrize("gated", [True, False])
def test_inner_norms_are_those_of_timms_eva_block(gated: bool, images: Tensor) -> None:
    """NormFormer's norms: on what the heads give, and on the MLP's hidden channels."""
    from timm.models.eva import EvaBlock

    theirs = EvaBlock(
        16,
        2,
        qkv_fused=False,
        mlp_ratio=3.0,
        swiglu_mlp=gated,
        scale_mlp=True,
        scale_attn_inner=True,
        norm_layer=lambda width, **where: nn.LayerNorm(width, eps=1e-6, **where),
    ).double()
    randomize(theirs)
    config = tiny_config(
        hidden=16,
        heads=2,
        mlp_hidden=48,
        mlp="gated" if gated else "plain",
        activation="silu" if gated else "gelu",
        mlp_norm=True,
        attention={"qkv_bias": "qv", "inner_norm": True},
    )
    block = build_block(config).double()
    state = theirs.state_dict()
    parts = [state[f"attn.{part}_proj.weight"] for part in "qkv"]
    first = ["mlp.fc1_g", "mlp.fc1_x"] if gated else ["mlp.fc1"]
    ours = {
        "attention.qkv.weight": torch.cat(parts),
        "attention.qkv.q_bias": state["attn.q_proj.bias"],
        "attention.qkv.v_bias": state["attn.v_proj.bias"],
    }
    for kind in ("weight", "bias"):
        ours[f"feed_forward.fc1.{kind}"] = torch.cat([state[f"{name}.{kind}"] for name in first])
    for name in block.state_dict():
        place = name.replace("attention.", "attn.").replace("feed_forward.", "mlp.")
        ours.setdefault(name, state.get(place))
    block.load_state_dict(ours)
    x = images[:, :, :5].flatten(2)[..., :48].reshape(2, 9, 16)
    assert near(block(x), theirs(x))


@pytest.mark.parametrize("grid", GRIDS)
def test_frequencies_between_are_pixtrals(grid: tuple[int, int]) -> None:
    from transformers import PixtralVisionConfig
    from transformers.models.pixtral.modeling_pixtral import (
        PixtralVisionRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    theirs = PixtralVisionRotaryEmbedding(
        PixtralVisionConfig(hidden_size=48, num_attention_heads=3)
    )
    places = torch.cartesian_prod(*(torch.arange(n) for n in grid))
    x = torch.randn(2, 3, len(places), 16, dtype=torch.float64)
    turned, _ = apply_rotary_pos_emb(x, x, *theirs(x, places), unsqueeze_dim=0)
    ours = RopePosition(16, 10000.0, "index", "half", (1, 1), alternate=True)
    assert near(ours.rotation(grid, 0, x)(x), turned, 1e-6)


def test_a_norm_on_patches_comes_before_the_positions(images: Tensor) -> None:
    """AIMv2's embedding; the maps without biases are in its twin of the checkpoints' tests."""
    from transformers.models.aimv2.configuration_aimv2 import Aimv2VisionConfig
    from transformers.models.aimv2.modeling_aimv2 import Aimv2VisionEmbeddings

    theirs = Aimv2VisionEmbeddings(
        Aimv2VisionConfig(hidden_size=16, image_size=24, patch_size=8)
    ).double()
    randomize(theirs)
    encoder = build_encoder(
        tiny_config(
            image_size=24,
            patch_size=8,
            hidden=16,
            heads=2,
            cls_token=False,
            pooling="none",
            norm="rmsnorm",
            norm_eps=1e-5,
            patch_norm=True,
        )
    ).double()
    encoder.front_end.load_state_dict(
        {
            "projection.weight": theirs.patch_embed.weight,
            "projection.bias": theirs.patch_embed.bias,
            "patch_norm.weight": theirs.rms_norm.weight,
            "position.table": theirs.position_embedding.weight,
        }
    )
    pixels = images[..., :24]
    assert near(encoder.front_end(pixels), theirs(pixels), 1e-6)
