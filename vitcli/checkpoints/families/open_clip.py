"""CLIP's vision tower as OpenAI and OpenCLIP store it, the latter also around a timm model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vitcli.checkpoints.families import timm, timm_eva
from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.family import (
    Configs,
    Family,
    Renames,
    To,
    Variant,
    block,
    only,
    probe_pooling,
    rows,
    side,
    size,
    table_resize,
    transposed,
)
from vitcli.checkpoints.preprocessing import (
    CLIP,
    HALF,
    Preprocessing,
    Settings,
    pair,
    refuse,
    section,
    triple,
    validated,
)
from vitcli.config.schema import EncoderConfig, PreprocessConfig


def from_open_clip(
    settings: Settings, *, source: str = "open_clip_config.json"
) -> PreprocessConfig:
    """The preprocessing of an OpenCLIP `open_clip_config.json`, as its eval transform does it.

    The size is the vision tower's `image_size` where the file describes one, as in open_clip.
    """
    given = section(settings, "preprocess_cfg", source)
    model = section(settings, "model_cfg", source)
    defaults = {"size": 224, "mode": "RGB", "interpolation": "bicubic", "resize_mode": "shortest"}
    defaults |= {"fill_color": 0, **CLIP}
    merged: dict[str, Any] = {**defaults, **{k: v for k, v in given.items() if v is not None}}
    for key, value in merged.items():
        if key not in defaults:
            refuse(source, f"preprocess_cfg.{key}", value, "not handled")
    if merged["mode"] != "RGB":
        refuse(source, "preprocess_cfg.mode", merged["mode"], "only RGB is handled")
    vision = model.get("vision_cfg")
    if isinstance(vision, Mapping):
        size = pair(vision.get("image_size", 224), "model_cfg.vision_cfg.image_size", source)
    else:
        size = pair(merged["size"], "preprocess_cfg.size", source)
    rule, name = merged["resize_mode"], merged["interpolation"]
    if rule not in ("shortest", "squash"):
        refuse(source, "preprocess_cfg.resize_mode", rule, "shortest and squash are handled")
    if name not in ("bicubic", "bilinear", "random"):  # random is for training; then bicubic
        refuse(source, "preprocess_cfg.interpolation", name, "bicubic or bilinear expected")
    # For a size that is not square open_clip's shortest is bicubic whatever it was found.
    bilinear = name == "bilinear" and (rule == "squash" or size[0] == size[1])
    config = {
        "resize": rule,
        "resize_size": size,
        "filter": "bilinear" if bilinear else "bicubic",
        "crop_size": size if rule == "shortest" else None,
        "crop_rounding": "round",
        "mean": triple(merged["mean"], "preprocess_cfg.mean", source),
        "std": triple(merged["std"], "preprocess_cfg.std", source),
    }
    return validated(config, source)


CONFIG = "open_clip_config.json"
_PROCESSOR = processor(None)


def preprocess(configs: Configs, encoder: EncoderConfig) -> Preprocessing | None:
    """OpenCLIP's own config, else a processor of transformers."""
    if CONFIG in configs:
        return Preprocessing(from_open_clip(configs[CONFIG]), CONFIG)
    return _PROCESSOR(configs, encoder)


TEXT_HALF = (
    *(r"text\..*", r"transformer\.resblocks\..*", r"token_embedding\.weight", r"attn_mask"),
    *(r"positional_embedding", r"ln_final\.(weight|bias)", r"text_projection(\.(weight|bias))?"),
    r"logit_(scale|bias)",
)
FIXED = {
    "patch_bias": False,
    "position": "learned",
    **table_resize("bicubic_antialias", "model"),
}
UNUSED = (
    *("output_tokens", "patch_dropout", "timm_drop", "timm_drop_path", "timm_model_pretrained"),
    *("timm_pool", "timm_proj", "timm_proj_bias"),
)
"""Keys that are read elsewhere, or that change no number in eval mode."""
UNDER_A_TOWER = ("custom_text", "init_logit_bias", "init_logit_scale", "nonscalar_logit_scale")


def _block(root: str) -> str:
    return root + "transformer.resblocks.{i}."


def _renames(root: str) -> Renames:
    at = _block(root)
    return {
        "front_end.projection": root + "conv1",
        "front_end.prefix.cls": rows(root + "class_embedding"),
        "front_end.position.table": root + "positional_embedding",
        "front_end.norm": root + "ln_pre",
        **block(at, norm1="ln_1", proj="attn.out_proj", scale1="ls_1.gamma"),
        **block(at, norm2="ln_2", fc1="mlp.c_fc", fc2="mlp.c_proj", scale2="ls_2.gamma"),
        "vit.blocks.{i}.attention.qkv.weight": at + "attn.in_proj_weight",
        "vit.blocks.{i}.attention.qkv.bias": at + "attn.in_proj_bias",
        # The same norm stands before or after pooling; the config says where.
        "vit.norm": root + "ln_post",
        "pool_norm": root + "ln_post",
        "head.linear.weight": transposed(root + "proj"),
    }


