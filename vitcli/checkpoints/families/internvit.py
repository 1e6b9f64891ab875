"""InternViT, 300M and 6B style: as transformers stores it, and as OpenGVLab publishes it."""

from __future__ import annotations

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hugging_face import (
    IGNORED,
    LIBRARY,
    SETTINGS,
    TABLE_IN_MODEL_DTYPE,
    TINY,
    flag,
)
from vitcli.checkpoints.family import Family, To, fused, only, rows

BLOCK = "encoder.layer.{i}."
INTERNVL = Family(
    name="hf-internvl",
    library=LIBRARY,
    verified=TINY,
    model_types=("internvl", "internvl_vision"),
    preprocess=processor("GotOcr2ImageProcessor"),
    signature=(BLOCK + "lambda_1", BLOCK + "attention.q_proj.weight"),
    renames={
        "front_end.projection": "embeddings.patch_embeddings.projection",
        "front_end.prefix.cls": rows("embeddings.cls_token"),
        "front_end.position.table": rows("embeddings.position_embeddings"),
        "vit.blocks.{i}.norm1": BLOCK + "layernorm_before",
        "vit.blocks.{i}.attention.qkv": fused(*(f"{BLOCK}attention.{part}_proj" for part in "qkv")),
        "vit.blocks.{i}.attention.q_norm": BLOCK + "attention.q_norm",
        "vit.blocks.{i}.attention.k_norm": BLOCK + "attention.k_norm",
        "vit.blocks.{i}.attention.proj": BLOCK + "attention.projection_layer",
        "vit.blocks.{i}.scale1.gamma": BLOCK + "lambda_1",
        "vit.blocks.{i}.norm2": BLOCK + "layernorm_after",
        "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.fc1",
        "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.fc2",
        "vit.blocks.{i}.scale2.gamma": BLOCK + "lambda_2",
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

ORIGINAL_BLOCK = "encoder.layers.{i}."
INTERNVIT = Family(
    name="internvit",
    library="OpenGVLab InternVL",
    verified="tiny random models of transformers under its keys; once beside the original",
    model_types=("intern_vit_6b", "internvl_chat", "internvl"),
    preprocess=processor("CLIPImageProcessor"),
    signature=(
        ORIGINAL_BLOCK + "attn.qkv.weight",
        ORIGINAL_BLOCK + "ls1",
        "embeddings.class_embedding",
    ),
    renames={
        "front_end.projection": "embeddings.patch_embedding",
        "front_end.prefix.cls": rows("embeddings.class_embedding"),
        "front_end.position.table": rows("embeddings.position_embedding"),
        "vit.blocks.{i}.norm1": ORIGINAL_BLOCK + "norm1",
        "vit.blocks.{i}.attention.qkv": ORIGINAL_BLOCK + "attn.qkv",
        "vit.blocks.{i}.attention.q_norm": ORIGINAL_BLOCK + "attn.q_norm",
        "vit.blocks.{i}.attention.k_norm": ORIGINAL_BLOCK + "attn.k_norm",
        "vit.blocks.{i}.attention.proj": ORIGINAL_BLOCK + "attn.proj",
        "vit.blocks.{i}.scale1.gamma": ORIGINAL_BLOCK + "ls1",
        "vit.blocks.{i}.norm2": ORIGINAL_BLOCK + "norm2",
        "vit.blocks.{i}.feed_forward.fc1": ORIGINAL_BLOCK + "mlp.fc1",
        "vit.blocks.{i}.feed_forward.fc2": ORIGINAL_BLOCK + "mlp.fc2",
        "vit.blocks.{i}.scale2.gamma": ORIGINAL_BLOCK + "ls2",
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
FAMILIES = (INTERNVL, INTERNVIT)
