"""The arithmetic of `vitcli params` against the modules themselves and torch's own counter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vitcli
from vitcli.build import build_encoder, build_meta
from vitcli.checkpoints.weights import save_snapshot
from vitcli.commands.params import analysis as components
from vitcli.commands.params.analysis import COMPONENTS, Cost, component_costs, model_costs
from vitcli.config.attention_variants import POSITIONS
from vitcli.config.request import load_config, preset_names
from vitcli.config.schema import AttentionConfig, EncoderConfig, ModelConfig, TableConfig
from vitcli.errors import VitcliError
from vitcli.nn.encoder import VisionEncoder

# Where each component lives in the module tree; `*` is any block. The longest match wins.
PLACES = {
    "front_end.projection": components.PATCH_EMBEDDING,
    "front_end.patch_norm": components.PATCH_EMBEDDING,
    "front_end.prefix": components.PREFIX_TOKENS,
    "front_end.position": components.POSITIONS,
    "front_end.norm": components.LN_PRE,
    "vit.blocks.*.norm1": components.NORMS,
    "vit.blocks.*.norm2": components.NORMS,
    "vit.blocks.*.attention.norm": components.NORMS,
    "vit.blocks.*.attention.qkv": components.QKV,
    "vit.blocks.*.attention.q_norm": components.QK_NORM,
    "vit.blocks.*.attention.k_norm": components.QK_NORM,
    "vit.blocks.*.attention.proj": components.OUTPUT_PROJECTION,
    "vit.blocks.*.attention": components.ATTENTION_PRODUCTS,
    "vit.blocks.*.feed_forward": components.FFN,
    "vit.blocks.*.scale1": components.LAYER_SCALE,
    "vit.blocks.*.scale2": components.LAYER_SCALE,
    "vit.norm": components.FINAL_NORM,
    "pooling": components.POOLING,
    "pool_norm": components.POOLING,
    "head": components.HEAD,
    "deepstack": components.HEAD,
}


def component_at(path: str) -> str | None:
    words = ["*" if word.isdecimal() else word for word in path.split(".")]
    for end in range(len(words), 0, -1):
        if name := PLACES.get(".".join(words[:end])):
            return name
    return None


def preset(name: str) -> EncoderConfig:
    return load_config(ModelConfig, preset=name).encoder


def parameters_by_component(config: EncoderConfig) -> dict[str, Cost]:
    """(parameters, biases) of each component of the module itself."""
    found = dict.fromkeys(COMPONENTS, Cost())
    for path, parameter in build_meta(config).named_parameters():
        name = component_at(path)
        assert name is not None, path
        count = parameter.numel()
        found[name] += Cost(count, count if path.endswith("bias") else 0)
    return found


def macs_by_component(encoder: VisionEncoder, images: torch.Tensor) -> Counter[str]:
    """Half of the operations that torch counts while images go through, by component."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():
        encoder.requires_grad_(False)(images)
    flops = {path: sum(ops.values()) for path, ops in counter.get_flop_counts().items()}
    own = Counter(flops)
    for path, count in flops.items():  # a module's count includes that of the modules in it
        ends = [end for end, letter in enumerate(path) if letter == "."]
        parents = [path[:end] for end in ends if path[:end] in flops]
        if parents:
            own[parents[-1]] -= count
    found: Counter[str] = Counter()
    for path, count in own.items():
        if path != "Global" and count:
            name = component_at(path.removeprefix("VisionEncoder."))
            assert name is not None, path
            found[name] += count // 2
    assert sum(found.values()) * 2 == counter.get_total_flops()
    return found


def check_parameters(config: EncoderConfig) -> None:
    ours = {
        cost.name: Cost(cost.total.parameters, cost.total.biases)
        for cost in component_costs(config)
    }
    assert ours == parameters_by_component(config)


def check_macs(config: EncoderConfig, size: tuple[int, int], encoder: VisionEncoder) -> None:
    device = next(encoder.parameters()).device
    counted = macs_by_component(encoder, torch.zeros(1, config.channels, *size, device=device))
    ours = {cost.name: cost.total.macs for cost in component_costs(config, size)}
    if config.attention.mask not in ("none", "causal"):
        # torch multiplies the whole and masks it; what the masks let through is counted here.
        counted[components.ATTENTION_PRODUCTS] = 2 * config.hidden * visible_pairs(encoder, size)
    assert {name: macs for name, macs in ours.items() if macs} == counted


