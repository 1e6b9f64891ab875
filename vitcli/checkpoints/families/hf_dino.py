"""DINOv2, with and without registers, DINOv3, TIPS v2 and RADIO as transformers stores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vitcli.checkpoints.families import timm
from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.families.hf_vit import (
    BACKBONE,
    GATED,
    IGNORED,
    LIBRARY,
    MASK_TOKEN,
    QKV,
    SETTINGS,
    TABLE_IN_FLOAT32,
    TINY,
    keys,
)
from vitcli.checkpoints.family import (
    Configs,
    Family,
    From,
    FromTensor,
    Renames,
    To,
    Variant,
    block,
    conv_from_flat,
    flag,
    fused,
    no_key_bias,
    only,
    rows,
    table_resize,
    without,
)
from vitcli.checkpoints.preprocessing import (
    CLIP,
    Preprocessing,
)
from vitcli.checkpoints.tower import tower_config
from vitcli.config.schema import EncoderConfig

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
    **block(
        BLOCK,
        norm1="norm1",
        qkv=QKV,
        proj="attention.output.dense",
        scale1="layer_scale1.lambda1",
        norm2="norm2",
        fc1="mlp.fc1",
        fc2="mlp.fc2",
        scale2="layer_scale2.lambda1",
    ),
    "vit.norm": "layernorm",
}
SILU = {"activation": "silu"}  # whatever hidden_act says
APART = ("mlp.gate_proj", "mlp.up_proj")
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
    drops=(MASK_TOKEN,),
    settings={
        **SETTINGS,
        **keys("qkv_bias", "layerscale_value", "use_swiglu_ffn", layer_norm_eps=1e-6),
    },
    ignored=(*IGNORED, *BACKBONE, "mlp_ratio", "use_mask_token"),
    decides={**TABLE_IN_FLOAT32, "pooling": "cls"},
    variants=(
        Variant(
            when=(BLOCK + "mlp.weights_in",),
            settings={"mlp": "gated", **SILU},
            renames=block(BLOCK, fc1="mlp.weights_in", fc2="mlp.weights_out"),
        ),
        Variant(
            when=(BLOCK + "mlp.gate_proj",),
            settings=SILU,
            renames=block(BLOCK, fc1=APART, fc2="mlp.weights_out"),
        ),
        Variant(
            when=("classifier",),
            settings={"pooling": "cls+mean", "head": "linear"},
            renames={"head.linear": "classifier"},
        ),
    ),
)
DINOV2_REGISTERS = replace(
    DINOV2,
    name="hf-dinov2-registers",
    verified=TINY,
    model_types=("dinov2_with_registers", "dinov2"),
    remarks={
        "dinov2": "model_type dinov2 with registers is remote code: position table resized as "
        "transformers' dinov2_with_registers does it"
    },
    signature=(*DINOV2.signature, "embeddings.register_tokens"),
    absent=(),
    prefixes=("", "dinov2_with_registers."),
    renames={**RENAMES, "front_end.prefix.registers": rows("embeddings.register_tokens")},
    settings={
        **DINOV2.settings,
        **keys("num_register_tokens"),
        "interpolate_antialias": only(True),
        "interpolate_offset": only(0.0),
    },
    decides={**DINOV2.decides, "position_table.resize": "bicubic_antialias"},
)

LAYER = "layer.{i}."
V3_QKV = tuple(f"{LAYER}attention.{part}_proj" for part in "qkv")


def _same_bias(value: Any) -> None:
    """q, k and v biases are seen in the tensors; the key only has to be a flag."""
    flag(value)


DINOV3 = Family(
    name="hf-dinov3",
    library=LIBRARY,
    verified=TINY,
    model_types=("dinov3_vit",),
    preprocess=processor("DINOv3ViTImageProcessor"),
    signature=(LAYER + "layer_scale1.lambda1", V3_QKV[0] + ".weight"),
    absent=("embeddings.position_embeddings",),
    aliases=((r"^model\.layer\.", "layer."),),
    renames={
        "front_end.projection": "embeddings.patch_embeddings",
        "front_end.prefix.cls": rows("embeddings.cls_token"),
        "front_end.prefix.registers": rows("embeddings.register_tokens"),
        **block(
            LAYER,
            norm1="norm1",
            qkv="attention.*_proj",
            proj="attention.o_proj",
            scale1="layer_scale1.lambda1",
            norm2="norm2",
            fc1="mlp.up_proj",
            fc2="mlp.down_proj",
            scale2="layer_scale2.lambda1",
        ),
        "vit.norm": "norm",
    },
    drops=(MASK_TOKEN, r"rope_embeddings\.inv_freq"),
    settings={
        **SETTINGS,
        **keys("intermediate_size", "layerscale_value", "num_register_tokens"),
        **keys(num_attention_heads=6, layer_norm_eps=1e-5, rope_theta=100.0),
        "use_gated_mlp": To("mlp", GATED),
        **dict.fromkeys(("query_bias", "key_bias", "value_bias"), To(None, _same_bias)),
        **dict.fromkeys(("proj_bias", "mlp_bias"), only(True)),
    },
    # Shift, jitter and rescale move the coordinates while training only.
    ignored=(
        *(*IGNORED, *BACKBONE),
        *("pos_embed_jitter", "pos_embed_rescale", "pos_embed_shift"),
    ),
    decides={
        "pooling": "cls",
        "position": "rope2d",
        "rope.coordinates": "centered",
        "rope.layout": "half",
    },
    needs=("heads", "norm_eps", "activation", "rope.theta"),
    variants=(
        Variant(when=(LAYER + "mlp.gate_proj",), renames=block(LAYER, fc1=APART)),
        Variant(
            when=(V3_QKV[0] + ".bias", V3_QKV[2] + ".bias"),
            unless=(V3_QKV[1] + ".bias",),
            renames=no_key_bias(
                fused(*(p + ".weight" for p in V3_QKV)), V3_QKV[0] + ".bias", V3_QKV[2] + ".bias"
            ),
        ),
    ),
)
# TIPS v2, in whose files DINOv2's encoder has the names of its own authors
TIPS_V2 = Family(
    name="hf-tipsv2",
    library=LIBRARY,
    verified="tiny random models, from files; alone and with text",
    model_types=("tipsv2_vision_model",),
    preprocess=processor("Tipsv2ImageProcessor"),
    signature=("pos_embed", "register_tokens", timm.BLOCK + "ls1.gamma"),
    prefixes=("", "vision_encoder."),
    renames={
        **timm.RENAMES,
        **timm.QKV,
        **timm.LAYER_SCALE,
        "front_end.prefix.registers": rows("register_tokens"),
    },
    drops=(r"mask_token",),
    settings={**DINOV2.settings, **keys("num_register_tokens")},
    ignored=DINOV2.ignored,
    decides={**DINOV2.decides, "position_table.resize": "bilinear_antialias"},
    variants=(
        Variant(
            when=(timm.BLOCK + "mlp.c_fc",),
            renames=block(timm.BLOCK, fc1="mlp.c_fc", fc2="mlp.c_proj"),
        ),
        timm.PACKED_GATE,
    ),
)


# RADIO: several CLS tokens, of which the first is CLS here and the others are registers
def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(float(value), 5) for value in values)


def _whole_tokens(count: int) -> None:
    if count < 1:
        raise ValueError("at least one")


RADIO_HEADS = {
    "vit_small_patch16_224": 6,
    "vit_base_patch16_224": 12,
    "vit_large_patch16_224": 16,
    "vit_huge_patch16_224": 16,
}
"""The plain ViTs of timm that RADIO's own code builds on, by what its configs call them."""


