"""CLIP, SigLIP, Idefics, InternViT, AIMv2 and Llama 4's tower as transformers stores them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hf_vit import (
    BIAS,
    IGNORED,
    LIBRARY,
    SETTINGS,
    TABLE_IN_FLOAT32,
    TABLE_IN_MODEL_DTYPE,
    TINY,
    keys,
    rope_theta,
)
from vitcli.checkpoints.family import (
    Family,
    From,
    To,
    Variant,
    block,
    conv_from_flat,
    conv_from_linear,
    flag,
    fused,
    joined,
    only,
    probe_pooling,
    rows,
    table_resize,
    without,
)

BLOCK = "encoder.layers.{i}."
BLOCKS = block(
    BLOCK,
    norm1="layer_norm1",
    qkv="self_attn.*_proj",
    proj="self_attn.out_proj",
    norm2="layer_norm2",
    fc1="mlp.fc1",
    fc2="mlp.fc2",
)
DROPS = (r"logit_(scale|bias)", r"embeddings\.position_ids")
"""What a whole CLIP or SigLIP model has beside its towers, and an old buffer."""
PROJECTION = tuple(
    Variant(when=(name,), settings={"head": "projection"})
    for name in ("visual_projection", "logit_scale")  # a whole model has both
)


def _head_of(architectures: list[str]) -> str:
    """A file that lost its projection must not pass for a model without one."""
    projects = {"CLIPModel", "CLIPVisionModelWithProjection"} & set(architectures)
    return "projection" if projects else "none"


CLIP = Family(
    name="hf-clip",
    library=LIBRARY,
    verified=TINY,
    model_types=(
        *("clip", "clip_vision_model", "metaclip_2", "metaclip_2_vision_model"),
        *("chinese_clip", "chinese_clip_vision_model", "altclip", "altclip_vision_model"),
        *("clipseg", "clipseg_vision_model"),
    ),
    preprocess=processor("CLIPImageProcessor"),
    signature=("pre_layrnorm.weight", BLOCK + "self_attn.q_proj.weight"),  # spelled so
    prefixes=("", "vision_model."),
    aliases=(
        (r"^encoder\.layer\.", "encoder.layers."),  # AltCLIP as transformers 5 writes it
        (r"^pre_layernorm\.", "pre_layrnorm."),  # OWL-ViT spells it right
    ),
    renames={
        "front_end.projection": "embeddings.patch_embedding",
        "front_end.prefix.cls": rows("embeddings.class_embedding"),
        "front_end.position.table": "embeddings.position_embedding.weight",
        "front_end.norm": "pre_layrnorm",
        **BLOCKS,
        "pool_norm": "post_layernorm",
        "head.linear": "visual_projection",
    },
    drops=DROPS,
    settings={
        **SETTINGS,
        **keys(image_size=(224, 224), hidden_size=768, patch_size=32, hidden_act="quick_gelu"),
        **keys(intermediate_size=3072, layer_norm_eps=1e-5),
        "architectures": To("head", _head_of),
    },
    ignored=(*IGNORED, "projection_dim"),
    # The pooled vector is LN(CLS); the tokens themselves get no final norm.
    decides={**TABLE_IN_MODEL_DTYPE, "patch_bias": False, "pooling": "cls"},
    variants=(
        *PROJECTION,
        # CLIPForImageClassification reads the mean of the patches, without a norm.
        Variant(
            when=("classifier",),
            settings={"pooling": "mean", "head": "linear"},
            renames={"pool_norm": None, "head.linear": "classifier"},
            drops=(r"post_layernorm\.(weight|bias)", r"visual_projection\.weight"),
        ),
    ),
)


def _as_clip(name: str, *model_types: str, **defaults: Any) -> Family:
    """CLIP's tower in another model, whose config leaves out other values."""
    settings = {**CLIP.settings, **keys(**defaults)}
    return replace(CLIP, name=name, model_types=model_types, settings=settings)


