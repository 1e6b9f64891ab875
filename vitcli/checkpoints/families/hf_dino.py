"""DINOv2, with and without registers, and DINOv3 as transformers stores them."""

from __future__ import annotations

from typing import Any

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hugging_face import (
    BACKBONE,
    IGNORED,
    LIBRARY,
    SETTINGS,
    TINY,
    flag,
)
from vitcli.checkpoints.family import Family, Renames, To, Variant, fused, only, rows

BLOCK = "encoder.layer.{i}."
# transformers 5 has other names in memory than in its files; the tables use those of the files.
ALIASES = (
    (r"^(encoder\.layer\.\d+\.attention\.)q_proj\.", r"\1attention.query."),
    (r"^(encoder\.layer\.\d+\.attention\.)k_proj\.", r"\1attention.key."),
    (r"^(encoder\.layer\.\d+\.attention\.)v_proj\.", r"\1attention.value."),
    (r"^(encoder\.layer\.\d+\.attention\.)o_proj\.", r"\1output.dense."),
    (r"^(encoder\.layer\.\d+\.mlp\.)down_proj\.", r"\1weights_out."),
)
RENAMES: Renames = {
    "front_end.projection": "embeddings.patch_embeddings.projection",
    "front_end.prefix.cls": rows("embeddings.cls_token"),
    "front_end.position.table": rows("embeddings.position_embeddings"),
    "vit.blocks.{i}.norm1": BLOCK + "norm1",
    "vit.blocks.{i}.attention.qkv": fused(
        BLOCK + "attention.attention.query",
        BLOCK + "attention.attention.key",
        BLOCK + "attention.attention.value",
    ),
    "vit.blocks.{i}.attention.proj": BLOCK + "attention.output.dense",
    "vit.blocks.{i}.scale1.gamma": BLOCK + "layer_scale1.lambda1",
    "vit.blocks.{i}.norm2": BLOCK + "norm2",
    "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.fc1",
    "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.fc2",
    "vit.blocks.{i}.scale2.gamma": BLOCK + "layer_scale2.lambda1",
    "vit.norm": "layernorm",
}
# The gated MLP uses SiLU whatever hidden_act says.
GATED = (
    Variant(
        when=(BLOCK + "mlp.weights_in",),
        settings={"mlp": "gated", "activation": "silu"},
        renames={
            "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.weights_in",
            "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.weights_out",
        },
    ),
    Variant(
        when=(BLOCK + "mlp.gate_proj",),
        settings={"activation": "silu"},
        renames={
            "vit.blocks.{i}.feed_forward.fc1": fused(
                BLOCK + "mlp.gate_proj", BLOCK + "mlp.up_proj"
            ),
            "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.weights_out",
        },
    ),
)
CLASSIFIER = Variant(
    when=("classifier",),
    settings={"pooling": "cls+mean", "head": "linear"},
    renames={"head.linear": "classifier"},
)
DINOV2_SETTINGS = {
    **SETTINGS,
    "layer_norm_eps": To("norm_eps", float, default=1e-6),
    "qkv_bias": To("attention.qkv_bias", {True: "qkv", False: "none"}),
    "layerscale_value": To("layer_scale", float),
    "use_swiglu_ffn": To("mlp", {True: "gated", False: "plain"}),
}
DINOV2_IGNORED = (*IGNORED, *BACKBONE, "mlp_ratio", "use_mask_token")

DINOV2 = Family(
    name="hf-dinov2",
    library=LIBRARY,
    verified=TINY + "; a trained DINOv2-S/14",
    model_types=("dinov2",),
    preprocess=processor("BitImageProcessor"),
    signature=(BLOCK + "layer_scale1.lambda1", BLOCK + "attention.attention.query.weight"),
    absent=("embeddings.register_tokens",),
    prefixes=("", "dinov2."),
    aliases=ALIASES,
    renames=RENAMES,
    drops=(r"embeddings\.mask_token",),
    settings=DINOV2_SETTINGS,
    ignored=DINOV2_IGNORED,
    decides={
        "pooling": "cls",
        "position_table.resize": "bicubic",
        "position_table.resize_dtype": "float32",
    },
    variants=(*GATED, CLASSIFIER),
)
DINOV2_REGISTERS = Family(
    name="hf-dinov2-registers",
    library=LIBRARY,
    verified=TINY,
    model_types=("dinov2_with_registers", "dinov2"),
    remarks={
        "dinov2": "model_type dinov2 with registers is remote code: position table resized as "
        "transformers' dinov2_with_registers does it"
    },
    preprocess=processor("BitImageProcessor"),
    signature=(*DINOV2.signature, "embeddings.register_tokens"),
    prefixes=("", "dinov2_with_registers."),
    aliases=ALIASES,
    renames={**RENAMES, "front_end.prefix.registers": rows("embeddings.register_tokens")},
    drops=(r"embeddings\.mask_token",),
    settings={
        **DINOV2_SETTINGS,
        "num_register_tokens": To("registers"),
        "interpolate_antialias": only(True),
        "interpolate_offset": only(0.0),
    },
    ignored=DINOV2_IGNORED,
    decides={**DINOV2.decides, "position_table.resize": "bicubic_antialias"},
    variants=(*GATED, CLASSIFIER),
)

