"""timm's VisionTransformer, and timm's config.json."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hf_vit import IGNORED as HF_IGNORED
from vitcli.checkpoints.family import (
    Configs,
    Family,
    Renames,
    To,
    Variant,
    block,
    flag,
    only,
    rows,
    side,
    size,
    table_resize,
    without,
)
from vitcli.checkpoints.preprocessing import (
    FILTERS,
    IMAGENET,
    Preprocessing,
    Settings,
    is_list,
    pair,
    refuse,
    section,
    triple,
    validated,
)
from vitcli.checkpoints.tower import tower_config
from vitcli.config.schema import EncoderConfig, PreprocessConfig
from vitcli.config.yaml import read_yaml
from vitcli.stats import is_number

LIBRARY = "timm"
BLOCK = "blocks.{i}."
RENAMES: Renames = {
    "front_end.projection": "patch_embed.proj",
    "front_end.patch_norm": "patch_embed.norm",
    "front_end.prefix.cls": rows("cls_token"),
    "front_end.prefix.dist": rows("dist_token"),
    "front_end.prefix.registers": rows("reg_token"),
    "front_end.position.table": rows("pos_embed"),
    "front_end.norm": "norm_pre",
    **block(BLOCK, norm1="norm1", proj="attn.proj", norm2="norm2", fc1="mlp.fc1", fc2="mlp.fc2"),
    "vit.norm": "norm",
    "pool_norm": "fc_norm",
}
QKV = block(BLOCK, qkv="attn.qkv", q_norm="attn.q_norm", k_norm="attn.k_norm")
LAYER_SCALE = block(BLOCK, scale1="ls1.gamma", scale2="ls2.gamma")
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
# DeiT III's and Eva's layer scale
GAMMA_SCALES = Variant(
    when=(BLOCK + "gamma_1",), renames=block(BLOCK, scale1="gamma_1", scale2="gamma_2")
)
NO_CLASSIFIER = Variant(unless=("head.weight",), settings={"head": "none", "head_out": None})


def patch_bias(found: Mapping[str, Any]) -> bool:
    """The patch projection has a bias exactly where no norm follows it."""
    return not found["ln_pre"]


RESIZE = table_resize("bicubic_antialias", "float32")
POOLS = {"token": "cls", "avg": "mean", "map": "map", "": "none"}
NAMES = ("gelu", "gelu_tanh", "quick_gelu", "silu")
ACTIVATIONS = {**{name: name for name in NAMES}, "swish": "silu"}


def anywhere(**settings: To) -> dict[str, To]:
    """Settings that an architecture's name stands for, and that model arguments may say too."""
    return {f"{at}{key}": to for at in ("architecture.", "") for key, to in settings.items()}


SETTINGS = {
    "img_size": To("image_size", size),
    "patch_size": To("patch_size", side),
    "in_chans": To("channels"),
    "embed_dim": To("hidden"),
    "depth": To("depth"),
    **anywhere(num_heads=To("heads")),
    "architecture.norm_eps": To("norm_eps"),
    "norm_layer": To("norm_eps", {"layernorm": 1e-6, "rmsnorm": 1e-6}),
    **anywhere(global_pool=To("pooling", POOLS), class_token=To("cls_token", flag)),
    "architecture.reg_tokens": To("registers"),
    "qk_norm": To(None, flag),
    "dynamic_img_pad": only(False),
}
IGNORED = (
    *HF_IGNORED,
    # the name stands for the architecture.* settings
    "architecture",
    # said for the reader, not used to build the model
    *("label_names", "label_descriptions", "labels", "num_features"),
    # what the tensors show
    *("init_values", "mlp_ratio", "num_classes", "qkv_bias", "no_embed_class"),
    # how images of another size are let in
    *("dynamic_img_size", "strict_img_size"),
    # active while training only
    *("attn_drop_rate", "drop_path_rate", "drop_rate", "patch_drop_rate"),
    *("pos_drop_rate", "proj_drop_rate"),
)
COMPUTED_OTHERWISE = {
    r"vit_s?relpos_.*_rpn_.*": "norms of what is added to the sum, relative positions by an MLP",
    r"vit_s?relpos_.*|test_vit_relpos": "relative positions by an MLP",
    r"eva02_enormous_.*": "norms of what is added to the sum",
    r"qwen3_vit_\d+m(_merge)?": "a classifier without the parameters of its norm",
}
"""What this encoder does not compute, by the architectures that do."""
# What a model argument that is given takes the place of.
_REPLACES = {"norm_layer": "norm_eps", "num_reg_tokens": "reg_tokens", "pos_embed": "position"}


