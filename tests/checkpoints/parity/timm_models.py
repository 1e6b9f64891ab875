"""Tiny random models of timm, and what they give."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import timm
from torch import Tensor, nn

from tests.checkpoints.parity.compare import EXACT, FLOAT32_PARTS, Outputs

SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
}
ANY_SIZE = ((32, 32), (40, 40), (48, 24))
NATIVE = ANY_SIZE[:1]


@dataclass(frozen=True)
class Case:
    """A timm architecture made tiny by `arguments`."""

    family: str
    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    tolerance: float = EXACT
    sizes: tuple[tuple[int, int], ...] = ANY_SIZE

    def make(self, **more: Any) -> nn.Module:
        return timm.create_model(self.architecture, **(SMALL | self.arguments | more))


def _at(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """A model of one size only, set to another as timm does."""
    if model.patch_embed.strict_img_size and tuple(model.patch_embed.img_size) != size:
        model = copy.deepcopy(model)
        model.set_input_size(size)
    return model


def qwen3(model: nn.Module, pixels: Tensor) -> Outputs:
    """The encoder alone, whose tokens have rows and columns."""
    seen: list[Tensor] = []
    hooks = [
        model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])),
        *(b.register_forward_hook(lambda _, __, out: seen.append(out)) for b in model.blocks),
    ]
    tokens = model.forward_features(pixels).flatten(1, 2)
    for hook in hooks:
        hook.remove()
    return Outputs(seen, seen[-1], tokens, None, model(pixels))


def outputs(model: nn.Module, pixels: Tensor) -> Outputs:
    """The tokens into the first block and out of each, then what the model makes of them."""
    if hasattr(model, "merger"):
        return qwen3(model, pixels)
    model = _at(model, tuple(pixels.shape[-2:]))
    seen: list[Tensor] = []
    hooks = [
        model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])),
        *(b.register_forward_hook(lambda _, __, out: seen.append(out)) for b in model.blocks),
    ]
    tokens = model.forward_features(pixels)
    for hook in hooks:
        hook.remove()
    unpooled = hasattr(model, "head_dist") or model.global_pool == ""
    pooled = None if unpooled else model.forward_head(tokens, pre_logits=True)
    has_head = isinstance(model.head, nn.Linear)
    output = model.forward_head(tokens) if has_head else None
    return Outputs(seen, seen[-1], tokens, pooled, output)


def _vit(architecture: str, tolerance: float = EXACT, **arguments: Any) -> Case:
    return Case("timm-vit", architecture, {"dynamic_img_size": True, **arguments}, tolerance)


def _rope(architecture: str, **arguments: Any) -> Case:
    return Case("timm-eva-rope", architecture, arguments, FLOAT32_PARTS)


def _eva02(family: str, architecture: str, **arguments: Any) -> Case:
    return Case(family, architecture, {"dynamic_img_size": True, **arguments}, FLOAT32_PARTS)


def _mixed(family: str, architecture: str) -> Case:
    return Case(family, architecture, {"dynamic_img_size": True}, FLOAT32_PARTS)


def _biased(
    family: str,
    architecture: str,
    sizes: tuple[tuple[int, int], ...] = ANY_SIZE,
    **arguments: Any,
) -> Case:
    return Case(family, architecture, arguments, FLOAT32_PARTS, sizes)


def _pe(architecture: str, **arguments: Any) -> Case:
    heads = {"num_heads": 2, "embed_dim": 32, "ref_feat_shape": (3, 5)}
    given = {"dynamic_img_size": True, **heads, **arguments}
    return Case("timm-pe", architecture, given, FLOAT32_PARTS)


def _by_name(*cases: Case) -> dict[str, Case]:
    return {" ".join([c.architecture, *map(str, c.arguments)]): c for c in cases}


# timm resizes tables in float32: at other sizes that is the limit.
CASES: dict[str, Case] = _by_name(
    _vit("vit_base_patch16_224", FLOAT32_PARTS),
    Case("timm-vit", "vit_base_patch16_224", sizes=NATIVE),
    Case("timm-vit", "vit_base_patch16_224", {"img_size": (32, 48)}, sizes=((32, 48),)),
    _vit("vit_base_patch16_224", FLOAT32_PARTS, num_classes=0, global_pool="avg"),
    _vit("vit_base_patch16_224", FLOAT32_PARTS, qk_norm=True, act_layer="gelu_tanh"),
    _vit("vit_base_patch16_224", FLOAT32_PARTS, norm_layer="rmsnorm", qk_norm=True),
    _vit("vit_base_patch16_224", FLOAT32_PARTS, global_pool="", num_classes=0),
    _vit("vit_base_patch16_clip_224", FLOAT32_PARTS, qk_norm=True, fc_norm=True),
    _vit("vit_base_patch16_224", pos_embed="none"),
    _vit("vit_base_patch16_224_miil", FLOAT32_PARTS),
    _vit("deit_base_distilled_patch16_224", FLOAT32_PARTS),
    _vit("deit3_base_patch16_224", FLOAT32_PARTS),
    _vit("vit_base_patch16_clip_224", FLOAT32_PARTS),
    _vit("vit_base_patch16_clip_quickgelu_224", FLOAT32_PARTS),
    _vit("vit_base_patch16_siglip_224", FLOAT32_PARTS, num_classes=0),
    _vit("vit_base_patch32_siglip_256", FLOAT32_PARTS, num_classes=0),
    _vit("vit_base_patch16_siglip_gap_224", FLOAT32_PARTS),
    _vit("vit_base_patch14_dinov2", FLOAT32_PARTS, num_classes=0),
    _vit("vit_base_patch14_reg4_dinov2", FLOAT32_PARTS, num_classes=0),
    _vit("vit_giant_patch14_reg4_dinov2", FLOAT32_PARTS, mlp_ratio=4, num_classes=0),
    _vit("vit_base_patch16_reg4_gap_256", FLOAT32_PARTS),
    _vit("vit_so150m_patch16_reg4_gap_256", FLOAT32_PARTS),
    _vit("vit_so150m_patch16_reg4_map_256", FLOAT32_PARTS),
    _vit("vit_intern300m_patch14_448", FLOAT32_PARTS, num_classes=0),
    _vit("vit_medium_patch16_gap_256", FLOAT32_PARTS),
    _vit("aimv2_large_patch14_224", FLOAT32_PARTS, num_classes=0),
    _vit("aimv2_huge_patch14_336", FLOAT32_PARTS),
    _rope("vit_base_patch16_dinov3", num_classes=0),
    _rope("vit_base_patch16_dinov3", num_classes=0, global_pool="token"),
    _rope("vit_base_patch16_dinov3_qkvb"),
    _rope("vit_huge_plus_patch16_dinov3_qkvb", mlp_ratio=3),
    _rope("vit_base_patch16_rope_reg1_gap_256", dynamic_img_size=True),
    _rope("vit_large_patch16_lingbot"),
    _rope("vit_base_patch16_rope_224", dynamic_img_size=True),
    Case(
        "timm-eva-rope-table",
        "vit_base_patch16_rope_ape_224",
        {"dynamic_img_size": True},
        FLOAT32_PARTS,
    ),
    _pe("vit_pe_core_base_patch16_224"),
    _pe("vit_pe_core_gigantic_patch14_448", mlp_ratio=3, attn_pool_mlp_ratio=2, num_classes=0),
    _pe("vit_pe_lang_large_patch14_448", num_classes=0),
    _pe("vit_pe_lang_gigantic_patch14_448", num_classes=0, global_pool=""),
    _pe("vit_pe_spatial_base_patch16_512"),
    Case("timm-eva", "eva_giant_patch14_224", {"dynamic_img_size": True}, FLOAT32_PARTS),
    _eva02("timm-eva", "eva02_tiny_patch14_224"),
    _eva02("timm-eva02", "eva02_base_patch14_224"),
    _eva02("timm-eva02", "eva02_large_patch14_448", ref_feat_shape=(6, 5), num_classes=0),
    _eva02("timm-eva02", "eva02_base_patch16_clip_224"),
    _mixed("timm-eva-rope-mixed", "vit_small_patch16_rope_mixed_224"),
    _mixed("timm-eva-rope-mixed-table", "vit_small_patch16_rope_mixed_ape_224"),
    _biased("timm-beit", "beit_base_patch16_224"),
    _biased(
        "timm-beit",
        "beitv2_large_patch16_224",
        ((32, 48), (40, 40), (16, 24)),
        num_classes=0,
        global_pool="token",
        img_size=(32, 48),
    ),
    _biased(
        "timm-beit",
        "beit_large_patch16_512",
        swiglu_mlp=True,
        scale_mlp=True,
        init_values=None,
    ),
    _biased("timm-relpos", "vit_relpos_base_patch16_224", rel_pos_type="bias"),
    _biased(
        "timm-relpos",
        "vit_relpos_medium_patch16_cls_224",
        rel_pos_type="bias",
        qk_norm=True,
    ),
    _biased(
        "timm-qwen3",
        "qwen3_vit_88m_enc",
        ((32, 32), (48, 32), (64, 96)),
        out_features=24,
        mlp_ratio=2.5,
        pos_embed_grid_size=4,
    ),
    # The parts that deepghs' taggers have: registers and no table, no norm within the MLP.
    _eva02(
        "timm-eva02",
        "eva02_large_patch14_448",
        scale_mlp=False,
        use_abs_pos_emb=False,
        class_token=False,
        num_reg_tokens=2,
    ),
)
