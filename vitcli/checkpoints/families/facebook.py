"""DINOv2 and DINOv3 as their authors store them: a state dict and nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitcli.checkpoints.families import timm
from vitcli.checkpoints.family import Family, From, Renames, Tell, Variant, fused, rows
from vitcli.checkpoints.tensors import LazyTensor

# Pre-training checkpoints keep the backbone beside its heads, and its blocks in chunks.
PREFIXES = ("", "backbone.")
ALIASES = ((r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),)
DROPS = (r"mask_token", r"(dino|ibot)_head\..*", r".*_loss\..*")
BLOCK = timm.BLOCK
TOKENS: Renames = {
    "front_end.projection": "patch_embed.proj",
    "front_end.prefix.cls": rows("cls_token"),
    "vit.blocks.{i}.norm1": BLOCK + "norm1",
    "vit.blocks.{i}.attention.qkv": BLOCK + "attn.qkv",
    "vit.blocks.{i}.attention.proj": BLOCK + "attn.proj",
    **timm.LAYER_SCALE,
    "vit.blocks.{i}.norm2": BLOCK + "norm2",
    "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.fc1",
    "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.fc2",
    "vit.norm": "norm",
}
SIGNATURE = ("patch_embed.proj.weight", BLOCK + "attn.qkv.weight", BLOCK + "ls1.gamma")

DINOV2 = Family(
    name="dinov2",
    library="facebookresearch dinov2",
    verified="tiny random models of timm under the original's keys; once beside the original",
    signature=(*SIGNATURE, "mask_token", "pos_embed"),
    absent=("decoder_embed.weight",),
    prefixes=PREFIXES,
    aliases=ALIASES,
    renames={**TOKENS, "front_end.position.table": rows("pos_embed")},
    drops=DROPS,
    fixed={
        "position": "learned",
        "position_table.resize": "bicubic_offset",
        "position_table.resize_dtype": "float32",
        "norm_eps": 1e-6,
        "activation": "gelu",
        "pooling": "cls",
        "head": "none",
        "head_out": None,
    },
    needs=("heads",),
    variants=(
        # The first half of w12 is the gate.
        Variant(
            when=(BLOCK + "mlp.w12.weight",),
            settings={"activation": "silu"},
            renames={
                "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.w12",
                "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.w3",
            },
        ),
        Variant(
            when=("register_tokens",),
            settings={"position_table.resize": "bicubic_antialias"},
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


def _heads(told: Mapping[str, Any]) -> int:
    return int(told["hidden"]) // int(told["_head_width"])


# The published periods are theta's rounded to bfloat16: the original computes with what is
# stored, so that is followed here; transformers and timm make them anew.
DINOV3 = Family(
    name="dinov3",
    library="facebookresearch dinov3",
    verified="tiny random models of timm under the original's keys; once beside the original",
    signature=(*SIGNATURE, "rope_embed.periods"),
    absent=("pos_embed",),
    prefixes=PREFIXES,
    aliases=ALIASES,
    renames={**TOKENS, "front_end.prefix.registers": rows("storage_tokens")},
    drops=(*DROPS, r"rope_embed\.periods", r"local_cls_norm\..*"),
    fixed={
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
    tells={
        "rope.periods": Tell("rope_embed.periods", _periods),
        "_head_width": Tell("rope_embed.periods", lambda t: 4 * t.shape[0]),
    },
    variants=(
        Variant(
            when=(BLOCK + "mlp.w1.weight",),
            settings={"activation": "silu"},
            renames={
                "vit.blocks.{i}.feed_forward.fc1": fused(BLOCK + "mlp.w1", BLOCK + "mlp.w2"),
                "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.w3",
            },
        ),
        Variant(
            when=(BLOCK + "attn.qkv.bias_mask",),
            renames={
                "vit.blocks.{i}.attention.qkv": None,
                "vit.blocks.{i}.attention.qkv.weight": BLOCK + "attn.qkv.weight",
                "vit.blocks.{i}.attention.qkv.q_bias": _masked(0),
                "vit.blocks.{i}.attention.qkv.v_bias": _masked(2),
            },
        ),
    ),
)
FAMILIES = (DINOV3, DINOV2)