def _heads(found: Mapping[str, Any]) -> int:
    return int(found["hidden"]) // int(found["_head_width"])


def _activation(found: Mapping[str, Any]) -> str:
    return "quick_gelu" if found["_quick_gelu"] else str(found["_gelu"])


def _gelu(kwargs: Any) -> str:
    """nn.GELU's arguments."""
    return {"none": "gelu", "tanh": "gelu_tanh"}[dict(kwargs or {}).get("approximate", "none")]


def _eps(kwargs: Any) -> float:
    """nn.LayerNorm's arguments."""
    (eps,) = ({"eps": 1e-5} | dict(kwargs or {})).values()
    return float(eps)


def _model_and_vision(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    model = dict(config["model_cfg"])
    vision = dict(model.pop("vision_cfg"))
    for other in ("text_cfg", "multimodal_cfg"):
        model.pop(other, None)
    return model, vision


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    model, vision = _model_and_vision(config)
    if vision.get("quick_gelu") or (model.get("quick_gelu") and vision.get("act_kwargs")):
        raise ValueError("QuickGELU takes no act_kwargs")
    return model | vision


def _tower(name: str, root: str) -> Family:
    return Family(
        name=name,
        library="open_clip",
        preprocess=preprocess,
        verified="tiny random models, from files with and without config",
        signature=(
            root + "class_embedding",
            root + "conv1.weight",
            _block(root) + "attn.in_proj_weight",
        ),
        absent=("input_resolution", root + "attn_pool.probe"),
        distinguished_by=("position", "learned"),
        renames=_renames(root),
        drops=TEXT_HALF if root else (),
        settings={
            "embed_dim": To("head_out", int),
            "layers": To("depth", int, default=12),
            "width": To("hidden", default=768),
            "head_width": To("_head_width", int, default=64),
            "patch_size": To("patch_size", side, default=16),
            "image_size": To("image_size", size, default=(224, 224)),
            "quick_gelu": To("_quick_gelu", bool, default=False),
            "act_kwargs": To("_gelu", _gelu, default="gelu"),
            "norm_kwargs": To("norm_eps", _eps, default=1e-5),
            "no_ln_pre": To("ln_pre", {True: False, False: True}),
            "pool_type": To("pooling", {"tok": "cls", "avg": "mean"}, default="cls"),
            "final_ln_after_pool": To("_ln_after_pool", bool, default=False),
            "attentional_pool": only(False),
            "block_type": only("default"),
        },
        ignored=(
            *UNDER_A_TOWER,
            *("attn_pooler_heads", "attn_pooler_queries", "ls_init_value", "mlp_ratio"),
            "pos_embed_type",
            *UNUSED,
        ),
        decides={
            **FIXED,
            "head": "projection",
            "heads": _heads,
            "activation": _activation,
            "pool_norm": lambda found: found["_ln_after_pool"],
            "final_norm": lambda found: not found["pool_norm"],
        },
        needs=("heads", "norm_eps", "activation", "pooling", "pool_norm"),
        unproven=("position",),
        flatten=_flat,
        config_file=CONFIG,
    )


def _openai_preprocess(configs: Configs, encoder: EncoderConfig) -> Preprocessing:
    """What its archives' own code does, which knows no other file."""
    config = PreprocessConfig(
        resize="shortest",
        resize_size=encoder.image_size,
        filter="bicubic",
        crop_size=encoder.image_size,
        crop_rounding="round",
        mean=CLIP["mean"],
        std=CLIP["std"],
    )
    return _PROCESSOR(configs, encoder) or Preprocessing(config, "family openai-clip")


# The scalars are those of OpenAI's archives, whose code knows one head width and one activation,
# and reads LN(CLS); it takes no other image size, so the resize is OpenCLIP's.
OPENAI = replace(
    _tower("openai-clip", "visual."),
    library="openai clip",
    verified="tiny random models of open_clip under OpenAI's names",
    signature=("input_resolution", "visual.class_embedding", "visual.conv1.weight"),
    absent=(),
    distinguished_by=None,
    drops=(*TEXT_HALF, "input_resolution", "context_length", "vocab_size"),
    settings={},
    ignored=(),
    flatten=None,
    config_file="",
    decides={
        **FIXED,
        "head": "projection",
        "heads": lambda found: found["hidden"] // 64,
        "norm_eps": 1e-5,
        "activation": "quick_gelu",
        "pooling": "cls",
        "pool_norm": True,
        "final_norm": False,
    },
    needs=(),
    unproven=(),
    preprocess=_openai_preprocess,
)


def _timm_flat(kind: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    flatten = timm.flattened(kind)

    def flat(config: Mapping[str, Any]) -> dict[str, Any]:
        model, vision = _model_and_vision(config)
        pool, projection = vision.get("timm_pool", "avg"), vision.get("timm_proj", "linear")
        # With a projection of its own, OpenCLIP leaves the model's pooling where it names none.
        own = {} if projection in ("linear", "mlp") and not pool else {"global_pool": pool}
        # OpenCLIP projects, unless the model's own classifier does; "none" leaves both out.
        width = {} if projection == "none" else {"embed_dim": model["embed_dim"]}
        head = {"linear": "projection", "none": "none"}.get(projection or "", "linear")
        if projection == "linear" and vision.get("timm_proj_bias"):
            head = "linear"
        if projection == "mlp":
            raise ValueError("timm_proj 'mlp'")
        read = {"architecture": vision.pop("timm_model_name"), "model_args": own}
        model.pop("embed_dim")
        about = {"head": head, **width}
        return {
            **model,
            **vision,
            **flatten(read),
            **{f"open_clip.{k}": v for k, v in about.items()},
        }

    return flat


def _around(family: Family, name: str, kind: str) -> Family:
    return replace(
        family,
        name=name,
        library="open_clip",
        preprocess=preprocess,
        verified="tiny random models, from files with config",
        prefixes=("visual.trunk.",),
        drops=TEXT_HALF,
        settings={
            **family.settings,
            "open_clip.head": To("head"),
            "open_clip.embed_dim": To("head_out", int),
        },
        ignored=(
            *family.ignored,
            *UNDER_A_TOWER,
            "image_size",  # the table's own size counts
            "quick_gelu",  # timm's models keep their own activation
            *UNUSED,
        ),
        config_file=CONFIG,
        flatten=_timm_flat(kind),
        variants=(
            *(v for v in family.variants if v not in (timm.CLASSIFIER, timm.NO_CLASSIFIER)),
            Variant(when=("head.weight",), renames={"head.linear": "head"}),
            Variant(unless=("head.weight",), renames={"head.linear": "visual.head.proj"}),
        ),
    )


# Facebook's own Perception Encoder: these names, around queries and keys that are rotated.
_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1536: 16}
"""Heads by the width of the released models; of another width they are asked for."""


def _perception_pixels(configs: Configs, encoder: EncoderConfig) -> Preprocessing:
    """What get_image_transform of its own code does by default."""
    size = encoder.image_size
    config = PreprocessConfig(
        resize="squash", resize_size=size, filter="bilinear", mean=HALF["mean"], std=HALF["std"]
    )
    return Preprocessing(config, "family perception-encoder")


def _perception(root: str, core: bool) -> Family:
    """The core models have a pooling of their own kind; without it names do not show rotations."""
    pool = root + "attn_pool."
    shared = root + "conv1.weight", root + "ln_pre.weight", _block(root) + "attn.in_proj_weight"
    told_apart = root + "ln_post.weight", pool + "probe"
    return Family(
        name="perception-encoder" if core else "perception-encoder-unpooled",
        library="facebookresearch perception_models",
        preprocess=_perception_pixels,
        verified="tiny random models of timm under the original's names",
        signature=(*shared, *told_apart) if core else shared,
        absent=() if core else (*told_apart, "input_resolution"),
        distinguished_by=None if core else ("position", "learned+rope2d"),
        renames={
            **_renames(root),
            **probe_pooling(pool, "attn.", "mlp.c_fc", "mlp.c_proj"),
        },
        drops=TEXT_HALF if root else (),
        decides={
            "patch_bias": False,
            "position": "learned+rope2d",
            **table_resize("bilinear", "model"),
            "rope.theta": 10000.0,
            "rope.coordinates": "index",
            "rope.layout": "interleaved",
            "rope.first_axis": "columns",
            "rope.offset": lambda found: float(found["cls_token"]),  # CLS is at (0, 0)
            "heads": lambda found: _HEADS[found["hidden"]],
            "norm_eps": 1e-5,
            "activation": "gelu",
            "final_norm": core,
            "pool_norm": False,
            "pooling": "map" if core else "none",
            "head": "projection" if core else "none",
            **({"pool_heads": 8} if core else {"head_out": None}),
        },
        needs=("heads",),
        unproven=() if core else ("position",),
        variants=(
            Variant(
                when=(pool + "probe", root + "class_embedding"), settings={"pool_prefix": True}
            ),
        ),
    )


FAMILIES = (
    _around(timm.VIT, "open-clip-timm-vit", "vision_transformers"),
    _around(timm_eva.EVA, "open-clip-timm-eva", "evas"),
    _around(timm_eva.EVA02, "open-clip-timm-eva02", "evas"),
    _around(timm_eva.PERCEPTION, "open-clip-timm-pe", "perception_encoders"),
    OPENAI,
    *(_perception(root, core) for root in ("visual.", "") for core in (True, False)),
    _tower("open-clip", "visual."),
    _tower("open-clip-tower", ""),
)