OWL = _as_clip("hf-owlvit", "owlvit", "owlvit_vision_model", image_size=(768, 768))
OWL2 = _as_clip("hf-owlv2", "owlv2", "owlv2_vision_model", image_size=(768, 768), patch_size=16)
KOSMOS2 = _as_clip(
    *("hf-kosmos-2", "kosmos-2", "kosmos_2_vision_model"),
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    patch_size=14,
)
MAP = probe_pooling("head.", "attention.", "mlp.fc1", "mlp.fc2")
SIGLIP = Family(
    name="hf-siglip",
    library=LIBRARY,
    verified=TINY + "; also SigLIP 2 of fixed resolution",
    model_types=("siglip", "siglip_vision_model"),
    preprocess=processor("SiglipImageProcessor"),
    signature=("post_layernorm.weight", BLOCK + "self_attn.q_proj.weight"),
    absent=("embeddings.class_embedding", "pre_layrnorm.weight"),
    ranks={"embeddings.patch_embedding.weight": 4},
    prefixes=("vision_model.", ""),
    renames={
        "front_end.projection": "embeddings.patch_embedding",
        "front_end.position.table": "embeddings.position_embedding.weight",
        **BLOCKS,
        "vit.norm": "post_layernorm",
        **MAP,
    },
    drops=DROPS,
    settings={
        **SETTINGS,
        **keys(image_size=(224, 224), hidden_size=768, patch_size=16, hidden_act="gelu_tanh"),
        **keys(intermediate_size=3072, layer_norm_eps=1e-6),
    },
    ignored=(*IGNORED, "vision_use_head", "num_image_tokens", "projection_dim"),
    decides=TABLE_IN_MODEL_DTYPE,
    variants=(
        # Idefics 2 and 3 and SmolVLM have these names, no head, and other positions at other sizes.
        Variant(
            unless=("head.probe", "classifier"),
            settings={"pooling": "none"},
            unproven=("position_table.resize",),
        ),
        # SiglipForImageClassification reads the mean of all tokens and leaves the head unused.
        Variant(
            when=("classifier",),
            settings={"pooling": "mean", "head": "linear"},
            renames={**dict.fromkeys(MAP), "head.linear": "classifier"},
            drops=(r"head\..*",),
        ),
    ),
)
SIGLIP2 = replace(
    SIGLIP,
    name="hf-siglip2-naflex",
    verified=TINY + "; images of one size, without padding",
    model_types=("siglip2", "siglip2_vision_model"),
    preprocess=processor("Siglip2ImageProcessor"),
    ranks={"embeddings.patch_embedding.weight": 2},
    renames={
        **without(SIGLIP.renames, "front_end.projection"),
        "front_end.projection.weight": conv_from_linear("embeddings.patch_embedding.weight"),
        "front_end.projection.bias": "embeddings.patch_embedding.bias",
    },
    settings={
        **without(SIGLIP.settings, "image_size"),
        "num_patches": To(None),  # the table's length shows it
    },
    decides=table_resize("bilinear_antialias", "float32"),
)
# The same names without a head; a patch has the row of the cell of the table that it falls in.
IDEFICS = replace(
    SIGLIP,
    name="hf-idefics2",
    verified=TINY + "; images without padding",
    model_types=("idefics2", "idefics2_vision"),
    preprocess=processor("Idefics2ImageProcessor"),
    absent=(*SIGLIP.absent, "head.probe", "classifier"),
    renames=without(SIGLIP.renames, *MAP),
    settings={**SIGLIP.settings, **keys(patch_size=32)},
    ignored=(*SIGLIP.ignored, "max_image_size", "size", "use_base_siglip"),
    decides={
        **table_resize("buckets", "model"),
        "pooling": "none",
    },
    variants=(),
)
IDEFICS3 = replace(
    IDEFICS,
    name="hf-idefics3",
    verified=IDEFICS.verified + "; also SmolVLM",
    model_types=("idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision"),
    preprocess=processor("Idefics3ImageProcessor"),
    settings={**IDEFICS.settings, **keys(hidden_size=1152, num_attention_heads=16)},
)
LAYER = "encoder.layer.{i}."
INTERNVL = Family(
    name="hf-internvl",
    library=LIBRARY,
    verified=TINY,
    model_types=("internvl", "internvl_vision"),
    preprocess=processor("GotOcr2ImageProcessor"),
    signature=(LAYER + "lambda_1", LAYER + "attention.q_proj.weight"),
    renames={
        "front_end.projection": "embeddings.patch_embeddings.projection",
        "front_end.prefix.cls": rows("embeddings.cls_token"),
        "front_end.position.table": rows("embeddings.position_embeddings"),
        **block(LAYER, norm1="layernorm_before", norm2="layernorm_after"),
        **block(LAYER, qkv="attention.*_proj", proj="attention.projection_layer"),
        **block(LAYER, q_norm="attention.q_norm", k_norm="attention.k_norm"),
        **block(LAYER, fc1="mlp.fc1", fc2="mlp.fc2", scale1="lambda_1", scale2="lambda_2"),
        "vit.norm": "layernorm",
    },
    drops=(r"embeddings\.mask_token",),
    settings={
        **SETTINGS,
        **keys("intermediate_size", "layer_scale_init_value", num_attention_heads=16),
        **keys(num_hidden_layers=24, image_size=(448, 448), layer_norm_eps=1e-6),
        "norm_type": To("norm", {"layer_norm": "layernorm", "rms_norm": "rmsnorm"}),
        "attention_bias": To("attention.qkv_bias", BIAS),
        "use_qk_norm": To("attention.qk_norm", {True: "width", False: "none"}),
        "use_absolute_position_embeddings": only(True),
    },
    # Mean pooling puts nn.Identity for the final norm, which the tensors show.
    ignored=(*IGNORED, "use_mask_token", "use_mean_pooling"),
    decides={**TABLE_IN_MODEL_DTYPE, "attention.qk_norm_eps": 1e-6, "pooling": "none"},
)
INTERNVIT = Family(
    name="internvit",
    library="OpenGVLab InternVL",
    verified="tiny random models of transformers under its keys; once beside the original",
    model_types=("intern_vit_6b", "internvl_chat", "internvl"),
    preprocess=processor("CLIPImageProcessor"),
    signature=(BLOCK + "attn.qkv.weight", BLOCK + "ls1", "embeddings.class_embedding"),
    renames={
        "front_end.projection": "embeddings.patch_embedding",
        "front_end.prefix.cls": rows("embeddings.class_embedding"),
        "front_end.position.table": rows("embeddings.position_embedding"),
        **block(BLOCK, norm1="norm1", qkv="attn.qkv", proj="attn.proj", norm2="norm2"),
        **block(BLOCK, q_norm="attn.q_norm", k_norm="attn.k_norm"),
        **block(BLOCK, fc1="mlp.fc1", fc2="mlp.fc2", scale1="ls1", scale2="ls2"),
    },
    settings={
        **SETTINGS,
        **keys("intermediate_size", "qkv_bias", num_attention_heads=25, num_hidden_layers=48),
        **keys(image_size=(224, 224), layer_norm_eps=1e-6),
        "norm_type": INTERNVL.settings["norm_type"],
        "qk_normalization": INTERNVL.settings["use_qk_norm"],
        "use_flash_attn": To(None, flag),
        "use_moe": only(False),
    },
    # Published configs describe a mixture of experts that use_moe turns off.
    ignored=(
        *IGNORED,
        *("capacity_factor", "eval_capacity_factor", "ep_size", "laux_allreduce"),
        *("moe_coeff_ratio", "moe_intermediate_size", "moe_output_scale", "noisy_gate_policy"),
        *("num_experts", "num_routed_experts", "num_shared_experts"),
        *("shared_expert_intermediate_size", "use_residual", "use_rts", "use_weighted_residual"),
    ),
    decides={
        **TABLE_IN_FLOAT32,
        "position": "learned",
        "attention.qk_norm_eps": lambda found: found["norm_eps"],
        "pooling": "cls",
        "head": "none",
        "head_out": None,
    },
)
# AIMv2, and Ovis2's tower
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
        **block(BLOCK, norm1="rms_norm1", qkv="attention.*_proj", proj="attention.out_proj"),
        **block(BLOCK, norm2="rms_norm2", fc1=("ffn.gate_proj", "ffn.up_proj")),
        **block(BLOCK, fc2="ffn.down_proj"),
        "vit.norm": "rms_norm",
        "pooling.probe": rows("head.cls_token"),
        "pooling.kv": fused("head.k_proj", "head.v_proj"),
        "pooling.proj": "head.output_proj",
        "head.linear": "visual_projection",
    },
    drops=(r"logit_scale", r"embeddings\.position_ids"),
    settings={
        **SETTINGS,
        **keys(hidden_size=1024, num_hidden_layers=24, num_attention_heads=8, hidden_act="silu"),
        **keys(intermediate_size=2816, image_size=(224, 224), patch_size=14, rms_norm_eps=1e-5),
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
        **table_resize("bicubic_antialias", "float32"),
        "attention.proj_bias": lambda found: found["_qkv_bias"],
        "attention.qkv_bias": lambda found: BIAS[found["_qkv_bias"]],
        "mlp_bias": lambda found: found["_mlp_bias"],
    },
    needs=(
        *("heads", "norm_eps", "activation", "attention.proj_bias", "attention.qkv_bias"),
        *("mlp_bias", "pooling"),
    ),
    variants=PROJECTION,
)
OVIS2 = replace(
    AIMV2,
    name="hf-ovis2",
    verified=TINY + "; alone and in the whole model",
    model_types=("ovis2_vision",),
    preprocess=processor("Ovis2ImageProcessor"),
    prefixes=("transformer.",),
    drops=(*AIMV2.drops, r"head_(linear|norm)\..*"),
    settings=without(AIMV2.settings, "use_head"),
    decides={**AIMV2.decides, "pooling": "none"},
    ignored=(
        *(*IGNORED, "hidden_stride", "num_visual_indicator_tokens"),
        *("tokenize_function", "backbone_args"),
    ),
    remarks={"ovis2_vision": "the visual tokenizer (head_linear, head_norm) is not applied"},
)