LAYER = "layer.{i}."
QKV = tuple(f"{LAYER}attention.{part}_proj" for part in "qkv")


def _same_bias(value: Any) -> None:
    """q, k and v biases are seen in the tensors; the key only has to be a flag."""
    flag(value)


DINOV3 = Family(
    name="hf-dinov3",
    library=LIBRARY,
    verified=TINY,
    model_types=("dinov3_vit",),
    preprocess=processor("DINOv3ViTImageProcessor"),
    signature=(LAYER + "layer_scale1.lambda1", LAYER + "attention.q_proj.weight"),
    absent=("embeddings.position_embeddings",),
    aliases=((r"^model\.layer\.", "layer."),),
    renames={
        "front_end.projection": "embeddings.patch_embeddings",
        "front_end.prefix.cls": rows("embeddings.cls_token"),
        "front_end.prefix.registers": rows("embeddings.register_tokens"),
        "vit.blocks.{i}.norm1": LAYER + "norm1",
        "vit.blocks.{i}.attention.qkv": fused(*QKV),
        "vit.blocks.{i}.attention.proj": LAYER + "attention.o_proj",
        "vit.blocks.{i}.scale1.gamma": LAYER + "layer_scale1.lambda1",
        "vit.blocks.{i}.norm2": LAYER + "norm2",
        "vit.blocks.{i}.feed_forward.fc1": LAYER + "mlp.up_proj",
        "vit.blocks.{i}.feed_forward.fc2": LAYER + "mlp.down_proj",
        "vit.blocks.{i}.scale2.gamma": LAYER + "layer_scale2.lambda1",
        "vit.norm": "norm",
    },
    drops=(r"embeddings\.mask_token", r"rope_embeddings\.inv_freq"),
    settings={
        **SETTINGS,
        "intermediate_size": To("mlp_hidden"),
        "layer_norm_eps": To("norm_eps", float, default=1e-5),
        "layerscale_value": To("layer_scale", float),
        "use_gated_mlp": To("mlp", {True: "gated", False: "plain"}),
        "num_register_tokens": To("registers"),
        "rope_theta": To("rope.theta", float, default=100.0),
        "query_bias": To(None, _same_bias),
        "key_bias": To(None, _same_bias),
        "value_bias": To(None, _same_bias),
        "proj_bias": only(True),
        "mlp_bias": only(True),
    },
    # Shift, jitter and rescale move the coordinates while training only.
    ignored=(
        *IGNORED,
        *BACKBONE,
        "pos_embed_jitter",
        "pos_embed_rescale",
        "pos_embed_shift",
    ),
    decides={
        "pooling": "cls",
        "position": "rope2d",
        "rope.coordinates": "centered",
        "rope.layout": "half",
    },
    needs=("heads", "norm_eps", "activation", "rope.theta"),
    variants=(
        Variant(
            when=(LAYER + "mlp.gate_proj",),
            renames={
                "vit.blocks.{i}.feed_forward.fc1": fused(
                    LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"
                )
            },
        ),
        Variant(
            when=(QKV[0] + ".bias", QKV[2] + ".bias"),
            unless=(QKV[1] + ".bias",),
            renames={
                "vit.blocks.{i}.attention.qkv": None,
                "vit.blocks.{i}.attention.qkv.weight": fused(*(p + ".weight" for p in QKV)),
                "vit.blocks.{i}.attention.qkv.q_bias": QKV[0] + ".bias",
                "vit.blocks.{i}.attention.qkv.v_bias": QKV[2] + ".bias",
            },
        ),
    ),
)
FAMILIES = (DINOV2, DINOV2_REGISTERS, DINOV3)