def visible_pairs(encoder: VisionEncoder, size: tuple[int, int]) -> int:
    """Pairs of tokens that see each other, over all blocks, from the masks themselves."""
    images = torch.zeros(1, encoder.front_end.projection.in_channels, *size)
    grid, tokens = encoder.front_end.grid(images), encoder.front_end(images)
    masks = encoder.block_masks(grid, tokens)
    whole = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    seen = [whole if m is None else m if m.dtype == torch.bool else m > -torch.inf for m in masks]
    return sum(int((m[0] if m.ndim > 2 else m).sum()) for m in seen)  # the same for every head


@st.composite
def encoder_configs(draw: st.DrawFn) -> EncoderConfig:
    """Any small encoder that the schema allows."""
    heads = draw(st.integers(1, 3))
    hidden = heads * 4 * draw(st.integers(1, 3))
    depth = draw(st.integers(1, 3))
    patch = draw(st.integers(1, 5))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    cls, dist = draw(st.booleans()), draw(st.booleans())
    registers = draw(st.integers(0, 3))
    pooling = draw(st.sampled_from(["cls", "mean", "cls+mean", "map", "none"]))
    pooled = ("linear", "tanh", "tanh_linear", "projection")
    head = draw(st.sampled_from(["none", *pooled, "distilled", "merger"]))
    mask = draw(st.sampled_from(["none", "causal", "window", "neighborhood"]))
    over = draw(st.sampled_from(["tokens", "tokens", "channels"])) if mask == "none" else "tokens"
    position = draw(st.sampled_from(list(POSITIONS)))
    assume(over == "tokens" or not POSITIONS[position].acts_on_pairs)
    prefix_rows = draw(st.none() | st.integers(0, int(cls) + int(dist) + registers))
    assume(cls or pooling not in ("cls", "cls+mean"))
    assume(pooling != "none" or head not in pooled)
    assume(head != "distilled" or (cls and dist))
    assume(head != "merger" or (rows % 2 == 0 and columns % 2 == 0))
    with_width = head not in ("none", "tanh")
    return EncoderConfig(
        # Pixels beyond the last whole patch are dropped.
        image_size=(rows * patch + draw(st.integers(0, patch - 1)), columns * patch),
        patch_size=patch,
        channels=draw(st.integers(1, 4)),
        hidden=hidden,
        depth=depth,
        heads=heads,
        mlp_hidden=draw(st.integers(1, 20)),
        patch_bias=draw(st.booleans()),
        patch_norm=draw(st.booleans()),
        cls_token=cls,
        dist_token=dist,
        registers=registers,
        position=position,
        position_table=TableConfig(prefix_rows=prefix_rows),
        ln_pre=draw(st.booleans()),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        norm_placement=draw(st.sampled_from(["pre", "post"])),
        final_norm=draw(st.sampled_from([None, True, False])),
        attention=AttentionConfig(
            mask=mask,
            over=over,
            window=3 if mask == "window" else None,
            shift=draw(st.sampled_from([None, 1, 2])) if mask == "window" else None,
            full_blocks=draw(st.sampled_from([(), (1,)])) if mask == "window" else (),
            neighbors=draw(st.integers(1, 20)) if mask == "neighborhood" else None,
            qkv_bias=draw(st.sampled_from(["qkv", "qv", "none"])),
            qk_norm=draw(st.sampled_from(["none", "width", "head"])),
            qk_norm_kind=draw(st.sampled_from(["layernorm", "rmsnorm"])),
            attend=draw(st.sampled_from(["fused", "explicit"])),
            inner_norm=draw(st.booleans()),
            proj_bias=draw(st.booleans()),
        ),
        mlp_bias=draw(st.booleans()),
        mlp_norm=draw(st.booleans()),
        mlp=draw(st.sampled_from(["plain", "gated"])),
        layer_scale=draw(st.sampled_from([None, 0.1])),
        pooling=pooling,
        pool_heads=draw(st.sampled_from([None, 1])) if pooling in ("map", "query") else None,
        pool_prefix=draw(st.booleans()) if pooling == "map" else False,
        pool_mlp_hidden=draw(st.sampled_from([None, 7])) if pooling == "map" else None,
        pool_norm=pooling != "none" and draw(st.booleans()),
        head=head,
        head_out=draw(st.integers(1, 9)) if with_width else None,
    )