def _cls_first(source: str) -> From:
    """A table whose last row is that of CLS."""
    return From((source,), lambda t: joined(t[-1:], t[:-1]))


# Llama 4's tower; its code has one activation and one eps, whatever the config says
LLAMA = "model.layers.{i}."
LLAMA4 = Family(
    name="hf-llama4",
    library=LIBRARY,
    verified=TINY + "; alone and in the whole model; CLS first here, last there",
    model_types=("llama4_vision_model",),
    preprocess=processor("Llama4ImageProcessor"),
    signature=("positional_embedding_vlm", "layernorm_pre.weight", LLAMA + "self_attn.o_proj"),
    renames={
        "front_end.projection.weight": conv_from_flat("patch_embedding.linear.weight"),
        "front_end.prefix.cls": rows("class_embedding"),
        "front_end.position.table": _cls_first("positional_embedding_vlm"),
        "front_end.norm": "layernorm_pre",
        **block(LLAMA, norm1="input_layernorm", norm2="post_attention_layernorm"),
        **block(LLAMA, qkv="self_attn.*_proj", proj="self_attn.o_proj"),
        **block(LLAMA, fc1="mlp.fc1", fc2="mlp.fc2"),
        "vit.norm": "layernorm_post",
    },
    drops=(r"vision_adapter\..*",),
    settings={
        **without(SETTINGS, "hidden_act"),
        **keys(hidden_size=768, num_hidden_layers=34, num_attention_heads=16, patch_size=14),
        **keys(intermediate_size=5632, image_size=(448, 448)),
        "rope_parameters": To("rope.theta", rope_theta("default")),
        **keys(rope_theta=10000.0),
    },
    ignored=(
        *IGNORED,
        *("hidden_act", "norm_eps"),
        *("vision_output_dim", "pixel_shuffle_ratio", "projector_input_dim"),
        *("projector_output_dim", "projector_dropout", "multi_modal_projector_bias"),
        *("vision_feature_select_strategy", "vision_feature_layer"),
    ),
    decides={
        **TABLE_IN_FLOAT32,  # the library has no other size
        "patch_bias": False,
        "cls_token": True,
        "attention.qkv_bias": "qkv",
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "gelu",
        "mlp": "plain",
        "pooling": "none",
        "position": "learned+rope2d",
        "rope.coordinates": "index",
        "rope.layout": "interleaved",
        "rope.offset": 1.0,
        "rope.first_axis": "columns",
    },
    needs=("heads", "rope.theta"),
    remarks={"llama4_vision_model": "the adapter (pixel shuffle and MLP) is not applied"},
)
FAMILIES = (
    *(CLIP, OWL, OWL2, KOSMOS2, SIGLIP, SIGLIP2, IDEFICS, IDEFICS3),
    *(INTERNVL, INTERNVIT, OVIS2, AIMV2, LLAMA4),
)
