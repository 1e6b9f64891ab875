"""torchvision's VisionTransformer; its files hold a state dict and nothing beside it."""

from __future__ import annotations

from vitcli.checkpoints.family import Family, Variant, rows

BLOCK = "encoder.layers.encoder_layer_{i}."
VIT = Family(
    name="torchvision-vit",
    library="torchvision",
    verified="tiny random models, from state dicts",
    signature=("conv_proj.weight", "class_token", BLOCK + "self_attention.in_proj_weight"),
    aliases=((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
    renames={
        "front_end.projection": "conv_proj",
        "front_end.prefix.cls": rows("class_token"),
        "front_end.position.table": rows("encoder.pos_embedding"),
        "vit.blocks.{i}.norm1": BLOCK + "ln_1",
        "vit.blocks.{i}.attention.qkv.weight": BLOCK + "self_attention.in_proj_weight",
        "vit.blocks.{i}.attention.qkv.bias": BLOCK + "self_attention.in_proj_bias",
        "vit.blocks.{i}.attention.proj": BLOCK + "self_attention.out_proj",
        "vit.blocks.{i}.norm2": BLOCK + "ln_2",
        "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.0",
        "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.3",
        "vit.norm": "encoder.ln",
        "head.pre_logits": "heads.pre_logits",
        "head.linear": "heads.head",
    },
    fixed={
        "position": "learned",
        "position_table.resize": "bicubic_align_corners",
        "position_table.resize_dtype": "model",
        "norm_eps": 1e-6,
        "activation": "gelu",
        "pooling": "cls",
    },
    needs=("heads",),
    variants=(
        Variant(unless=("heads.head",), settings={"head": "none", "head_out": None}),
        Variant(when=("heads.head",), unless=("heads.pre_logits",), settings={"head": "linear"}),
        Variant(when=("heads.head", "heads.pre_logits"), settings={"head": "tanh_linear"}),
    ),
)
FAMILIES = (VIT,)