ANY = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@settings(ANY, max_examples=100)
@given(encoder_configs())
def test_parameters_of_any_encoder_equal_the_modules(config: EncoderConfig) -> None:
    check_parameters(config)


@settings(ANY, max_examples=40)
@given(encoder_configs(), st.integers(1, 2), st.integers(1, 2))
def test_macs_of_any_encoder_equal_torchs_counter(
    config: EncoderConfig, taller: int, wider: int
) -> None:
    """At the native size and at a multiple of it, by component."""
    rows, columns = config.grid
    spare = config.image_size[0] % config.patch_size  # pixels that no patch reads
    size = (rows * taller * config.patch_size + spare, columns * wider * config.patch_size)
    check_macs(config, size, build_encoder(config))


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_a_preset_equal_the_modules(name: str) -> None:
    check_parameters(preset(name))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit-b16", (224, 224)),
        ("clip-l14-336", (336, 336)),
        ("siglip-so400m14-384", (384, 384)),
        ("dinov2-s14-reg", (224, 448)),
        ("dinov3-s16plus", (224, 224)),
        ("qwen2-vl-7b", (448, 224)),
    ],
)
def test_macs_of_a_preset_equal_torchs_counter(name: str, size: tuple[int, int]) -> None:
    config = preset(name)
    check_macs(config, size, build_meta(config))


