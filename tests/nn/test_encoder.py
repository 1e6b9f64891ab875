from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import randomize, tiny_config, tiny_encoder
from vitcli.build import build_block, build_encoder
from vitcli.config.schema import EncoderConfig
from vitcli.nn.attention import WindowMask
from vitcli.nn.encoder import DropPath, VisionEncoder, hooked, layer_points
from vitcli.nn.pooling import MapPooling


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("norm_placement", ["pre", "post"])
def test_a_block_keeps_its_shape(batch: int, norm_placement: str) -> None:
    block = build_block(tiny_config(norm_placement=norm_placement))
    randomize(block)
    x = torch.randn(batch, 13, 24)
    assert block(x).shape == x.shape


def test_a_four_layer_stack_has_the_right_shape(images: torch.Tensor) -> None:
    output = tiny_encoder(depth=4)(images)
    assert output.tokens.shape == output.tokens_before_norm.shape == (2, 1 + 3 * 4, 24)
    assert output.pooled.shape == (2, 24)
    assert output.output is None


def test_a_zero_image_still_gives_an_answer_through_cls() -> None:
    encoder = build_encoder(tiny_config())
    output = encoder(torch.zeros(1, 3, 24, 32))
    assert output.tokens[0, 0].norm() > 0.1


def test_the_gradient_flows_from_cls_to_the_patch_projection(images: torch.Tensor) -> None:
    encoder = tiny_encoder()
    encoder(images).tokens[:, 0].square().sum().backward()
    gradient = encoder.front_end.projection.weight.grad
    assert gradient is not None and gradient.abs().max() > 1e-6


def reference_stack(c: EncoderConfig, norm_first: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        c.hidden,
        c.heads,
        c.mlp_hidden,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=c.norm_eps,
        batch_first=True,
        norm_first=norm_first,
        dtype=torch.float64,
    )
    norm = nn.LayerNorm(c.hidden, eps=c.norm_eps, dtype=torch.float64) if norm_first else None
    return nn.TransformerEncoder(layer, c.depth, norm=norm, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
@pytest.mark.parametrize("size", ["tiny", "vit-b"])
def test_the_stack_equals_torch_transformer_encoder(norm_placement: str, size: str) -> None:
    """Weights copied by name; the whole of ViT-B/16, 197 tokens, and a tiny one."""
    changes = {"norm_placement": norm_placement}
    c = tiny_config(**changes) if size == "tiny" else EncoderConfig.model_validate(changes)
    encoder = build_encoder(c).double()
    randomize(encoder, scale=0.2 if size == "tiny" else 0.03)
    reference = reference_stack(c, norm_placement == "pre")
    ours = dict(encoder.vit.state_dict())
    names = {
        "self_attn.in_proj_weight": "attention.qkv.weight",
        "self_attn.in_proj_bias": "attention.qkv.bias",
        "self_attn.out_proj": "attention.proj",
        "linear1": "feed_forward.fc1",
        "linear2": "feed_forward.fc2",
    }
    state = {}
    for name in reference.state_dict():
        mine = name.replace("layers.", "blocks.")
        for theirs, own in names.items():
            mine = mine.replace(theirs, own)
        state[name] = ours.pop(mine)
    assert not ours, "every parameter of the stack takes part"
    reference.load_state_dict(state)
    x = torch.randn(1, 197 if size == "vit-b" else 13, c.hidden, dtype=torch.float64)
    with torch.no_grad():
        expected = reference(x)
        difference = (encoder.vit(x) - expected).abs().max()
    assert difference < 1e-12 * expected.abs().max()


def test_map_pooling_equals_torch_multihead_attention(images: torch.Tensor) -> None:
    encoder = tiny_encoder(pooling="map", registers=2)
    pooling = encoder.pooling
    assert isinstance(pooling, MapPooling)
    reference = nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.float64)
    reference.load_state_dict(
        {
            "in_proj_weight": torch.cat([pooling.q.weight, pooling.kv.weight]),
            "in_proj_bias": torch.cat([pooling.q.bias, pooling.kv.bias]),
            "out_proj.weight": pooling.proj.weight,
            "out_proj.bias": pooling.proj.bias,
        }
    )
    output = encoder(images)
    patches = output.tokens[:, 3:]  # CLS and registers are not among the keys
    probe = pooling.probe.expand(2, 1, -1)
    a, _ = reference(probe, patches, patches)
    expected = (a + pooling.feed_forward(pooling.norm(a)))[:, 0]
    assert (output.pooled - expected).abs().max() < 1e-13