def _radio_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers' config as it is; that of RADIO's own code in its words.

    Raises:
        ValueError: a ViT or a way to run it that is not known.
    """
    section = tower_config(config)[0]
    if "args" not in section:
        return section
    args = section["args"]
    for key in ("vitdet_window_size", "feature_normalizer_config", "video_temporal_patch_size"):
        if section.get(key) is not None:
            raise ValueError(f"{key} = {section[key]}")
    if args["model"] not in RADIO_HEADS:
        raise ValueError(f"args.model = {args['model']!r}")
    names = [t["name"] for t in args["teachers"] if t.get("use_summary", True)]
    per_teacher = args.get("cls_token_per_teacher", True)
    return {
        "num_attention_heads": RADIO_HEADS[args["model"]],
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "patch_size": section["patch_size"],
        "max_img_size": args["cpe_max_size"],
        "summary_idxs": list(range(len(set(names)))) if per_teacher else [0],
        "norm_mean": CLIP["mean"],
        "norm_std": CLIP["std"],
    }


_PIXELS = processor("CLIPImageProcessor")


def _radio_pixels(configs: Configs, encoder: EncoderConfig) -> Preprocessing | None:
    """The processor's pixels, normalized as the model itself does it."""
    prepared = _PIXELS(configs, encoder)
    model = _radio_settings(configs.get("config.json", {}))
    if prepared is None or not {"norm_mean", "norm_std"} <= model.keys():
        return None
    mean, std = prepared.config.mean, prepared.config.std
    update = {
        "mean": tuple(m + s * own for m, s, own in zip(mean, std, model["norm_mean"], strict=True)),
        "std": tuple(s * own for s, own in zip(std, model["norm_std"], strict=True)),
    }
    note = "normalized as config.json says (norm_mean, norm_std), which the library does within"
    config = prepared.config.model_copy(update=update)
    return replace(prepared, config=config, notes=(*prepared.notes, note))


