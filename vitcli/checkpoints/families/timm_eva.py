"""timm's Eva (DINOv3, ViTs with RoPE, EVA, EVA-02, the Perception Encoder), BEiT and Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vitcli.checkpoints.families.hf_vit import GATED
from vitcli.checkpoints.families.timm import (
    ABSENT,
    ACTIVATIONS,
    BIASES,
    BLOCK,
    CLASSIFIER,
    GAMMA_SCALES,
    IGNORED,
    LAYER_SCALE,
    LIBRARY,
    MAP,
    NO_CLASSIFIER,
    QKV,
    RENAMES,
    RESIZE,
    SETTINGS,
    SIGNATURE,
    SPLIT_GATE,
    anywhere,
    flattened,
    patch_bias,
    preprocess,
)
from vitcli.checkpoints.family import (
    Family,
    From,
    FromTensor,
    Renames,
    To,
    Variant,
    flag,
    fused,
    no_key_bias,
    only,
    size,
    table_resize,
    without,
)

ROPE_COORDINATES = {"dinov3": "centered", "cat": "reference", "index": "index"}
SHARED_SETTINGS = {
    **SETTINGS,
    "num_reg_tokens": To("registers"),
    "use_pre_transformer_norm": To("ln_pre", flag),
    "swiglu_mlp": To("mlp", GATED),
}
UNSUPPORTED = {
    "attn_only_layer_scale": only(False),
    "attn_type": only("eva"),
    "num_kv_heads": only(),
    "rope_grid_indexing": only("ij"),
    "rope_grid_offset": only(0, 0.0),
    "use_post_norm": only(False),
}
ROPE_SETTINGS = anywhere(
    rope_type=To("rope.coordinates", ROPE_COORDINATES),
    rope_temperature=To("rope.theta", float),
    rope_layout=To("rope.layout"),
    rope_rotate_half=To("rope.layout", {True: "half", False: "interleaved"}),
    ref_feat_shape=To("rope.reference_grid", size),
    scale_attn_inner=To("attention.inner_norm", flag),
    scale_mlp=To("mlp_norm", flag),
    use_abs_pos_emb=To("_table", flag),
    use_rot_pos_emb=To("_turned", flag),
)
EVA_IGNORED = (
    *(*IGNORED, "head_init_scale", "qkv_fused", "swiglu_align_to", "use_fc_norm"),
    "use_post_transformer_norm",
    # move the coordinates while training only
    *("rope_jitter_coords", "rope_rescale_coords", "rope_shift_coords"),
)
ATTENTION = BLOCK + "attn."
MLP_NORM: Renames = {"vit.blocks.{i}.feed_forward.norm": BLOCK + "mlp.norm"}
EVA_VARIANTS = (
    CLASSIFIER,
    NO_CLASSIFIER,
    GAMMA_SCALES,
    SPLIT_GATE,
    Variant(when=(BLOCK + "mlp.norm.weight",), renames=MLP_NORM),
    Variant(
        when=(ATTENTION + "q_bias",),
        renames=no_key_bias(ATTENTION + "qkv.weight", ATTENTION + "q_bias", ATTENTION + "v_bias"),
    ),
)


def _position(found: Mapping[str, Any]) -> str:
    """A table on the tokens, rotations of queries and keys, or both (EVA-02)."""
    kinds = (found["_table"] and "learned", found["_turned"] and "rope2d")
    return "+".join(kind for kind in kinds if kind) or "none"


def _where_turned(default: Any) -> Callable[[Mapping[str, Any]], Any]:
    """`default` where nothing turns; what turns has to be said."""

    def read(found: Mapping[str, Any]) -> Any:
        if "rope" in found["position"]:
            raise KeyError("rope")
        return default

    return read


def gated_activation(found: Mapping[str, Any]) -> str:
    """Separate or packed, a gated MLP here is SwiGLU; the plain one is always exact GELU."""
    return "silu" if found["mlp"] == "gated" else "gelu"


def _unscaled(found: Mapping[str, Any]) -> tuple[int, int]:
    """Coordinates that are scaled to a grid need one that is said; others read none."""
    if found["rope.coordinates"] == "reference":
        raise KeyError("rope.reference_grid")
    return 16, 16


ROPE = Family(
    name="timm-eva-rope",
    library=LIBRARY,
    preprocess=preprocess,
    verified="tiny random models, from files with and without config.json",
    signature=("patch_embed.proj.weight", BLOCK + "attn.qkv.weight", BLOCK + "gamma_1"),
    absent=("pos_embed", "rope.freqs", *BIASES),
    renames={**RENAMES, **QKV},
    settings={
        **SHARED_SETTINGS,
        **UNSUPPORTED,
        **ROPE_SETTINGS,
        "attn_type": only("eva", "rope"),
        "architecture.rope_grid_indexing": To("rope.first_axis", {"xy": "columns"}, default="rows"),
        **anywhere(use_abs_pos_emb=only(False), use_rot_pos_emb=only(True)),
    },
    ignored=EVA_IGNORED,
    decides={
        "position": "rope2d",
        "activation": gated_activation,
        "patch_bias": patch_bias,
        "rope.reference_grid": _unscaled,
    },
    needs=(
        *("heads", "norm_eps", "pooling", "rope.coordinates", "rope.theta", "rope.layout"),
        *("rope.reference_grid", "rope.first_axis"),
    ),
    packed_gate=True,
    flatten=flattened("evas"),
    variants=EVA_VARIANTS,
)
# The same with a table besides; its names are DeiT III's too, so that one comes first.
ROPE_TABLE = replace(
    ROPE,
    name="timm-eva-rope-table",
    signature=(*ROPE.signature, "pos_embed"),
    absent=("rope.freqs", "norm_pre.weight", BLOCK + "attn.q_bias"),
    settings={**ROPE.settings, **anywhere(use_abs_pos_emb=only(True))},
    decides={**ROPE.decides, **RESIZE, "position": "learned+rope2d"},
    unproven=("position",),
    any_prefix_rows=True,
)
# Learned frequencies in each block and head, of columns first; with and without a table.
FREQUENCIES = From(("rope.freqs",), lambda t: t.flip(0))
MIXED = replace(
    ROPE,
    name="timm-eva-rope-mixed",
    verified="tiny random models, from files with config.json",
    signature=(*ROPE.signature, "rope.freqs"),
    absent=("pos_embed",),
    renames={**ROPE.renames, "front_end.position.frequencies": FREQUENCIES},
    settings={
        **without(ROPE.settings, *anywhere(rope_layout=only())),
        "rope_rotate_half": only(False),
        **anywhere(rope_type=only("mixed"), rope_grid_indexing=only("xy")),
    },
    ignored=(*EVA_IGNORED, "ref_feat_shape", "rope_grid_offset"),
    decides={"position": "mixed_rope2d", "activation": gated_activation, "patch_bias": patch_bias},
    needs=("heads", "norm_eps", "pooling"),
    from_tensors={"heads": FromTensor("rope.freqs", lambda t: t.shape[2])},
)
MIXED_TABLE = replace(
    MIXED,
    name="timm-eva-rope-mixed-table",
    signature=(*MIXED.signature, "pos_embed"),
    absent=(),
    renames={**ROPE.renames, "front_end.position.rope.frequencies": FREQUENCIES},
    settings={**MIXED.settings, **anywhere(use_abs_pos_emb=only(True))},
    decides={**MIXED.decides, **RESIZE, "position": "learned+mixed_rope2d"},
    any_prefix_rows=True,
)
# EVA, and the small ones of EVA-02, whose table has RoPE besides: the names are the same.
EVA = Family(
    name="timm-eva",
    library=LIBRARY,
    preprocess=preprocess,
    verified="tiny random models, from files with config.json",
    signature=(
        "patch_embed.proj.weight",
        "pos_embed",
        BLOCK + "attn.qkv.weight",
        BLOCK + "attn.q_bias",
        BLOCK + "mlp.fc1.bias",
    ),
    renames={**RENAMES, **QKV},
    settings={**SHARED_SETTINGS, **UNSUPPORTED, **ROPE_SETTINGS},
    ignored=EVA_IGNORED,
    decides={
        **RESIZE,
        "patch_bias": patch_bias,
        "position": _position,
        "rope.coordinates": _where_turned("index"),
        "rope.theta": _where_turned(10000.0),
        "rope.layout": _where_turned("interleaved"),
        "rope.reference_grid": _where_turned((16, 16)),
        "activation": gated_activation,
    },
    needs=(
        *("heads", "norm_eps", "pooling", "position", "rope.coordinates", "rope.theta"),
        *("rope.layout", "rope.reference_grid"),
    ),
    unproven=("norm_placement",),  # the enormous one is post-norm, under the same names
    packed_gate=True,
    flatten=flattened("evas"),
    any_prefix_rows=True,
    variants=EVA_VARIANTS,
)
# The larger ones of EVA-02: q, k and v apart, norms within the MLP and, for CLIP, the attention.
APART = tuple(f"{BLOCK}attn.{part}_proj" for part in "qkv")
EVA02 = replace(
    EVA,
    name="timm-eva02",
    signature=("patch_embed.proj.weight", APART[1] + ".weight", BLOCK + "norm1.weight"),
    renames={
        **EVA.renames,
        **no_key_bias(
            fused(*(part + ".weight" for part in APART)), APART[0] + ".bias", APART[2] + ".bias"
        ),
        "vit.blocks.{i}.attention.norm": BLOCK + "attn.norm",
    },
)
# The Perception Encoder: core, lang and spatial, alone or in Perception LM.
# The names are those of a CLIP by timm, whose queries and keys are not rotated.
PERCEPTION = Family(
    name="timm-pe",
    library=LIBRARY,
    preprocess=preprocess,
    verified="tiny random models, from files with and without config.json; also in Perception LM",
    signature=("norm_pre.weight", "pos_embed", *SIGNATURE),
    absent=(*ABSENT, "rope.freqs"),
    distinguished_by=("position", "learned+rope2d"),
    prefixes=("", "timm_model."),
    renames={**RENAMES, **QKV, **MAP},
    settings={
        **SHARED_SETTINGS,
        **UNSUPPORTED,
        **ROPE_SETTINGS,
        "attn_type": only("rope"),
        **anywhere(
            rope_grid_offset=To("rope.offset", float),
            rope_grid_indexing=To("rope.first_axis", {"ij": "rows", "xy": "columns"}),
            attn_pool_num_heads=To("pool_heads"),
        ),
        "use_abs_pos_emb": only(True),
        "use_rot_pos_emb": only(True),
    },
    ignored=(*EVA_IGNORED, "attn_pool_mlp_ratio", "do_pooling"),
    decides={
        **RESIZE,
        "patch_bias": patch_bias,
        "position": "learned+rope2d",
        "activation": gated_activation,
    },
    needs=(
        *("heads", "norm_eps", "pooling", "rope.coordinates", "rope.theta", "rope.layout"),
        *("rope.reference_grid", "rope.offset", "rope.first_axis"),
    ),
    unproven=("position",),
    packed_gate=True,
    flatten=flattened("perception_encoders"),
    any_prefix_rows=True,
    variants=(
        *EVA_VARIANTS,
        Variant(when=("attn_pool.latent",), unproven=("pool_heads",)),
        Variant(when=("attn_pool.latent", "cls_token"), settings={"pool_prefix": True}),
    ),
)
# BEiT and timm's own ViTs with biases in each block by a table of offsets.
TABLE = BIASES[0]
BEIT = Family(
    name="timm-beit",
    library=LIBRARY,
    preprocess=preprocess,
    verified="tiny random models, from files with config.json",
    signature=("cls_token", *SIGNATURE, TABLE),
    renames={**RENAMES, **QKV, "front_end.position.tables.{i}": TABLE},
    drops=(r"blocks\.\d+\.attn\.relative_position_index",),
    settings={
        **SETTINGS,
        "swiglu_mlp": To("mlp", GATED),
        "scale_mlp": To("mlp_norm", flag),
        "use_abs_pos_emb": only(False),
        "use_rel_pos_bias": only(True),
        "use_shared_rel_pos_bias": only(False),
    },
    ignored=(*IGNORED, "head_init_scale", "use_fc_norm"),
    decides={
        "position": "relative2d",
        **table_resize("geometric", "float32"),
        "activation": gated_activation,
    },
    needs=("heads", "norm_eps", "pooling", "image_size"),
    flatten=flattened("beits"),
    from_tensors={"heads": FromTensor(TABLE, lambda t: t.shape[1])},
    variants=EVA_VARIANTS,
)
RELPOS = replace(
    BEIT,
    name="timm-relpos",
    signature=(*SIGNATURE, BIASES[1]),
    renames={**RENAMES, **QKV, **LAYER_SCALE, "front_end.position.tables.{i}": BIASES[1]},
    drops=(),
    settings={
        **SETTINGS,
        "act_layer": To("activation", ACTIVATIONS),
        **anywhere(rel_pos_type=only("bias")),
        "shared_rel_pos": only(False),
    },
    ignored=(*IGNORED, "fc_norm", "fix_init", "rel_pos_dim", "weight_init"),
    decides={**BEIT.decides, "activation": "gelu"},
    flatten=flattened("relative"),
    from_tensors={"heads": FromTensor(BIASES[1], lambda t: t.shape[1])},
    variants=(CLASSIFIER, NO_CLASSIFIER),
)
# The tower of Qwen3-VL and 3.5 with its merger.
QWEN3 = Family(
    name="timm-qwen3",
    library=LIBRARY,
    preprocess=preprocess,
    verified="tiny random models, from files with config.json",
    signature=(*SIGNATURE, "pos_embed", "merger.norm.weight", "merger.fc2.weight"),
    renames={
        **without(RENAMES, "front_end.norm", "vit.norm"),
        **QKV,
        **{f"head.{part}": f"merger.{part}" for part in ("norm", "fc1", "fc2")},
    },
    settings={
        **{k: to for k, to in SETTINGS.items() if "pool" not in k and k != "img_size"},
        "norm_eps": To("norm_eps", float),
        "global_pool": only("merge"),
        "merge_size": only(2),
        **anywhere(pos_embed_grid_size=To("_side"), rope_temperature=To("rope.theta", float)),
    },
    ignored=(*IGNORED, "img_size", "out_features"),
    decides={
        "position": "learned+rope2d",
        **table_resize("bilinear_align_corners", "float32"),
        "rope.coordinates": "index",
        "rope.layout": "half",
        "activation": "gelu_tanh",
        "pooling": "none",
        "head": "merger",
        "image_size": lambda found: (found["_side"] * found["patch_size"],) * 2,
    },
    needs=("heads", "norm_eps", "rope.theta", "image_size"),
    flatten=flattened("qwen3_encoders"),
)
FAMILIES = (PERCEPTION, QWEN3, BEIT, RELPOS, MIXED, MIXED_TABLE, ROPE, EVA, EVA02)
