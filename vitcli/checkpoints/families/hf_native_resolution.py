"""Towers that read images of any size, turned by rotary positions, as transformers stores them.

Qwen2-VL, 2.5 and 3, Pixtral, GLM-4V and Kimi, on still images. Tokens stay in raster order here;
the library keeps those of Qwen and GLM cell by cell (and window by window).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hf_vit import (
    BIAS,
    IGNORED,
    LIBRARY,
    SETTINGS,
    TABLE_IN_FLOAT32,
    TINY,
    keys,
)
from vitcli.checkpoints.family import (
    Configs,
    Family,
    Renames,
    To,
    Variant,
    block,
    only,
    rows,
    side,
    summed_over_frames,
    table_resize,
    without,
)
from vitcli.checkpoints.preprocessing import (
    Preprocessing,
)
from vitcli.config.schema import EncoderConfig

ROTATED = {"position": "rope2d", "rope.coordinates": "index", "rope.layout": "half"}
TABLE_AND_ROTATED = {**ROTATED, "position": "learned+rope2d"}
BLOCK = "blocks.{i}."
PATCHES: Renames = {"front_end.projection.weight": summed_over_frames("patch_embed.proj.weight")}
FUSED = block(BLOCK, norm1="norm1", qkv="attn.qkv", proj="attn.proj", norm2="norm2")
GATED = block(BLOCK, fc1=("mlp.gate_proj", "mlp.up_proj"), fc2="mlp.down_proj")
INV_FREQ = r"(rotary_pos_emb|patch_positional_embedding)\.inv_freq"

# --- Qwen
RENAMES: Renames = {
    **PATCHES,
    **FUSED,
    **block(BLOCK, fc1="mlp.fc1", fc2="mlp.fc2"),
    "head.norm": "merger.ln_q",
    "head.fc1": "merger.mlp.0",
    "head.fc2": "merger.mlp.2",
}
SHARED = {
    **SETTINGS,
    **keys("num_hidden_layers", "patch_size", "rope_parameters"),
    "depth": To("depth"),
    "num_heads": To("heads", default=16),
    "in_channels": To("channels"),
    "in_chans": To("channels"),
    "spatial_patch_size": To("patch_size", side),
    "spatial_merge_size": only(2),
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


def _table_size(found: Mapping[str, Any]) -> tuple[int, int]:
    """The image whose grid is that of the square table."""
    side_px = math.isqrt(int(found["_table_rows"])) * int(found["patch_size"])
    return side_px, side_px


def _from_1(blocks: list[int]) -> tuple[int, ...]:
    return tuple(block + 1 for block in blocks)


def _old_theta(_: Mapping[str, Any]) -> float:
    return 10000.0  # transformers 4 had it in its code, so its configs do not say it


FIXED = {
    **ROTATED,
    "patch_bias": False,
    "rope.theta": _old_theta,
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
    drops=(INV_FREQ,),
    settings={
        **SHARED,
        "embed_dim": To("hidden"),
        "hidden_size": To("head_out"),
        **keys(hidden_act="quick_gelu"),
    },
    ignored=(*IGNORED_HERE, "mlp_ratio"),
    decides=FIXED,
    needs=("heads", "activation"),
)
QWEN2_5 = replace(
    QWEN2,
    name="hf-qwen2.5-vl",
    model_types=("qwen2_5_vl", "qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder"),
    signature=("merger.ln_q.weight", BLOCK + "mlp.gate_proj.weight"),
    absent=("merger.ln_q.bias",),
    renames={**RENAMES, **GATED},
    settings={
        **SHARED,
        "out_hidden_size": To("head_out"),
        **keys("intermediate_size", hidden_act="silu"),
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
    # Qwen2.5-Omni
    variants=(Variant(when=(BLOCK + "attn.q.weight",), renames=block(BLOCK, qkv="attn.*")),),
)
DEEPSTACK = "deepstack_merger_list.{i}."
# A table and rotations, no windows; 3.5 and 4 are the same without DeepStack.
QWEN3 = replace(
    QWEN2,
    name="hf-qwen3-vl",
    verified=QWEN2.verified + "; also Qwen3-VL-MoE, Qwen3.5, Qwen3-Omni",
    model_types=(
        *("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"),
        "qwen3_omni_moe_vision_encoder",
        *("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"),
        *("qwen4_exp", "qwen4_exp_vision"),
    ),
    signature=("merger.norm.weight", "pos_embed.weight", BLOCK + "mlp.linear_fc1.weight"),
    absent=(),
    # Qwen3-Omni names its mergers as Qwen2-VL does.
    aliases=(
        (r"^merger_list\.", "deepstack_merger_list."),
        (r"^((?:deepstack_)?merger\w*\.(?:\d+\.)?)ln_q\.", r"\1norm."),
        (r"^((?:deepstack_)?merger\w*\.(?:\d+\.)?)mlp\.0\.", r"\1linear_fc1."),
        (r"^((?:deepstack_)?merger\w*\.(?:\d+\.)?)mlp\.2\.", r"\1linear_fc2."),
    ),
    renames={
        **PATCHES,
        "front_end.projection.bias": "patch_embed.proj.bias",
        "front_end.position.table": "pos_embed.weight",
        **FUSED,
        **block(BLOCK, fc1="mlp.linear_fc1", fc2="mlp.linear_fc2"),
        **{
            f"{ours}.{part}": theirs + name
            for ours, theirs in (("head", "merger."), ("deepstack.{i}", DEEPSTACK))
            for part, name in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2"))
        },
    },
    settings={
        **SHARED,
        "out_hidden_size": To("head_out"),
        **keys("hidden_size", "intermediate_size", hidden_act="gelu_tanh"),
        "num_position_embeddings": To("_table_rows", default=2304),
        "deepstack_visual_indexes": To("_deepstack", _from_1),
    },
    ignored=IGNORED_HERE,
    decides={
        **FIXED,
        "patch_bias": True,
        "position": "learned+rope2d",
        **table_resize("bilinear_align_corners", "float32"),
        "image_size": _table_size,
        "deepstack": lambda found: found.get("_deepstack", ()),
    },
    variants=(
        Variant(
            when=(DEEPSTACK + "norm.weight",),
            settings={"deepstack": lambda found: found.get("_deepstack", (9, 17, 25))},
            unproven=("deepstack",),
        ),
    ),
)

# --- Pixtral, and Mistral 3's tower
_PIXELS = processor("PixtralImageProcessor")


def _pixtral_pixels(configs: Configs, encoder: EncoderConfig) -> Preprocessing | None:
    """The image processor's, with the patches that a processor which merges them pads up to."""
    found = _PIXELS(configs, encoder)
    whole = configs.get("processor_config.json", {})
    patch, merge = whole.get("patch_size"), whole.get("spatial_merge_size")
    if found is None or found.config.resize != "within" or not (patch and merge):
        return found
    config = found.config.model_copy(update={"multiple": patch * merge})
    note = f"sides up to multiples of {patch} x {merge} px (processor_config.json)"
    return replace(found, config=config, notes=(*found.notes, note))