def test_pooling_by_definition(images: torch.Tensor) -> None:
    tokens = tiny_encoder(registers=2)(images).tokens
    mean = tokens[:, 3:].mean(1)
    assert torch.equal(tiny_encoder(registers=2)(images).pooled, tokens[:, 0])
    assert torch.equal(tiny_encoder(registers=2, pooling="mean")(images).pooled, mean)
    both = tiny_encoder(registers=2, pooling="cls+mean")(images).pooled
    assert torch.equal(both, torch.cat([tokens[:, 0], mean], 1))
    assert tiny_encoder(pooling="none")(images).pooled is None


def test_heads_by_definition(images: torch.Tensor) -> None:
    linear = tiny_encoder(head="linear", head_out=5)
    output = linear(images)
    assert torch.equal(output.output, linear.head.linear(output.pooled))
    tanh = tiny_encoder(head="tanh")
    output = tanh(images)
    assert torch.equal(output.output, tanh.head.linear(output.pooled).tanh())
    both = tiny_encoder(head="tanh_linear", head_out=5)
    output = both(images)
    assert torch.equal(output.output, both.head.linear(both.head.pre_logits(output.pooled).tanh()))
    projection = tiny_encoder(head="projection", head_out=5, pool_norm=True, final_norm=False)
    output = projection(images)
    assert projection.head.linear.bias is None
    normed = projection.pool_norm(output.tokens[:, 0])
    assert torch.equal(output.output, normed @ projection.head.linear.weight.T)
    two = tiny_encoder(head="distilled", head_out=5, dist_token=True)
    output = two(images)
    expected = (two.head.cls(output.tokens[:, 0]) + two.head.dist(output.tokens[:, 1])) / 2
    assert torch.equal(output.output, expected)


def test_the_merger_joins_two_by_two_cells() -> None:
    encoder = tiny_encoder(head="merger", head_out=5, image_size=(32, 48), pooling="none")
    output = encoder(torch.randn(1, 3, 32, 48, dtype=torch.float64))
    head, normed = encoder.head, encoder.head.norm(output.tokens[0, 1:]).unflatten(0, (4, 6))
    assert output.output.shape == (1, 2 * 3, 5)
    cell = torch.cat([normed[2, 2], normed[2, 3], normed[3, 2], normed[3, 3]])
    expected = head.fc2(head.activation(head.fc1(cell)))  # cell row 1, column 1 of 2x3
    assert (output.output[0, 4] - expected).abs().max() < 1e-13


def test_prefix_tokens_stand_in_order(images: torch.Tensor) -> None:
    encoder = tiny_encoder(dist_token=True, registers=2, position="none")
    prefix = encoder.front_end.prefix
    tokens = encoder.front_end(images)
    expected = torch.cat([prefix["cls"], prefix["dist"], prefix["registers"]])
    assert torch.equal(tokens[1, :4], expected)


def test_trailing_pixels_are_dropped() -> None:
    encoder = tiny_encoder()
    images = torch.randn(1, 3, 31, 39, dtype=torch.float64)
    assert torch.equal(encoder(images).tokens, encoder(images[..., :24, :32]).tokens)