@functools.cache
def architectures(kind: str) -> Mapping[str, Mapping[str, Any]]:
    """The settings that a name of timm stands for, by name; `kind` is a key of the YAML file."""
    data = read_yaml(Path(__file__).with_name("timm_architectures.yaml")).data
    registers = {
        name: int(count) for count, names in data["registers"].items() for name in names.split()
    }
    return {
        name: {"reg_tokens": registers.get(name, 0), **group["settings"], "num_heads": int(heads)}
        for group in data[kind]
        for heads, names in group["heads"].items()
        for name in names.split()
    }


def flattened(kind: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """timm's config.json as flat settings, read as timm's factory does; see `architectures`.

    The architecture's settings come first, then `pretrained_cfg` where it may speak, then
    `model_args`; `global_pool` at the root is timm's note to the reader.
    """

    def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
        config = tower_config(config)[0]  # transformers' timm_wrapper, as Perception LM has it
        pretrained = config.get("pretrained_cfg") or {}
        if "pretrained_cfg" not in config and "input_size" in config:  # the form of 2021
            pretrained, config = config, {"architecture": config["architecture"]}
        arguments = config.get("model_args") or {}
        name = str(config.get("architecture")).partition(".")[0]  # the tag names the weights
        known = architectures(kind)
        if name not in known:
            reasons = (why for p, why in COMPUTED_OTHERWISE.items() if re.fullmatch(p, name))
            why = next((f" ({why})" for why in reasons), "")
            raise ValueError(f"architecture {name!r}{why}")
        # What the name decides is for model_args alone to change, not for other keys at the root.
        flat = without(config, "pretrained_cfg", "model_args", "global_pool", *known[name])
        if arguments.get("ref_feat_shape") and known[name].get("rope_type") == "index":
            raise ValueError(f"architecture {name!r} with ref_feat_shape")
        given = {_REPLACES.get(key, key) for key in arguments}
        found = {k: v for k, v in known[name].items() if k not in given}
        flat |= {f"architecture.{key}": value for key, value in found.items()}
        dynamic = arguments.get("dynamic_img_size") or arguments.get("strict_img_size") is False
        if pretrained.get("fixed_input_size") and pretrained.get("input_size") and not dynamic:
            flat["img_size"] = pretrained["input_size"][1:]
        return flat | arguments

    return flatten


def from_timm(settings: Settings, *, source: str = "config.json") -> PreprocessConfig:
    """The preprocessing of a timm `config.json` (its `pretrained_cfg`), as timm's eval transform.

    The size is `input_size`; keys that are missing or empty take timm's defaults.
    """
    given = section(settings, "pretrained_cfg", source) or settings
    defaults = {"input_size": (3, 224, 224), "interpolation": "bicubic", "crop_pct": 0.875}
    defaults |= {"crop_mode": "center", **IMAGENET}
    merged: dict[str, Any] = {key: given.get(key) or value for key, value in defaults.items()}
    channels, *sides = merged["input_size"] if is_list(merged["input_size"], 3) else (0,)
    if channels != 3:
        refuse(source, "input_size", merged["input_size"], "3, height, width expected")
    size, pct = pair(sides, "input_size", source), merged["crop_pct"]
    if not is_number(pct) or pct <= 0:
        refuse(source, "crop_pct", pct, "a number above zero expected")
    if merged["crop_mode"] not in ("center", "squash"):
        refuse(source, "crop_mode", merged["crop_mode"], "center and squash are handled")
    if merged["interpolation"] not in FILTERS:
        known = ", ".join(FILTERS)
        refuse(source, "interpolation", merged["interpolation"], f"known: {known}")
    resized = (math.floor(size[0] / pct), math.floor(size[1] / pct))
    squash = merged["crop_mode"] == "squash"
    config = {
        "resize": "squash" if squash else "shortest",
        "resize_size": resized,
        "filter": merged["interpolation"],
        "crop_size": None if squash and resized == size else size,
        "crop_rounding": "round",
        "mean": triple(merged["mean"], "mean", source),
        "std": triple(merged["std"], "std", source),
    }
    return validated(config, source)


_PROCESSOR = processor(None)


def preprocess(configs: Configs, encoder: EncoderConfig) -> Preprocessing | None:
    """timm's own config.json, else a processor of transformers."""
    config = configs.get("config.json", {})
    if "architecture" in config:  # a whole model around it has a processor of its own
        return Preprocessing(from_timm(config), "config.json")
    return _PROCESSOR(configs, encoder)


SPLIT_GATE = Variant(
    when=(BLOCK + "mlp.fc1_g.weight",), renames=block(BLOCK, fc1=("mlp.fc1_g", "mlp.fc1_x"))
)
# The first half of w12 is the gate.
PACKED_GATE = Variant(
    when=(BLOCK + "mlp.w12",),
    settings={"mlp": "gated", "activation": "silu"},
    renames=block(BLOCK, fc1="mlp.w12", fc2="mlp.w3"),
)
# VisionTransformer, and the originals of DeiT, MAE and I-JEPA
SIGNATURE = ("patch_embed.proj.weight", BLOCK + "attn.qkv.weight", BLOCK + "norm1.weight")
# Rank-5 patches are Qwen's; q_bias is Eva's.
BIASES = tuple(
    f"{BLOCK}attn.{at}relative_position_bias_table" for at in ("", "rel_pos.")
)  # BEiT's, and those of timm's own
ABSENT = ("merger.ln_q.weight", "merger.norm.weight", BLOCK + "attn.q_bias", *BIASES)
NEEDS = ("heads", "norm_eps", "activation", "pooling")
# Each head predicts for itself and their mean is the answer; there is no one pooled vector.
DISTILLED = Variant(
    when=("head.weight", "head_dist.weight"),
    settings={"pooling": "none", "head": "distilled"},
    renames={"head.cls": "head", "head.dist": "head_dist"},
)
# Without its two heads timm gives the mean of CLS and the distillation token.
HEADLESS_DISTILLED = Variant(
    when=("dist_token",), unless=("head_dist.weight",), settings={"pooling": "none"}
)
VARIANTS = (CLASSIFIER, NO_CLASSIFIER, DISTILLED, HEADLESS_DISTILLED)
VIT = Family(
    name="timm-vit",
    library=LIBRARY,
    preprocess=preprocess,
    verified="tiny random models, from files with and without config.json",
    signature=SIGNATURE,
    absent=(*ABSENT, BLOCK + "gamma_1"),
    distinguished_by=("position", "learned"),
    prefixes=("", "timm_model."),
    renames={**RENAMES, **QKV, **LAYER_SCALE, **MAP},
    settings={
        **SETTINGS,
        **anywhere(act_layer=To("activation", ACTIVATIONS), proj_bias=To("_biased", flag)),
        "architecture.position": To("position"),
        "architecture.patch_norm": To("patch_norm"),
        "architecture.mlp": To("mlp"),
        "reg_tokens": To("registers"),
        "pre_norm": To("ln_pre", flag),
        "pos_embed": To("position", {"learn": "learned", "none": "none", "": "none"}, "learned"),
        **dict.fromkeys(("pool_include_prefix", "scale_attn_norm", "scale_mlp_norm"), only(False)),
    },
    ignored=(*IGNORED, "fc_norm", "final_norm", "fix_init", "weight_init"),
    decides={
        **RESIZE,
        "patch_bias": patch_bias,
        "attention.qk_norm_eps": lambda found: found["norm_eps"],
        **dict.fromkeys(("attention.proj_bias", "mlp_bias"), lambda found: found["_biased"]),
    },
    needs=NEEDS,
    unproven=("position",),
    flatten=flattened("vision_transformers"),
    any_prefix_rows=True,
    variants=(*VARIANTS, SPLIT_GATE),
)
FAMILIES = (VIT,)
