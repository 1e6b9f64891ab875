"""Pixtral's, AIMv2's, Llama 4's, GLM-4V's and Kimi's towers as transformers stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hf_vit import ACTIVATIONS, IGNORED, LIBRARY, SETTINGS, TINY
from vitcli.checkpoints.family import (
    Configs,
    Family,
    From,
    Preprocessing,
    Renames,
    To,
    Variant,
    conv_from_flat,
    flag,
    fused,
    joined,
    only,
    rows,
    size,
    summed_over_frames,
)
from vitcli.config.schema import EncoderConfig

NO_BIAS = {"patch_bias": False, "attention.proj_bias": False, "mlp_bias": False}


def _gated(ours: str, block: str, mlp: str) -> Renames:
    """A gated MLP whose three maps are stored apart."""
    return {
        f"{ours}.feed_forward.fc1": fused(f"{block}{mlp}.gate_proj", f"{block}{mlp}.up_proj"),
        f"{ours}.feed_forward.fc2": f"{block}{mlp}.down_proj",
    }


def _qkv(block: str, attention: str) -> Renames:
    parts = (f"{block}{attention}.{part}_proj" for part in "qkv")
    return {"vit.blocks.{i}.attention.qkv": fused(*parts)}


def _axial_theta(value: Mapping[str, Any]) -> float:
    if value.get("rope_type", "axial") != "axial" or set(value) - {"rope_type", "rope_theta"}:
        raise ValueError("axial, with rope_theta alone")
    return float(value["rope_theta"])


# Pixtral, and Mistral 3's tower
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
        "vit.blocks.{i}.norm1": LAYER + "attention_norm",
        **_qkv(LAYER, "attention"),
        "vit.blocks.{i}.attention.proj": LAYER + "attention.o_proj",
        "vit.blocks.{i}.norm2": LAYER + "ffn_norm",
        **_gated("vit.blocks.{i}", LAYER, "feed_forward"),
    },
    drops=(r"patch_positional_embedding\.inv_freq",),
    settings={
        **SETTINGS,
        "hidden_size": To("hidden", default=1024),
        "num_hidden_layers": To("depth", default=24),
        "num_attention_heads": To("heads", default=16),
        "intermediate_size": To("mlp_hidden", default=4096),
        "image_size": To("image_size", size, default=(1024, 1024)),
        "patch_size": To("patch_size", SETTINGS["patch_size"].read, default=16),
        "rope_parameters": To("rope.theta", _axial_theta),
        "rope_theta": To("rope.theta", float, default=10000.0),
    },
    ignored=(*IGNORED, "head_dim", "is_composition"),
    decides={
        **NO_BIAS,
        "attention.qkv_bias": "none",
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "mlp": "gated",
        "final_norm": False,
        "position": "rope2d",
        "rope.coordinates": "index",
        "rope.layout": "half",
        "rope.alternate": True,
        "pooling": "none",
    },
    needs=("heads", "activation", "image_size", "rope.theta"),
)


# AIMv2, and Ovis2's tower
BLOCK = "encoder.layers.{i}."
AIMV2 = Family(
    name="hf-aimv2",
    library=LIBRARY,
    verified=TINY + "; alone, with text, with and without its pooling",
    model_types=("aimv2", "aimv2_vision_model"),
    preprocess=processor("CLIPImageProcessor"),
    signature=("embeddings.rms_norm.weight", BLOCK + "ffn.gate_proj.weight", "rms_norm.weight"),
    prefixes=("", "vision_model."),
    aliases=((r"^embeddings\.patch_embedding\.", "embeddings.patch_embed."),),  # Ovis2
    renames={
        "front_end.projection": "embeddings.patch_embed",
        "front_end.patch_norm": "embeddings.rms_norm",
        "front_end.position.table": "embeddings.position_embedding.weight",
        "vit.blocks.{i}.norm1": BLOCK + "rms_norm1",
        **_qkv(BLOCK, "attention"),
        "vit.blocks.{i}.attention.proj": BLOCK + "attention.out_proj",
        "vit.blocks.{i}.norm2": BLOCK + "rms_norm2",
        **_gated("vit.blocks.{i}", BLOCK, "ffn"),
        "vit.norm": "rms_norm",
        "pooling.probe": rows("head.cls_token"),
        "pooling.kv": fused("head.k_proj", "head.v_proj"),
        "pooling.proj": "head.output_proj",
        "head.linear": "visual_projection",
    },
    drops=(r"logit_scale", r"embeddings\.position_ids"),
    settings={
        **SETTINGS,
        "hidden_size": To("hidden", default=1024),
        "num_hidden_layers": To("depth", default=24),
        "num_attention_heads": To("heads", default=8),
        "intermediate_size": To("mlp_hidden", default=2816),
        "image_size": To("image_size", size, default=(224, 224)),
        "patch_size": To("patch_size", SETTINGS["patch_size"].read, default=14),
        "hidden_act": To("activation", ACTIVATIONS, default="silu"),
        "rms_norm_eps": To("norm_eps", float, default=1e-5),
        "qkv_bias": To("_qkv_bias", flag, default=False),
        "mlp_bias": To("_mlp_bias", flag, default=False),
        "use_head": To("pooling", {True: "query", False: "none"}, default="query"),
        "is_native": only(False),  # its table is computed, and not in the file
    },
    ignored=(*IGNORED, "projection_dim"),
    decides={
        "patch_norm": True,
        "norm": "rmsnorm",
        "mlp": "gated",
        "position": "learned",
        # The library has no other size; this is how timm resizes the same table.
        "position_table.resize": "bicubic_antialias",
        "position_table.resize_dtype": "float32",
        "attention.proj_bias": lambda found: found["_qkv_bias"],
        "attention.qkv_bias": lambda found: "qkv" if found["_qkv_bias"] else "none",
        "mlp_bias": lambda found: found["_mlp_bias"],
    },
    needs=("heads", "norm_eps", "activation", "attention.proj_bias", "mlp_bias", "pooling"),
    variants=(
        Variant(when=("visual_projection",), settings={"head": "projection"}),
        Variant(when=("logit_scale",), settings={"head": "projection"}),
    ),
)
OVIS2 = replace(
    AIMV2,
    name="hf-ovis2",
    verified=TINY + "; alone and in the whole model",
    model_types=("ovis2_vision",),
    preprocess=processor("Ovis2ImageProcessor"),
    prefixes=("transformer.",),
    drops=(*AIMV2.drops, r"head_(linear|norm)\..*"),
    settings={key: to for key, to in AIMV2.settings.items() if key != "use_head"},
    decides={**AIMV2.decides, "pooling": "none"},
    ignored=(
        *IGNORED,
        "hidden_stride",
        "num_visual_indicator_tokens",
        "tokenize_function",
        "backbone_args",
    ),
    remarks={"ovis2_vision": "the visual tokenizer (head_linear, head_norm) is not applied"},
)


# Llama 4's tower; its code has one activation and one eps, whatever the config says
LAYERS = "model.layers.{i}."


def _cls_first(source: str) -> From:
    """A table whose last row is that of CLS."""
    return From((source,), lambda t: joined(t[-1:], t[:-1]))


def _theta(value: Mapping[str, Any]) -> float:
    if set(value) - {"rope_type", "rope_theta"} or value.get("rope_type") not in ("default", None):
        raise ValueError("rope_type default, with rope_theta alone")
    return float(value["rope_theta"])


LLAMA4 = Family(
    name="hf-llama4",
    library=LIBRARY,
    verified=TINY + "; alone and in the whole model; CLS first here, last there",
    model_types=("llama4_vision_model",),
    preprocess=processor("Llama4ImageProcessor"),
    signature=("positional_embedding_vlm", "layernorm_pre.weight", LAYERS + "self_attn.o_proj"),
    renames={
        "front_end.projection.weight": conv_from_flat("patch_embedding.linear.weight"),
        "front_end.prefix.cls": rows("class_embedding"),
        "front_end.position.table": _cls_first("positional_embedding_vlm"),
        "front_end.norm": "layernorm_pre",
        "vit.blocks.{i}.norm1": LAYERS + "input_layernorm",
        **_qkv(LAYERS, "self_attn"),
        "vit.blocks.{i}.attention.proj": LAYERS + "self_attn.o_proj",
        "vit.blocks.{i}.norm2": LAYERS + "post_attention_layernorm",
        "vit.blocks.{i}.feed_forward.fc1": LAYERS + "mlp.fc1",
        "vit.blocks.{i}.feed_forward.fc2": LAYERS + "mlp.fc2",
        "vit.norm": "layernorm_post",
    },
    drops=(r"vision_adapter\..*",),
    settings={
        **{key: to for key, to in SETTINGS.items() if key != "hidden_act"},
        "hidden_size": To("hidden", default=768),
        "num_hidden_layers": To("depth", default=34),
        "num_attention_heads": To("heads", default=16),
        "intermediate_size": To("mlp_hidden", default=5632),
        "image_size": To("image_size", size, default=(448, 448)),
        "patch_size": To("patch_size", SETTINGS["patch_size"].read, default=14),
        "rope_parameters": To("rope.theta", _theta),
        "rope_theta": To("rope.theta", float, default=10000.0),
    },
    ignored=(
        *IGNORED,
        *("hidden_act", "norm_eps"),
        *("vision_output_dim", "pixel_shuffle_ratio", "projector_input_dim"),
        *("projector_output_dim", "projector_dropout", "multi_modal_projector_bias"),
        *("vision_feature_select_strategy", "vision_feature_layer"),
    ),
    decides={
        "patch_bias": False,
        "cls_token": True,
        "attention.qkv_bias": "qkv",
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "gelu",
        "mlp": "plain",
        "pooling": "none",
        "position": "learned+rope2d",
        # The library has no other size.
        "position_table.resize": "bicubic",
        "position_table.resize_dtype": "float32",
        "rope.coordinates": "index",
        "rope.layout": "interleaved",
        "rope.offset": 1.0,
        "rope.first_axis": "columns",
    },
    needs=("heads", "rope.theta"),
    remarks={"llama4_vision_model": "the adapter (pixel shuffle and MLP) is not applied"},
)


# GLM-4.1V's and 4.5V's tower, on still images, without what joins its patches
GLM_BLOCK = "blocks.{i}."


GLM4V = Family(
    name="hf-glm4v",
    library=LIBRARY,
    verified=TINY + "; tokens compared in raster order",
    model_types=("glm4v_vision", "glm4v_moe_vision"),
    preprocess=processor("Glm4vImageProcessor"),
    signature=("post_conv_layernorm.weight", "embeddings.position_embedding.weight", "downsample"),
    renames={
        "front_end.projection.weight": summed_over_frames("patch_embed.proj.weight"),
        "front_end.projection.bias": "patch_embed.proj.bias",
        "front_end.patch_norm": "post_conv_layernorm",
        "front_end.position.table": "embeddings.position_embedding.weight",
        "vit.blocks.{i}.norm1": GLM_BLOCK + "norm1",
        "vit.blocks.{i}.attention.qkv": GLM_BLOCK + "attn.qkv",
        "vit.blocks.{i}.attention.proj": GLM_BLOCK + "attn.proj",
        "vit.blocks.{i}.norm2": GLM_BLOCK + "norm2",
        **_gated("vit.blocks.{i}", GLM_BLOCK, "mlp"),
        "vit.norm": "post_layernorm",
    },
    drops=(r"merger\..*", r"downsample\..*", r"rotary_pos_emb\.inv_freq"),
    settings={
        **{key: to for key, to in SETTINGS.items() if key != "num_channels"},
        "hidden_size": To("hidden", default=1536),
        "num_hidden_layers": To("depth"),
        "depth": To("depth", default=24),
        "num_attention_heads": To("heads"),
        "num_heads": To("heads", default=12),
        "in_channels": To("channels"),
        "image_size": To("image_size", size, default=(336, 336)),
        "patch_size": To("patch_size", SETTINGS["patch_size"].read, default=14),
        "hidden_act": To("activation", ACTIVATIONS, default="silu"),
        "rms_norm_eps": To("norm_eps", float, default=1e-5),
        "attention_bias": To("attention.qkv_bias", {True: "qkv", False: "none"}, default="none"),
        "rope_parameters": To("rope.theta", _axial_theta),
        "rope_theta": To("rope.theta", float, default=10000.0),
    },
    ignored=(
        *IGNORED,
        # of the merger; the blocks' own width is `out_hidden_size`, and in the tensors
        *("intermediate_size", "out_hidden_size", "spatial_merge_size", "temporal_patch_size"),
    ),
    decides={
        "attention.proj_bias": False,
        "mlp_bias": False,
        "patch_norm": True,
        "norm": "rmsnorm",
        "mlp": "gated",
        "position": "learned+rope2d",
        "position_table.resize": "bicubic",
        "position_table.resize_dtype": "float32",
        "rope.coordinates": "index",
        "rope.layout": "half",
        "pooling": "none",
    },
    needs=("heads", "activation", "norm_eps", "rope.theta"),
    remarks=dict.fromkeys(
        ("glm4v_vision", "glm4v_moe_vision"),
        "what joins 2x2 patches (downsample, merger) is not applied",
    ),
)


# MoonViT of Kimi K2.5 and Kimi-VL, on still images. Published files have q, k, v in one, as pairs
# next to each other; the library keeps them apart, as pairs half a head away. What their own code
# holds, and the library's configs say, is the activation and theta.
KIMI_LAYER = "layers.{i}."
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
        "vit.blocks.{i}.norm1": KIMI_LAYER + "norm1",
        **_qkv(KIMI_LAYER, "attn"),
        "vit.blocks.{i}.attention.proj": KIMI_LAYER + "attn.proj",
        "vit.blocks.{i}.norm2": KIMI_LAYER + "norm2",
        "vit.blocks.{i}.feed_forward.fc1": KIMI_LAYER + "mlp.fc1",
        "vit.blocks.{i}.feed_forward.fc2": KIMI_LAYER + "mlp.fc2",
        "vit.norm": "final_layernorm",
    },
    drops=(r"patch_embed\.pos_emb\.time_.*", r"rotary_emb\..*"),
    settings={
        **{key: to for key, to in SETTINGS.items() if key != "image_size"},
        "hidden_size": To("hidden", default=1152),
        "num_hidden_layers": To("depth", default=27),
        "num_attention_heads": To("heads", default=16),
        "intermediate_size": To("mlp_hidden", default=4304),
        "patch_size": To("patch_size", SETTINGS["patch_size"].read, default=14),
        "hidden_act": To("activation", ACTIVATIONS, default="gelu_tanh"),
        "pos_emb_height": To("_rows", default=64),
        "pos_emb_width": To("_columns", default=64),
        "rope_parameters": To("rope.theta", _axial_theta),
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
        "norm_eps": 1e-5,
        "activation": lambda found: "gelu_tanh",
        "rope.theta": lambda found: 10000.0,
        "position": "learned+rope2d",
        "position_table.resize": "bicubic",
        "position_table.resize_dtype": "model",
        "rope.coordinates": "index",
        "rope.layout": "half",
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
        ("kimi_k25_vision", "kimi_k25", "moonvit"),
        "what joins 2x2 patches (mm_projector) is not applied",
    ),
    variants=(
        Variant(
            when=(KIMI_LAYER + "attn.qkv.weight",),
            settings={"rope.layout": "interleaved"},
            renames={"vit.blocks.{i}.attention.qkv": KIMI_LAYER + "attn.qkv"},
        ),
    ),
)
FAMILIES = (PIXTRAL, OVIS2, AIMV2, LLAMA4, GLM4V, KIMI)