def test_windows_cost_what_the_library_computes_in_them() -> None:
    """transformers' Qwen2.5-VL attends window by window; torch's counter sees its products."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VisionTransformerPretrainedModel,
    )

    depth, hidden, heads = 3, 32, 2
    theirs = Qwen2_5_VisionTransformerPretrainedModel._from_config(
        Qwen2_5_VLVisionConfig(
            depth=depth,
            hidden_size=hidden,
            num_heads=heads,
            intermediate_size=48,
            out_hidden_size=16,
            window_size=112,
            fullatt_block_indexes=[1],
        ),
        attn_implementation="sdpa",
    )
    rows, columns = 22, 30  # windows of 8 patches, cut at the right and at the bottom
    pixels = torch.zeros(rows * columns, 3 * 2 * 14 * 14)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():
        theirs(pixels, grid_thw=torch.tensor([[1, rows, columns]]))
    products = sum(
        flops for op, flops in counter.get_flop_counts()["Global"].items() if "bmm" in str(op)
    )
    config = preset("qwen2.5-vl-7b").model_copy(
        update={"depth": depth, "hidden": hidden, "heads": heads}
    )
    attention = config.attention.model_copy(update={"full_blocks": (2,)})
    costs = component_costs(
        config.model_copy(update={"attention": attention}), (rows * 14, columns * 14)
    )
    ours = {cost.name: cost for cost in costs}[components.ATTENTION_PRODUCTS]
    assert 2 * ours.total.macs == products
    assert ours.each[0].macs == ours.each[2].macs < ours.each[1].macs == 2 * 660**2 * hidden


def test_the_lessons_table() -> None:
    """ViT-B/16 with D = 768: 3D^2, D^2, 8D^2 without biases; the lesson rounds."""
    costs = model_costs(load_config(ModelConfig, preset="vit-b16"))
    weights = {
        part.name: part.parameters_per_copy - part.biases_per_copy for part in costs.components
    }
    assert weights["qkv"] == 3 * 768**2 == 1_769_472
    assert weights["output projection"] == 768**2 == 589_824
    assert weights["FFN"] == 8 * 768**2 == 4_718_592
    assert costs.block_parameters - costs.block_biases == 12 * 768**2 + 2 * 768
    assert costs.total == 85_798_656
    # One block of 197 tokens: 12 D^2 for each token, and 2 D for each pair of tokens.
    assert costs.block_macs == 197 * 12 * 768**2 + 2 * 197**2 * 768
    assert costs.macs_per_image == 12 * costs.block_macs + 196 * 768 * 768


def test_published_operations() -> None:
    """The GFLOPs (multiply-accumulates) of table 2 of DeiT III (Touvron et al. 2022)."""
    published = {"vit-s16": 4.6, "vit-b16": 17.5, "vit-l16": 61.6, "vit-h14": 167.4}
    published |= {"vit-b16-384": 55.5, "vit-l16-384": 191.2}
    for name, giga in published.items():
        macs = sum(cost.total.macs for cost in component_costs(preset(name)))
        assert macs / 1e9 == pytest.approx(giga, rel=5e-3), name


@pytest.mark.parametrize("name", ["clip-b16", "siglip-b16-224", "internvit-6b", "qwen2-vl-2b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_components_sum_to_the_total(name: str, dtype: str) -> None:
    costs = model_costs(load_config(ModelConfig, preset=name), dtype=dtype)
    assert [part.name for part in costs.components] == list(COMPONENTS)

    def summed(field: str) -> Any:
        return sum(getattr(part, field) for part in costs.components)

    assert summed("parameters") == costs.total
    assert summed("biases") == costs.biases
    assert summed("bytes") == costs.bytes == costs.total * (4 if dtype == "float32" else 2)
    assert summed("macs") == costs.macs_per_image
    assert summed("share") == pytest.approx(1, abs=1e-12)
    assert summed("macs_share") == pytest.approx(1, abs=1e-12)
    for part in costs.components:
        assert part.parameters == part.copies * part.parameters_per_copy
        assert part.macs == part.copies * part.macs_per_copy


def test_another_image_size_moves_the_operations_and_not_the_parameters() -> None:
    config = load_config(ModelConfig, preset="vit-b16")
    native, larger = model_costs(config), model_costs(config, (384, 512))
    assert larger.total == native.total
    assert larger.tokens == 1 + 24 * 32
    assert larger.image_size == (384, 512)
    products = [
        next(p.macs for p in costs.components if p.name == "attention products")
        for costs in (native, larger)
    ]
    assert products[1] * 197**2 == products[0] * 769**2  # quadratic in the tokens


def test_the_size_is_the_input_and_the_native_size_is_named() -> None:
    """DINOv2's table is made for 518 px and its preprocessing gives 224, which `encode` reads."""
    costs = vitcli.params("dinov2-s14").models[0]
    assert (costs.image_size, costs.native_size) == ((224, 224), (518, 518))
    assert costs.tokens == 1 + 16 * 16
    assert costs.macs_per_image / 1e9 == pytest.approx(6.1, abs=0.05)
    native = vitcli.params("dinov2-s14", image_size=518).models[0]
    assert native.total == costs.total
    assert native.macs_per_image / 1e9 == pytest.approx(46.7, abs=0.05)
    assert load_config(ModelConfig, "dinov2-s14").input_size == (224, 224)
    assert vitcli.load("dinov2-s14").input_size == (224, 224)


def test_params_takes_what_load_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: vit-ti16\nencoder: {depth: 2, registers: 1}\n")
    model = vitcli.load(file, image_size=(64, 48))
    save_snapshot(tmp_path / "saved", model.config, model.encoder)
    named = vitcli.params("vit-ti16", file, model, load_config(ModelConfig, "vit-ti16"))
    assert [m.tokens for m in named.models] == [197, 198, 2 + 12, 197]
    assert named.models[1].total == named.models[2].total == model.parameters
    saved = vitcli.params(tmp_path / "saved").models[0]
    assert (saved.total, saved.image_size) == (model.parameters, (64, 48))
    with pytest.raises(VitcliError, match="vit-s61") as refused:
        vitcli.params("vit-s61")
    assert "vit-s16" in refused.value.hint
    with pytest.raises(VitcliError, match="no model is given"):
        vitcli.params()


def test_refusals_say_what_to_do() -> None:
    vit = load_config(ModelConfig, preset="vit-b16")
    with pytest.raises(VitcliError, match="8x8 px is smaller than a patch of 16 px"):
        model_costs(vit, (8, 8))
    with pytest.raises(VitcliError, match="16x15 patches, but the merger") as refused:
        model_costs(load_config(ModelConfig, preset="qwen2-vl-7b"), (224, 210))
    assert "multiple of 28" in refused.value.hint
    with pytest.raises(VitcliError, match="--dtype int3: unknown"):
        model_costs(vit, dtype="int3")
