"""What the families of timm share: its config.json laid flat, and the names both classes use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vitcli.checkpoints.families.hugging_face import flag, side, size
from vitcli.checkpoints.family import Renames, To, Variant, only, rows

LIBRARY = "timm"
BLOCK = "blocks.{i}."
RENAMES: Renames = {
    "front_end.projection": "patch_embed.proj",
    "front_end.prefix.cls": rows("cls_token"),
    "front_end.prefix.dist": rows("dist_token"),
    "front_end.prefix.registers": rows("reg_token"),
    "front_end.position.table": rows("pos_embed"),
    "front_end.norm": "norm_pre",
    "vit.blocks.{i}.norm1": BLOCK + "norm1",
    "vit.blocks.{i}.attention.proj": BLOCK + "attn.proj",
    "vit.blocks.{i}.norm2": BLOCK + "norm2",
    "vit.blocks.{i}.feed_forward.fc1": BLOCK + "mlp.fc1",
    "vit.blocks.{i}.feed_forward.fc2": BLOCK + "mlp.fc2",
    "vit.norm": "norm",
    "pool_norm": "fc_norm",
}
QKV: Renames = {
    "vit.blocks.{i}.attention.qkv": BLOCK + "attn.qkv",
    "vit.blocks.{i}.attention.q_norm": BLOCK + "attn.q_norm",
    "vit.blocks.{i}.attention.k_norm": BLOCK + "attn.k_norm",
}
LAYER_SCALE: Renames = {
    "vit.blocks.{i}.scale1.gamma": BLOCK + "ls1.gamma",
    "vit.blocks.{i}.scale2.gamma": BLOCK + "ls2.gamma",
}
GAMMAS: Renames = {
    "vit.blocks.{i}.scale1.gamma": BLOCK + "gamma_1",
    "vit.blocks.{i}.scale2.gamma": BLOCK + "gamma_2",
}
MAP: Renames = {
    "pooling.probe": rows("attn_pool.latent"),
    "pooling.q": "attn_pool.q",
    "pooling.kv": "attn_pool.kv",
    "pooling.proj": "attn_pool.proj",
    "pooling.norm": "attn_pool.norm",
    "pooling.feed_forward.fc1": "attn_pool.mlp.fc1",
    "pooling.feed_forward.fc2": "attn_pool.mlp.fc2",
}
CLASSIFIER = Variant(
    when=("head.weight",),
    unless=("head_dist.weight",),
    settings={"head": "linear"},
    renames={"head.linear": "head"},
)
NO_CLASSIFIER = Variant(
    unless=("head.weight",),
    settings={"head": "none", "head_out": None},
)


def patch_bias(told: Mapping[str, Any]) -> bool:
    """The patch projection has a bias exactly where no norm follows it."""
    return not told["ln_pre"]


RESIZE = {"position_table.resize": "bicubic_antialias", "position_table.resize_dtype": "float32"}

POOLS = {"token": "cls", "avg": "mean", "map": "map", "": "none"}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
SETTINGS = {
    "img_size": To("image_size", size),
    "patch_size": To("patch_size", side),
    "in_chans": To("channels"),
    "embed_dim": To("hidden"),
    "depth": To("depth"),
    "num_heads": To("heads"),
    "architecture.num_heads": To("heads"),
    "architecture.norm_eps": To("norm_eps"),
    "norm_layer": To("norm_eps", {"layernorm": 1e-6, "rmsnorm": 1e-6}),
    "global_pool": To("pooling", POOLS),
    "architecture.global_pool": To("pooling", POOLS),
    "class_token": To("cls_token", flag),
    "architecture.class_token": To("cls_token", flag),
    "architecture.reg_tokens": To("registers"),
    "qk_norm": To(None, flag),
    "dynamic_img_pad": only(False),
}
IGNORED = (
    # the name stands for the architecture.* settings
    "architecture",
    # said for the reader, not used to build the model
    "label_names",
    "label_descriptions",
    "labels",
    "num_features",
    # what the tensors show
    "init_values",
    "mlp_ratio",
    "num_classes",
    "qkv_bias",
    "no_embed_class",
    # how images of another size are let in
    "dynamic_img_size",
    "strict_img_size",
    # active while training only
    "attn_drop_rate",
    "drop_path_rate",
    "drop_rate",
    "patch_drop_rate",
    "pos_drop_rate",
    "proj_drop_rate",
)
# What a model argument that is given takes the place of.
_REPLACES = {"norm_layer": "norm_eps", "num_reg_tokens": "reg_tokens"}


def flattened(
    architectures: Mapping[str, Mapping[str, Any]],
) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """timm's config.json as flat settings, read as timm's factory does.

    The architecture's settings come first, then `pretrained_cfg` where it may speak, then
    `model_args`; `global_pool` at the root is timm's note to the reader.
    """

    def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
        pretrained = config.get("pretrained_cfg") or {}
        arguments = config.get("model_args") or {}
        name = str(config.get("architecture"))
        if name not in architectures:
            raise ValueError(f"architecture {name!r}")
        flat = {
            k: v
            for k, v in config.items()
            if k not in ("pretrained_cfg", "model_args", "global_pool")
        }
        given = {_REPLACES.get(key, key) for key in arguments}
        told = {k: v for k, v in architectures[name].items() if k not in given}
        flat |= {f"architecture.{key}": value for key, value in told.items()}
        dynamic = arguments.get("dynamic_img_size") or arguments.get("strict_img_size") is False
        if pretrained.get("fixed_input_size") and pretrained.get("input_size") and not dynamic:
            flat["img_size"] = pretrained["input_size"][1:]
        return flat | arguments

    return flatten
