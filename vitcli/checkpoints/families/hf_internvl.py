"""The vision tower of InternVL as transformers stores it: 300M and 6B style."""

from __future__ import annotations

from vitcli.checkpoints.families.hugging_face import (
    IGNORED,
    LIBRARY,
    SETTINGS,
    TABLE_IN_MODEL_DTYPE,
    TINY,
)
from vitcli.checkpoints.family import Family, To, fused, only, rows

BLOCK = "encoder.layer.{i}."
INTERNVL = Family(
    name="hf-internvl",
    library=LIBRARY,
    verified=TINY,
    model_types=("internvl", "internvl_vision"),
    signature=(BLOCK + "lambda_1", BLOCK + "attention.q_proj.weight"),
    prefixes=("", "vision_tower.", "model.vision_tower."),
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
    drops=(
        r"embeddings\.mask_token",
        r"(model\.)?language_model\..*",
        r"(model\.)?multi_modal_projector\..*",
        r"lm_head\..*",
    ),
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
    fixed={
        **TABLE_IN_MODEL_DTYPE,
        "attention.qk_norm_eps": 1e-6,
        "pooling": "none",
    },
)
FAMILIES = (INTERNVL,)