RADIO_TOKENS = "patch_generator.cls_token.token"
RADIO = Family(
    name="hf-radio",
    library=LIBRARY,
    verified="tiny random models, from files; alone",
    model_types=("radio",),
    preprocess=_radio_pixels,
    signature=(RADIO_TOKENS, "patch_generator.pos_embed", timm.BLOCK + "attn.qkv.weight"),
    prefixes=("radio_model.model.",),
    aliases=((r"^radio_model\.", ""),),
    renames={
        **{ours: name for ours, name in timm.RENAMES.items() if not ours.startswith("front_end.")},
        **timm.QKV,
        **block(timm.BLOCK, scale1="layer_scale1.lambda1", scale2="layer_scale2.lambda1"),
        "front_end.projection.weight": conv_from_flat("patch_generator.embedder.weight"),
        "front_end.prefix.cls": From((RADIO_TOKENS,), lambda t: t[:1]),
        "front_end.prefix.registers": From((RADIO_TOKENS,), lambda t: t[1:]),
        "front_end.position.table": rows("patch_generator.pos_embed"),
    },
    drops=(r"patch_generator\.video_embedder\..*", r"input_conditioner\..*", r"summary_idxs"),
    settings={
        **without(SETTINGS, "image_size"),
        **keys("num_hidden_layers", "qkv_bias", "use_swiglu_ffn"),
        **keys(num_attention_heads=16, layer_norm_eps=1e-6),
        "max_img_size": To("image_size", SETTINGS["image_size"].read, default=(2048, 2048)),
        "layerscale_value": only(1.0),  # files leave it out, and then it is this value
        "num_cls_tokens": To(None, _whole_tokens),
        "summary_idxs": To("pooling", lambda which: "cls" if list(which) == [0] else "none"),
        "norm_mean": To("_norm_mean", _rounded),
        "norm_std": To("_norm_std", _rounded),
    },
    ignored=(
        *(*IGNORED, "image_size", "mlp_ratio", "num_registers", "patch_dim"),
        *("video_patch_dim", "video_temporal_patch_size"),
    ),
    decides={
        "patch_bias": False,
        "final_norm": False,
        "position": "learned",
        **table_resize("bilinear_cropped", "float32"),
    },
    any_prefix_rows=True,
    needs=("heads", "norm_eps", "activation", "pooling"),
    flatten=_radio_settings,
    from_tensors={
        f"_norm_{what}": FromTensor(
            f"input_conditioner.norm_{what}", lambda t: _rounded(t.read().flatten())
        )
        for what in ("mean", "std")
    },
    remarks={
        "radio": "the first CLS token is CLS, the others are registers; the summary "
        "is not joined (--tokens cls,register)"
    },
    variants=(
        Variant(
            when=(timm.BLOCK + "mlp.gate_proj",),
            settings=SILU,
            renames=block(timm.BLOCK, fc1=APART, fc2="mlp.down_proj"),
        ),
    ),
)
FAMILIES = (DINOV2, DINOV2_REGISTERS, DINOV3, RADIO)
