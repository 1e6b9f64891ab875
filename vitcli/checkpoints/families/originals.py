"""Libraries whose files hold tensors and nothing beside: facebookresearch, torchvision, Google."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vitcli.checkpoints.families import timm
from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.timm import BLOCK, LAYER_SCALE, PACKED_GATE
from vitcli.checkpoints.family import (
    Family,
    From,
    FromTensor,
    Renames,
    Variant,
    block,
    joined,
    no_key_bias,
    rows,
    table_resize,
    transposed,
)
from vitcli.checkpoints.tensors import LazyTensor

# --- facebookresearch DINOv2 and DINOv3
# Pre-training checkpoints keep the backbone beside its heads, and its blocks in chunks.
ALIASES = ((r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),)
DROPS = (r"mask_token", r"(dino|ibot)_head\..*", r".*_loss\..*")
TOKENS: Renames = {
    "front_end.projection": "patch_embed.proj",
    "front_end.prefix.cls": rows("cls_token"),
    **block(BLOCK, norm1="norm1", qkv="attn.qkv", proj="attn.proj", norm2="norm2"),
    **block(BLOCK, fc1="mlp.fc1", fc2="mlp.fc2"),
    **LAYER_SCALE,
    "vit.norm": "norm",
}
SIGNATURE = ("patch_embed.proj.weight", BLOCK + "attn.qkv.weight", BLOCK + "ls1.gamma")


def _dinov2_resize(found: Mapping[str, Any]) -> str:
    """By the registers: DINOv2 has none or four. TIPS v2 has its names, one, and another rule."""
    return {0: "bicubic_offset", 4: "bicubic_antialias"}[found.get("_registers", 0)]


DINOV2 = Family(
    name="dinov2",
    library="facebookresearch dinov2",
    preprocess=processor(None),
    verified="tiny random models of timm under the original's keys; once beside the original",
    signature=(*SIGNATURE, "mask_token", "pos_embed"),
    absent=("decoder_embed.weight", BLOCK + "mlp.c_fc.weight"),
    aliases=ALIASES,
    renames={**TOKENS, "front_end.position.table": rows("pos_embed")},
    drops=DROPS,
    decides={
        "position": "learned",
        "position_table.resize": _dinov2_resize,
        "position_table.resize_dtype": "float32",
        "norm_eps": 1e-6,
        "activation": "gelu",
        "pooling": "cls",
        "head": "none",
        "head_out": None,
    },
    needs=("heads", "position_table.resize"),
    from_tensors={"_registers": FromTensor("register_tokens", lambda t: t.shape[1])},
    variants=(
        PACKED_GATE,
        Variant(
            when=("register_tokens",),
            renames={"front_end.prefix.registers": rows("register_tokens")},
        ),
    ),
)


def _masked(third: int) -> From:
    """The q or v part of a bias whose k part the mask puts to zero."""

    def make(bias: Tensor, mask: Tensor) -> Tensor:
        return (bias * mask).chunk(3)[third]

    return From((BLOCK + "attn.qkv.bias", BLOCK + "attn.qkv.bias_mask"), make)


def _periods(tensor: LazyTensor) -> tuple[float, ...]:
    return tuple(tensor.read().double().tolist())


def _heads(found: Mapping[str, Any]) -> int:
    return int(found["hidden"]) // int(found["_head_width"])


# The published periods are theta's rounded to bfloat16: the original computes with what is
# stored, so that is followed here; transformers and timm make them anew.
DINOV3 = Family(
    name="dinov3",
    library="facebookresearch dinov3",
    preprocess=processor(None),
    verified="tiny random models of timm under the original's keys; once beside the original",
    signature=(*SIGNATURE, "rope_embed.periods"),
    absent=("pos_embed",),
    aliases=ALIASES,
    renames={**TOKENS, "front_end.prefix.registers": rows("storage_tokens")},
    drops=(*DROPS, r"rope_embed\.periods", r"local_cls_norm\..*"),
    decides={
        "position": "rope2d",
        "rope.coordinates": "centered",
        "rope.layout": "half",
        "heads": _heads,
        "norm_eps": 1e-5,
        "activation": "gelu",
        "pooling": "cls",
        "head": "none",
        "head_out": None,
    },
    needs=("heads",),
    from_tensors={
        "rope.periods": FromTensor("rope_embed.periods", _periods),
        "_head_width": FromTensor("rope_embed.periods", lambda t: 4 * t.shape[0]),
    },
    variants=(
        Variant(
            when=(BLOCK + "mlp.w1.weight",),
            settings={"activation": "silu"},
            renames=block(BLOCK, fc1=("mlp.w1", "mlp.w2"), fc2="mlp.w3"),
        ),
        Variant(
            when=(BLOCK + "attn.qkv.bias_mask",),
            renames=no_key_bias(BLOCK + "attn.qkv.weight", _masked(0), _masked(2)),
        ),
    ),
)

# --- facebookresearch DeiT, MAE and I-JEPA, by timm's names
# Their code resizes the table, when it loads one for another size, without antialiasing.
VIT = Family(
    name="original-vit",
    library="facebookresearch deit, mae, ijepa",
    preprocess=processor(None),
    verified="tiny random models of timm under the originals' keys; once beside them",
    signature=timm.SIGNATURE,
    absent=timm.ABSENT,
    wrappers=("model", "encoder"),
    renames={**timm.RENAMES, **timm.QKV, **LAYER_SCALE},
    drops=(r"decoder_.*", r"mask_token"),
    decides=table_resize("bicubic", "model"),
    needs=timm.NEEDS,
    unproven=("position",),
    any_prefix_rows=True,
    variants=(*timm.VARIANTS, timm.GAMMA_SCALES),
)

# --- torchvision
TV_BLOCK = "encoder.layers.encoder_layer_{i}."
TORCHVISION = Family(
    name="torchvision-vit",
    library="torchvision",
    preprocess=processor(None),
    verified="tiny random models, from state dicts",
    signature=("conv_proj.weight", "class_token", TV_BLOCK + "self_attention.in_proj_weight"),
    aliases=((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
    renames={
        "front_end.projection": "conv_proj",
        "front_end.prefix.cls": rows("class_token"),
        "front_end.position.table": rows("encoder.pos_embedding"),
        **block(TV_BLOCK, norm1="ln_1", proj="self_attention.out_proj", norm2="ln_2"),
        **block(TV_BLOCK, fc1="mlp.0", fc2="mlp.3"),
        "vit.blocks.{i}.attention.qkv.weight": TV_BLOCK + "self_attention.in_proj_weight",
        "vit.blocks.{i}.attention.qkv.bias": TV_BLOCK + "self_attention.in_proj_bias",
        "vit.norm": "encoder.ln",
        "head.pre_logits": "heads.pre_logits",
        "head.linear": "heads.head",
    },
    decides={
        "position": "learned",
        **table_resize("bicubic_align_corners", "model"),
        "norm_eps": 1e-6,
        "activation": "gelu",
        "pooling": "cls",
    },
    needs=("heads",),
    variants=(
        Variant(unless=("heads.head",), settings={"head": "none", "head_out": None}),
        Variant(when=("heads.head",), unless=("heads.pre_logits",), settings={"head": "linear"}),
        Variant(when=("heads.head", "heads.pre_logits"), settings={"head": "tanh_linear"}),
    ),
)

# --- Google
FLAX_BLOCK = "Transformer/encoderblock_{i}/"
ATTENTION = "MultiHeadDotProductAttention_0/"
# Parameters are spelled as torch's, block parts as big_vision numbers them.
FLAX_ALIASES = (
    (r"/(kernel|scale)$", ".weight"),
    (r"/bias$", ".bias"),
    (r"^Transformer/posembed_input/pos_embedding$", "pos_embedding"),
    (r"^(Transformer/encoderblock_\d+/)MultiHeadDotProductAttention_1/", rf"\1{ATTENTION}"),
    (r"^(Transformer/encoderblock_\d+/)LayerNorm_2\.", r"\1LayerNorm_1."),
    (r"^(Transformer/encoderblock_\d+/)MlpBlock_3/", r"\1MlpBlock_0/"),
)


def _in(kernel: Tensor) -> Tensor:
    """(D, heads, head width) as (heads * head width, D)."""
    return kernel.reshape(kernel.shape[0], -1).T


def _out(kernel: Tensor) -> Tensor:
    """(heads, head width, D) as (D, heads * head width)."""
    return kernel.reshape(-1, kernel.shape[-1]).T


def _flat(bias: Tensor) -> Tensor:
    return bias.reshape(-1)


def _joined(each: Callable[[Tensor], Tensor], *sources: str) -> From:
    return From(sources, lambda *parts: joined(*map(each, parts)))


def _attention(
    target: str, source: str, groups: tuple[tuple[str, tuple[str, ...]], ...]
) -> Renames:
    """A flax attention's projections, joined as `groups` says, and the one after it."""
    renames: dict[str, str | From | None] = {
        target + "proj.weight": _joined(_out, source + "out.weight"),
        target + "proj.bias": source + "out.bias",
    }
    for name, parts in groups:
        renames[f"{target}{name}.weight"] = _joined(_in, *(f"{source}{p}.weight" for p in parts))
        renames[f"{target}{name}.bias"] = _joined(_flat, *(f"{source}{p}.bias" for p in parts))
    return renames


