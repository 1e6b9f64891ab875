"""CLIP, SigLIP, Idefics and InternViT as transformers stores them; InternViT also as published."""

from __future__ import annotations

from dataclasses import replace

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hf_vit import (
    IGNORED,
    LIBRARY,
    SETTINGS,
    TABLE_IN_MODEL_DTYPE,
    TINY,
)
from vitcli.checkpoints.family import (
    Family,
    Renames,
    To,
    Variant,
    conv_from_linear,
    flag,
    fused,
    last_two_thirds,
    only,
    rows,
    third,
)

BLOCK = "encoder.layers.{i}."
BLOCKS: Renames = {
    "vit.blocks.{i}.norm1": BLOCK + "layer_norm1",
    "vit.blocks.{i}.attention.qkv": fused(*(f"{BLOCK}self_attn.{part}_proj" for part in "qkv")),
    "vit.blocks.{i}.attention.proj": BLOCK + "self_attn.out_proj",
    "vit.blocks.{i}.norm2": BLOCK + "layer_norm2",
    "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.fc1",
    "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.fc2",
}
DROPS = (r"logit_(scale|bias)", r"embeddings\.position_ids")
"""What a whole CLIP or SigLIP model has beside its towers, and an old buffer."""


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
    aliases=((r"^encoder\.layer\.", "encoder.layers."),),  # AltCLIP as transformers 5 writes it
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
        "image_size": To("image_size", SETTINGS["image_size"].read, default=(224, 224)),
        "hidden_size": To("hidden", default=768),
        "patch_size": To("patch_size", SETTINGS["patch_size"].read, default=32),
        "hidden_act": To("activation", SETTINGS["hidden_act"].read, default="quick_gelu"),
        "intermediate_size": To("mlp_hidden", default=3072),
        "layer_norm_eps": To("norm_eps", float, default=1e-5),
        "architectures": To("head", _head_of),
    },
    ignored=(*IGNORED, "projection_dim"),
    # The pooled vector is LN(CLS); the tokens themselves get no final norm.
    decides={**TABLE_IN_MODEL_DTYPE, "patch_bias": False, "pooling": "cls"},
    variants=(
        Variant(when=("visual_projection",), settings={"head": "projection"}),
        Variant(when=("logit_scale",), settings={"head": "projection"}),  # a whole CLIP has one
        # CLIPForImageClassification reads the mean of the patches, without a norm.
        Variant(
            when=("classifier",),
            settings={"pooling": "mean", "head": "linear"},
            renames={"pool_norm": None, "head.linear": "classifier"},
            drops=(r"post_layernorm\.(weight|bias)", r"visual_projection\.weight"),
        ),
    ),
)
PROBE = "head.attention.in_proj_"
MAP: Renames = {
    "pooling.probe": rows("head.probe"),
    "pooling.q.weight": third(0, PROBE + "weight"),
    "pooling.q.bias": third(0, PROBE + "bias"),
    "pooling.kv.weight": last_two_thirds(PROBE + "weight"),
    "pooling.kv.bias": last_two_thirds(PROBE + "bias"),
    "pooling.proj": "head.attention.out_proj",
    "pooling.norm": "head.layernorm",
    "pooling.feed_forward.fc1": "head.mlp.fc1",
    "pooling.feed_forward.fc2": "head.mlp.fc2",
}
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
        "image_size": To("image_size", SETTINGS["image_size"].read, default=(224, 224)),
        "hidden_size": To("hidden", default=768),
        "patch_size": To("patch_size", SETTINGS["patch_size"].read, default=16),
        "hidden_act": To("activation", SETTINGS["hidden_act"].read, default="gelu_tanh"),
        "intermediate_size": To("mlp_hidden", default=3072),
        "layer_norm_eps": To("norm_eps", float, default=1e-6),
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
SIGLIP2 = Family(
    name="hf-siglip2-naflex",
    library=LIBRARY,
    verified=TINY + "; images of one size, without padding",
    model_types=("siglip2", "siglip2_vision_model"),
    preprocess=processor("Siglip2ImageProcessor"),
    signature=SIGLIP.signature,
    absent=SIGLIP.absent,
    ranks={"embeddings.patch_embedding.weight": 2},
    prefixes=SIGLIP.prefixes,
    renames={
        **{ours: rule for ours, rule in SIGLIP.renames.items() if ours != "front_end.projection"},
        "front_end.projection.weight": conv_from_linear("embeddings.patch_embedding.weight"),
        "front_end.projection.bias": "embeddings.patch_embedding.bias",
    },
    drops=DROPS,
    settings={
        **{key: to for key, to in SIGLIP.settings.items() if key != "image_size"},
        "num_patches": To(None),  # the table's length shows it
    },
    ignored=SIGLIP.ignored,
    decides={
        "position_table.resize": "bilinear_antialias",
        "position_table.resize_dtype": "float32",
    },
    variants=SIGLIP.variants,
)
# The same names without a head; a patch has the row of the cell of the table that it falls in.
IDEFICS = replace(
    SIGLIP,
    name="hf-idefics2",
    verified=TINY + "; images without padding",
    model_types=("idefics2", "idefics2_vision"),
    preprocess=processor("Idefics2ImageProcessor"),
    absent=(*SIGLIP.absent, "head.probe", "classifier"),
    renames={k: v for k, v in SIGLIP.renames.items() if k not in MAP},
    settings={
        **SIGLIP.settings,
        "patch_size": To("patch_size", SETTINGS["patch_size"].read, default=32),
    },
    ignored=(*SIGLIP.ignored, "max_image_size", "size", "use_base_siglip"),
    decides={
        "position_table.resize": "buckets",
        "position_table.resize_dtype": "model",
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
    settings={
        **IDEFICS.settings,
        "hidden_size": To("hidden", default=1152),
        "num_attention_heads": To("heads", default=16),
    },
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
        "vit.blocks.{i}.norm1": LAYER + "layernorm_before",
        "vit.blocks.{i}.attention.qkv": fused(*(f"{LAYER}attention.{part}_proj" for part in "qkv")),
        "vit.blocks.{i}.attention.q_norm": LAYER + "attention.q_norm",
        "vit.blocks.{i}.attention.k_norm": LAYER + "attention.k_norm",
        "vit.blocks.{i}.attention.proj": LAYER + "attention.projection_layer",
        "vit.blocks.{i}.scale1.gamma": LAYER + "lambda_1",
        "vit.blocks.{i}.norm2": LAYER + "layernorm_after",
        "vit.blocks.{i}.feed_forward.fc1": LAYER + "mlp.fc1",
        "vit.blocks.{i}.feed_forward.fc2": LAYER + "mlp.fc2",
        "vit.blocks.{i}.scale2.gamma": LAYER + "lambda_2",
        "vit.norm": "layernorm",
    },
    drops=(r"embeddings\.mask_token",),
    settings={
        **SETTINGS,
        "num_attention_heads": To("heads", default=16),
        "num_hidden_layers": To("depth", default=24),
        "image_size": To("image_size", SETTINGS["image_size"].read, default=(448, 448)),
        "intermediate_size": To("mlp_hidden"),
        "layer_norm_eps": To("norm_eps", float, default=1e-6),
        "norm_type": To("norm", {"layer_norm": "layernorm", "rms_norm": "rmsnorm"}),
        "attention_bias": To("attention.qkv_bias", {True: "qkv", False: "none"}),
        "use_qk_norm": To("attention.qk_norm", {True: "width", False: "none"}),
        "layer_scale_init_value": To("layer_scale", float),
        "use_absolute_position_embeddings": only(True),
    },
    # Mean pooling puts nn.Identity for the final norm, which the tensors show.
    ignored=(*IGNORED, "use_mask_token", "use_mean_pooling"),
    decides={
        **TABLE_IN_MODEL_DTYPE,
        "attention.qk_norm_eps": 1e-6,
        "pooling": "none",
    },
)
INTERNVIT = Family(
    name="internvit",
    library="OpenGVLab InternVL",
    verified="tiny random models of transformers under its keys; once beside the original",
    model_types=("intern_vit_6b", "internvl_chat", "internvl"),
    preprocess=processor("CLIPImageProcessor"),
    signature=(
        BLOCK + "attn.qkv.weight",
        BLOCK + "ls1",
        "embeddings.class_embedding",
    ),
    renames={
        "front_end.projection": "embeddings.patch_embedding",
        "front_end.prefix.cls": rows("embeddings.class_embedding"),
        "front_end.position.table": rows("embeddings.position_embedding"),
        "vit.blocks.{i}.norm1": BLOCK + "norm1",
        "vit.blocks.{i}.attention.qkv": BLOCK + "attn.qkv",
        "vit.blocks.{i}.attention.q_norm": BLOCK + "attn.q_norm",
        "vit.blocks.{i}.attention.k_norm": BLOCK + "attn.k_norm",
        "vit.blocks.{i}.attention.proj": BLOCK + "attn.proj",
        "vit.blocks.{i}.scale1.gamma": BLOCK + "ls1",
        "vit.blocks.{i}.norm2": BLOCK + "norm2",
        "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.fc1",
        "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.fc2",
        "vit.blocks.{i}.scale2.gamma": BLOCK + "ls2",
    },
    settings={
        **SETTINGS,
        "num_hidden_layers": To("depth", default=48),
        "num_attention_heads": To("heads", default=25),
        "image_size": To("image_size", SETTINGS["image_size"].read, default=(224, 224)),
        "intermediate_size": To("mlp_hidden"),
        "layer_norm_eps": To("norm_eps", float, default=1e-6),
        "norm_type": To("norm", {"layer_norm": "layernorm", "rms_norm": "rmsnorm"}),
        "qkv_bias": To("attention.qkv_bias", {True: "qkv", False: "none"}),
        "qk_normalization": To("attention.qk_norm", {True: "width", False: "none"}),
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
        "position": "learned",
        "position_table.resize": "bicubic",
        "position_table.resize_dtype": "float32",
        "attention.qk_norm_eps": lambda found: found["norm_eps"],
        "pooling": "cls",
        "head": "none",
        "head_out": None,
    },
)
FAMILIES = (CLIP, SIGLIP, SIGLIP2, IDEFICS, IDEFICS3, INTERNVL, INTERNVIT)
