"""The vision towers of Qwen2-VL, 2.5 and 3 as transformers stores them, on still images.

Tokens stay in raster order here; the library keeps them cell by cell (and window by window).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hf_vit import ACTIVATIONS, IGNORED, LIBRARY, SETTINGS, TINY
from vitcli.checkpoints.family import (
    Family,
    Renames,
    To,
    Variant,
    fused,
    only,
    side,
    summed_over_frames,
)

BLOCK = "blocks.{i}."
RENAMES: Renames = {
    "front_end.projection.weight": summed_over_frames("patch_embed.proj.weight"),
    "vit.blocks.{i}.norm1": BLOCK + "norm1",
    "vit.blocks.{i}.attention.qkv": BLOCK + "attn.qkv",
    "vit.blocks.{i}.attention.proj": BLOCK + "attn.proj",
    "vit.blocks.{i}.norm2": BLOCK + "norm2",
    "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.fc1",
    "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.fc2",
    "head.norm": "merger.ln_q",
    "head.fc1": "merger.mlp.0",
    "head.fc2": "merger.mlp.2",
}
DROPS = (r"rotary_pos_emb\.inv_freq",)


def _theta(value: Mapping[str, Any]) -> float:
    if value.get("rope_type", "axial") != "axial" or set(value) - {"rope_type", "rope_theta"}:
        raise ValueError("axial, with rope_theta alone")
    return float(value["rope_theta"])


SHARED = {
    **SETTINGS,
    "num_hidden_layers": To("depth"),
    "patch_size": To("patch_size", side),
    "depth": To("depth"),
    "num_heads": To("heads", default=16),
    "in_channels": To("channels"),
    "in_chans": To("channels"),
    "spatial_patch_size": To("patch_size", side),
    "spatial_merge_size": only(2),
    "rope_parameters": To("rope.theta", _theta),
}
IGNORED_HERE = (*IGNORED, "temporal_patch_size", "tokens_per_second")


def _nominal_size(found: Mapping[str, Any]) -> tuple[int, int]:
    """These towers take any size; 16x16 patches stand for it where one is needed."""
    return 16 * found["patch_size"], 16 * found["patch_size"]


def _window(found: Mapping[str, Any]) -> int:
    """The side of a window in patches: whole merged cells that fit its pixels."""
    return int(found["_window_px"]) // 2 // int(found["patch_size"]) * 2


def _full_blocks(found: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(block + 1 for block in found["_full_blocks"] if block < found["depth"])


def _theta_of_old_configs(_: Mapping[str, Any]) -> float:
    return 10000.0  # transformers 4 had it in its code, so its configs do not say it


FIXED = {
    "patch_bias": False,
    "rope.theta": _theta_of_old_configs,
    "position": "rope2d",
    "rope.coordinates": "index",
    "rope.layout": "half",
    "norm_eps": 1e-6,
    "pooling": "none",
    "head": "merger",
    "image_size": _nominal_size,
}
QWEN2 = Family(
    name="hf-qwen2-vl",
    library=LIBRARY,
    verified=TINY + "; tokens compared in raster order",
    model_types=("qwen2_vl", "qwen2_vl_vision"),
    preprocess=processor("Qwen2VLImageProcessor"),
    signature=("merger.ln_q.bias", BLOCK + "attn.qkv.weight"),
    absent=(BLOCK + "mlp.gate_proj.weight", "pos_embed.weight"),
    renames=RENAMES,
    drops=DROPS,
    settings={
        **SHARED,
        "embed_dim": To("hidden"),
        "hidden_size": To("head_out"),
        "hidden_act": To("activation", ACTIVATIONS, default="quick_gelu"),
    },
    ignored=(*IGNORED_HERE, "mlp_ratio"),
    decides=FIXED,
    needs=("heads", "activation"),
)
QWEN2_5 = Family(
    name="hf-qwen2.5-vl",
    library=LIBRARY,
    verified=TINY + "; tokens compared in raster order",
    model_types=("qwen2_5_vl", "qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder"),
    preprocess=processor("Qwen2VLImageProcessor"),
    signature=("merger.ln_q.weight", BLOCK + "mlp.gate_proj.weight"),
    absent=("merger.ln_q.bias",),
    renames={
        **RENAMES,
        "vit.blocks.{i}.feed_forward.fc1": fused(BLOCK + "mlp.gate_proj", BLOCK + "mlp.up_proj"),
        "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.down_proj",
    },
    drops=DROPS,
    settings={
        **SHARED,
        "out_hidden_size": To("head_out"),
        "intermediate_size": To("mlp_hidden"),
        "hidden_act": To("activation", ACTIVATIONS, default="silu"),
        "window_size": To("_window_px", default=112),
        "fullatt_block_indexes": To("_full_blocks", tuple, default=(7, 15, 23, 31)),
    },
    ignored=IGNORED_HERE,
    decides={
        **FIXED,
        "attention.mask": "window",
        "attention.window": _window,
        "attention.full_blocks": _full_blocks,
    },
    needs=("heads", "activation", "attention.window", "attention.full_blocks"),
    variants=(
        Variant(  # Qwen2.5-Omni
            when=(BLOCK + "attn.q.weight",),
            renames={"vit.blocks.{i}.attention.qkv": fused(*(f"{BLOCK}attn.{p}" for p in "qkv"))},
        ),
    ),
)


def _table_size(found: Mapping[str, Any]) -> tuple[int, int]:
    """The image whose grid is that of the square table."""
    side_px = math.isqrt(int(found["_table_rows"])) * int(found["patch_size"])
    return side_px, side_px


def _from_1(blocks: list[int]) -> tuple[int, ...]:
    return tuple(block + 1 for block in blocks)


DEEPSTACK = "deepstack_merger_list.{i}."
# A table and rotations, no windows; 3.5 and 4 are the same without DeepStack.
QWEN3 = Family(
    name="hf-qwen3-vl",
    library=LIBRARY,
    verified=TINY + "; tokens compared in raster order; also Qwen3-VL-MoE, Qwen3.5, Qwen3-Omni",
    model_types=(
        *("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"),
        "qwen3_omni_moe_vision_encoder",
        *("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"),
        *("qwen4_exp", "qwen4_exp_vision"),
    ),
    preprocess=processor("Qwen2VLImageProcessor"),
    signature=("merger.norm.weight", "pos_embed.weight", BLOCK + "mlp.linear_fc1.weight"),
    # Qwen3-Omni names its mergers as Qwen2-VL does.
    aliases=(
        (r"^merger_list\.", "deepstack_merger_list."),
        (r"^((?:deepstack_)?merger\w*\.(?:\d+\.)?)ln_q\.", r"\1norm."),
        (r"^((?:deepstack_)?merger\w*\.(?:\d+\.)?)mlp\.0\.", r"\1linear_fc1."),
        (r"^((?:deepstack_)?merger\w*\.(?:\d+\.)?)mlp\.2\.", r"\1linear_fc2."),
    ),
    renames={
        **RENAMES,
        "front_end.projection.bias": "patch_embed.proj.bias",
        "front_end.position.table": "pos_embed.weight",
        "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.linear_fc1",
        "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.linear_fc2",
        "head.norm": "merger.norm",
        "head.fc1": "merger.linear_fc1",
        "head.fc2": "merger.linear_fc2",
        "deepstack.{i}.norm": DEEPSTACK + "norm",
        "deepstack.{i}.fc1": DEEPSTACK + "linear_fc1",
        "deepstack.{i}.fc2": DEEPSTACK + "linear_fc2",
    },
    drops=DROPS,
    settings={
        **SHARED,
        "hidden_size": To("hidden"),
        "out_hidden_size": To("head_out"),
        "intermediate_size": To("mlp_hidden"),
        "hidden_act": To("activation", ACTIVATIONS, default="gelu_tanh"),
        "num_position_embeddings": To("_table_rows", default=2304),
        "deepstack_visual_indexes": To("_deepstack", _from_1),
    },
    ignored=IGNORED_HERE,
    decides={
        **FIXED,
        "patch_bias": True,
        "position": "learned+rope2d",
        "position_table.resize": "bilinear_align_corners",
        "position_table.resize_dtype": "float32",
        "image_size": _table_size,
        "deepstack": lambda found: found.get("_deepstack", ()),
    },
    needs=("heads", "activation"),
    variants=(
        Variant(
            when=(DEEPSTACK + "norm.weight",),
            settings={"deepstack": lambda found: found.get("_deepstack", (9, 17, 25))},
            unproven=("deepstack",),
        ),
    ),
)
FAMILIES = (QWEN2, QWEN2_5, QWEN3)