LAYER = "transformer.layers.{i}."
PIXTRAL = Family(
    name="hf-pixtral",
    library=LIBRARY,
    verified=TINY + "; alone, in LLaVA and in Mistral 3",
    model_types=("pixtral",),
    preprocess=_pixtral_pixels,
    signature=("patch_conv.weight", "ln_pre.weight", LAYER + "attention_norm.weight"),
    renames={
        "front_end.projection": "patch_conv",
        "front_end.norm": "ln_pre",
        **block(LAYER, norm1="attention_norm", qkv="attention.*_proj", proj="attention.o_proj"),
        **block(LAYER, norm2="ffn_norm", fc2="feed_forward.down_proj"),
        **block(LAYER, fc1=("feed_forward.gate_proj", "feed_forward.up_proj")),
    },
    drops=(INV_FREQ,),
    settings={
        **SETTINGS,
        **keys(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, patch_size=16),
        **keys("rope_parameters", intermediate_size=4096, image_size=(1024, 1024)),
        **keys(rope_theta=10000.0),
    },
    ignored=(*IGNORED, "head_dim", "is_composition"),
    decides={
        **ROTATED,
        "patch_bias": False,
        "attention.proj_bias": False,
        "mlp_bias": False,
        "attention.qkv_bias": "none",
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "mlp": "gated",
        "final_norm": False,
        "rope.alternate": True,
        "pooling": "none",
    },
    needs=("heads", "activation", "image_size", "rope.theta"),
)

# --- GLM-4.1V's and 4.5V's tower, without what joins its patches
NOT_JOINED = "what joins 2x2 patches ({}) is not applied"
GLM4V = Family(
    name="hf-glm4v",
    library=LIBRARY,
    verified=TINY + "; tokens compared in raster order",
    model_types=("glm4v_vision", "glm4v_moe_vision"),
    preprocess=processor("Glm4vImageProcessor"),
    signature=("post_conv_layernorm.weight", "embeddings.position_embedding.weight", "downsample"),
    renames={
        **PATCHES,
        "front_end.projection.bias": "patch_embed.proj.bias",
        "front_end.patch_norm": "post_conv_layernorm",
        "front_end.position.table": "embeddings.position_embedding.weight",
        **FUSED,
        **GATED,
        "vit.norm": "post_layernorm",
    },
    drops=(r"merger\..*", r"downsample\..*", INV_FREQ),
    settings={
        **without(SETTINGS, "num_channels"),
        **keys("num_hidden_layers", "num_attention_heads", "rope_parameters", hidden_size=1536),
        **keys(image_size=(336, 336), patch_size=14, hidden_act="silu", rms_norm_eps=1e-5),
        "depth": To("depth", default=24),
        "num_heads": To("heads", default=12),
        "in_channels": To("channels"),
        "attention_bias": To("attention.qkv_bias", BIAS, default="none"),
        **keys(rope_theta=10000.0),
    },
    ignored=(
        *IGNORED,
        # of the merger; the blocks' own width is `out_hidden_size`, and in the tensors
        *("intermediate_size", "out_hidden_size", "spatial_merge_size", "temporal_patch_size"),
    ),
    decides={
        **TABLE_AND_ROTATED,
        **TABLE_IN_FLOAT32,
        "attention.proj_bias": False,
        "mlp_bias": False,
        "patch_norm": True,
        "norm": "rmsnorm",
        "mlp": "gated",
        "pooling": "none",
    },
    needs=("heads", "activation", "norm_eps", "rope.theta"),
    remarks=dict.fromkeys(
        ("glm4v_vision", "glm4v_moe_vision"), NOT_JOINED.format("downsample, merger")
    ),
)

