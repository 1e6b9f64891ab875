"""InternViT as OpenGVLab publishes it, alone or inside InternVL: 300M and 6B style."""

from __future__ import annotations

from vitcli.checkpoints.families.hugging_face import IGNORED, SETTINGS, flag
from vitcli.checkpoints.family import Family, To, rows

BLOCK = "encoder.layers.{i}."
INTERNVIT = Family(
    name="internvit",
    library="OpenGVLab InternVL",
    verified="tiny random models of transformers under its keys; once beside the original",
    model_types=("intern_vit_6b", "internvl_chat", "internvl"),
    signature=(BLOCK + "attn.qkv.weight", BLOCK + "ls1", "embeddings.class_embedding"),
    prefixes=("", "vision_model."),
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
    drops=(r"language_model\..*", r"mlp1\..*"),
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
    },
    ignored=IGNORED,
    fixed={
        "position": "learned",
        "position_table.resize": "bicubic",
        "position_table.resize_dtype": "float32",
        "attention.qk_norm_eps": lambda told: told["norm_eps"],
        "pooling": "cls",
        "head": "none",
        "head_out": None,
    },
)
FAMILIES = (INTERNVIT,)