def _dense(target: str, source: str) -> Renames:
    return {target + ".weight": transposed(source + ".weight"), target + ".bias": source + ".bias"}


GOOGLE = Family(
    name="google-vit",
    library="google-research vision_transformer, big_vision",
    preprocess=processor(None),
    verified="tiny random models of timm as flax parameters; once beside the originals",
    signature=(
        "embedding.weight",
        FLAX_BLOCK + ATTENTION + "query.weight",
        FLAX_BLOCK + "LayerNorm_0.weight",
    ),
    prefixes=("", "opt/target/", "params/", "params/img/", "img/"),
    aliases=FLAX_ALIASES,
    renames={
        "front_end.projection.weight": From(
            ("embedding.weight",), lambda kernel: kernel.permute(3, 2, 0, 1)
        ),
        "front_end.projection.bias": "embedding.bias",
        "front_end.prefix.cls": rows("cls"),
        "front_end.position.table": rows("pos_embedding"),
        **block(FLAX_BLOCK, norm1="LayerNorm_0", norm2="LayerNorm_1"),
        **_attention(
            "vit.blocks.{i}.attention.",
            FLAX_BLOCK + ATTENTION,
            (("qkv", ("query", "key", "value")),),
        ),
        **_dense("vit.blocks.{i}.feed_forward.fc1", FLAX_BLOCK + "MlpBlock_0/Dense_0"),
        **_dense("vit.blocks.{i}.feed_forward.fc2", FLAX_BLOCK + "MlpBlock_0/Dense_1"),
        "vit.norm": "Transformer/encoder_norm",
        "pooling.probe": rows("MAPHead_0/probe"),
        **_attention(
            "pooling.", "MAPHead_0/" + ATTENTION, (("q", ("query",)), ("kv", ("key", "value")))
        ),
        "pooling.norm": "MAPHead_0/LayerNorm_0",
        **_dense("pooling.feed_forward.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
        **_dense("pooling.feed_forward.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
    },
    drops=(r"(params/)?txt/.*", r"(params/)?[tb]", r"opt/state/.*"),
    # flax's gelu is the tanh approximation unless found otherwise; timm and transformers read the
    # same files with the exact one.
    decides={
        "position": "learned",
        **table_resize("bilinear_align_corners", "model"),
        "norm_eps": 1e-6,
        "activation": "gelu_tanh",
    },
    needs=("heads", "pooling"),
    from_tensors={
        "heads": FromTensor(FLAX_BLOCK + ATTENTION + "query.weight", lambda t: t.shape[1])
    },
    any_prefix_rows=True,
    variants=(
        Variant(when=("cls",), unless=("MAPHead_0/probe",), settings={"pooling": "cls"}),
        Variant(unless=("cls", "MAPHead_0/probe"), settings={"pooling": "mean"}),
        Variant(
            unless=("pre_logits.weight", "head.weight"), settings={"head": "none", "head_out": None}
        ),
        Variant(
            when=("head.weight",),
            settings={"head": "linear"},
            renames=_dense("head.linear", "head"),
        ),
        Variant(
            when=("pre_logits.weight",),
            unless=("head.weight",),
            settings={"head": "tanh", "head_out": None},
            renames=_dense("head.linear", "pre_logits"),
        ),
        Variant(
            when=("pre_logits.weight", "head.weight"),
            settings={"head": "tanh_linear"},
            renames=_dense("head.pre_logits", "pre_logits"),
        ),
    ),
)
FAMILIES = (GOOGLE, TORCHVISION, DINOV3, DINOV2)