# --- MoonViT of Kimi K2.5 and Kimi-VL
# Published files have q, k, v in one, as pairs next to each other; the library keeps them apart, as
# pairs half a head away. What their own code holds, and the library's configs say, is the
# activation and theta.
MOON = "layers.{i}."
KIMI = Family(
    name="hf-kimi",
    library=LIBRARY,
    verified=TINY + "; alone and in the whole model",
    model_types=("kimi_k25_vision", "kimi_k25", "moonvit"),
    preprocess=processor("Kimi_K25ImageProcessor"),
    signature=("patch_embed.pos_emb.position_embeddings", "final_layernorm.weight"),
    aliases=(
        (r"^(encoder\.blocks\.\d+\.)norm1\.", r"\1norm2."),
        (r"^(encoder\.blocks\.\d+\.)norm0\.", r"\1norm1."),
        (r"^(encoder\.blocks\.\d+\.mlp\.)fc1\.", r"\1fc2."),
        (r"^(encoder\.blocks\.\d+\.mlp\.)fc0\.", r"\1fc1."),
        (r"^(encoder\.blocks\.\d+\.)wqkv\.", r"\1attn.qkv."),
        (r"^(encoder\.blocks\.\d+\.)wo\.", r"\1attn.proj."),
        (r"^encoder\.blocks\.", "layers."),
        (r"^encoder\.", ""),
        (r"^patch_embed\.pos_emb\.weight$", "patch_embed.pos_emb.position_embeddings"),
    ),
    renames={
        "front_end.projection": "patch_embed.proj",
        "front_end.position.table": rows("patch_embed.pos_emb.position_embeddings"),
        **block(MOON, norm1="norm1", qkv="attn.*_proj", proj="attn.proj", norm2="norm2"),
        **block(MOON, fc1="mlp.fc1", fc2="mlp.fc2"),
        "vit.norm": "final_layernorm",
    },
    drops=(r"patch_embed\.pos_emb\.time_.*", r"rotary_emb\..*"),
    settings={
        **without(SETTINGS, "image_size"),
        **keys(hidden_size=1152, num_hidden_layers=27, num_attention_heads=16, patch_size=14),
        **keys("rope_parameters", intermediate_size=4304, hidden_act="gelu_tanh"),
        "pos_emb_height": To("_rows", default=64),
        "pos_emb_width": To("_columns", default=64),
        # as the published configs have them
        "vt_hidden_size": To("hidden"),
        "vt_num_hidden_layers": To("depth"),
        "vt_num_attention_heads": To("heads"),
        "vt_intermediate_size": To("mlp_hidden"),
        "init_pos_emb_height": To("_rows"),
        "init_pos_emb_width": To("_columns"),
        "pos_emb_interpolation_mode": only("bicubic"),
        "pos_emb_type": only("divided_fixed"),
        "video_attn_type": only("spatial_temporal"),
    },
    ignored=(
        *(*IGNORED, "pos_emb_time", "merge_kernel_size", "init_pos_emb_time", "merge_type"),
        *("mm_hidden_size", "mm_projector_type", "projector_ln_eps", "text_hidden_size"),
    ),
    decides={
        **TABLE_AND_ROTATED,
        "norm_eps": 1e-5,
        "activation": lambda found: "gelu_tanh",
        "rope.theta": _old_theta,
        **table_resize("bicubic", "model"),
        "rope.first_axis": "columns",
        "rope.in_turns": True,
        "pooling": "none",
        "image_size": lambda found: (
            found["_rows"] * found["patch_size"],
            found["_columns"] * found["patch_size"],
        ),
    },
    needs=("heads", "activation", "rope.theta"),
    unproven=("activation", "rope.theta"),
    remarks=dict.fromkeys(
        ("kimi_k25_vision", "kimi_k25", "moonvit"), NOT_JOINED.format("mm_projector")
    ),
    variants=(
        Variant(
            when=(MOON + "attn.qkv.weight",),
            settings={"rope.layout": "interleaved"},
            renames=block(MOON, qkv="attn.qkv"),
        ),
    ),
)
FAMILIES = (QWEN2, QWEN2_5, QWEN3, PIXTRAL, GLM4V, KIMI)