def test_windows_are_aligned_to_the_top_left() -> None:
    masks = WindowMask(2, full_blocks=[1])((3, 5), 1, 3, torch.device("cpu"))
    assert masks[1] is None and masks[0] is masks[2]
    mask = masks[0][1:, 1:].unflatten(0, (3, 5))[0, 3].unflatten(0, (3, 5))  # seen by (0, 3)
    expected = torch.zeros(3, 5, dtype=torch.bool)
    expected[0:2, 2:4] = True
    assert torch.equal(mask, expected)
    assert masks[0][0].all() and masks[0][:, 0].all()


def test_dropping_is_off_in_eval_and_grows_with_depth(images: torch.Tensor) -> None:
    dropping = {"dropout": 0.5, "drop_path": 0.4, "attention": {"dropout": 0.5}}
    encoder, plain = tiny_encoder(depth=5, **dropping), tiny_encoder(depth=5)
    assert torch.equal(encoder(images).tokens, plain(images).tokens)
    assert not torch.equal(encoder.train()(images).tokens, plain(images).tokens)
    rates = [block.drop_path.rate for block in encoder.vit.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_drop_path_drops_whole_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    dropped = DropPath(0.25).train()(torch.ones(4000, 2, 3))
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (dropped == dropped[:, :1, :1]).all()
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.04)


def test_fresh_weights_come_from_the_seed() -> None:
    def state(seed: int) -> dict[str, torch.Tensor]:
        return build_encoder(tiny_config(registers=1, pooling="map"), seed).state_dict()

    first, again, other = state(3), state(3), state(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["front_end.prefix.cls"], other["front_end.prefix.cls"])


def test_initialization_schemes() -> None:
    normal = build_encoder(EncoderConfig(depth=1)).state_dict()
    weight = normal["vit.blocks.0.feed_forward.fc1.weight"]
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert normal["vit.blocks.0.attention.qkv.bias"].abs().max() == 0
    assert normal["vit.blocks.0.norm1.weight"].eq(1).all()
    assert normal["front_end.prefix.cls"].std().item() == pytest.approx(0.02, rel=0.1)
    xavier = build_encoder(EncoderConfig(depth=1, init="xavier_uniform")).state_dict()
    bound = (6 / (768 + 3 * 768)) ** 0.5  # as torch.nn.MultiheadAttention's in_proj_weight
    for matrix in xavier["vit.blocks.0.attention.qkv.weight"].chunk(3):
        assert 0.99 * bound < matrix.abs().max().item() <= bound
    patch = xavier["front_end.projection.weight"]
    assert patch.abs().max().item() == pytest.approx((6 / (768 + 768)) ** 0.5, rel=0.01)


def test_layer_points_name_every_layer(images: torch.Tensor) -> None:
    def names(encoder: VisionEncoder) -> list[str]:
        return [name for name, _ in layer_points(encoder)]

    assert names(tiny_encoder()) == ["input", "block 1", "block 2", "norm"]
    assert names(tiny_encoder(norm_placement="post")) == ["input", "block 1", "block 2"]
    encoder = tiny_encoder()
    seen: dict[str, torch.Tensor] = {}
    with hooked(
        (module, lambda x, name=name: seen.update({name: x}))
        for name, module in layer_points(encoder)
    ):
        output = encoder(images)
    assert torch.equal(seen["block 2"], output.tokens_before_norm)
    assert torch.equal(seen["norm"], output.tokens)
    assert torch.equal(seen["input"], encoder.front_end(images))
    assert not any(module._forward_hooks for module in encoder.modules()), "hooks come off"


def test_a_hook_on_the_vit_sees_the_tokens(images: torch.Tensor) -> None:
    encoder = tiny_encoder()
    seen: list[torch.Tensor] = []
    encoder.vit.register_forward_hook(lambda _, __, tokens: seen.append(tokens))
    output = encoder(images)
    assert len(seen) == 1 and torch.equal(seen[0], output.tokens)
    assert torch.equal(encoder.vit.norm(output.tokens_before_norm), output.tokens)
