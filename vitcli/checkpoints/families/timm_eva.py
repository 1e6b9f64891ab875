"""timm's Eva: DINOv3, the ViTs with RoPE in place of a table, and EVA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.families import hugging_face, timm
from vitcli.checkpoints.families.hugging_face import size
from vitcli.checkpoints.families.timm_architectures import EVAS
from vitcli.checkpoints.family import Family, To, Variant, fused, only

ROPE_COORDINATES = {"dinov3": "centered", "cat": "reference"}
SHARED_SETTINGS = {
    **timm.SETTINGS,
    "num_reg_tokens": To("registers"),
    "use_pre_transformer_norm": To("ln_pre", hugging_face.flag),
    "swiglu_mlp": To("mlp", {True: "gated", False: "plain"}),
}
UNSUPPORTED = {
    "attn_only_layer_scale": only(False),
    "attn_type": only("eva"),
    "num_kv_heads": only(),
    "qkv_fused": only(True),
    "rope_grid_indexing": only("ij"),
    "rope_grid_offset": only(0, 0.0),
    "scale_attn_inner": only(False),
    "scale_mlp": only(False),
    "use_post_norm": only(False),
}
ROPE_SETTINGS = {
    f"{where}{key}": to
    for where in ("architecture.", "")
    for key, to in {
        "rope_type": To("rope.coordinates", ROPE_COORDINATES),
        "rope_temperature": To("rope.theta", float),
        "ref_feat_shape": To("rope.reference_grid", size),
    }.items()
}
IGNORED = (
    *hugging_face.IGNORED,
    *timm.IGNORED,
    "head_init_scale",
    "swiglu_align_to",
    "use_fc_norm",
    "use_post_transformer_norm",
    # move the coordinates while training only
    "rope_jitter_coords",
    "rope_rescale_coords",
    "rope_shift_coords",
)
VARIANTS = (
    timm.CLASSIFIER,
    timm.NO_CLASSIFIER,
    Variant(when=(timm.BLOCK + "gamma_1",), renames=timm.GAMMAS),
    Variant(
        when=(timm.BLOCK + "mlp.fc1_g.weight",),
        renames={
            "vit.blocks.{i}.feed_forward.fc1": fused(
                timm.BLOCK + "mlp.fc1_g", timm.BLOCK + "mlp.fc1_x"
            )
        },
    ),
    Variant(
        when=(timm.BLOCK + "attn.q_bias",),
        renames={
            "vit.blocks.{i}.attention.qkv": None,
            "vit.blocks.{i}.attention.qkv.weight": timm.BLOCK + "attn.qkv.weight",
            "vit.blocks.{i}.attention.qkv.q_bias": timm.BLOCK + "attn.q_bias",
            "vit.blocks.{i}.attention.qkv.v_bias": timm.BLOCK + "attn.v_bias",
        },
    ),
)


def _activation(told: Mapping[str, Any]) -> str:
    """Separate or packed, a gated MLP here is SwiGLU; the plain one is always exact GELU."""
    return "silu" if told["mlp"] == "gated" else "gelu"


ROPE = Family(
    name="timm-eva-rope",
    library=timm.LIBRARY,
    verified="tiny random models, from files with and without config.json",
    signature=(
        "patch_embed.proj.weight",
        timm.BLOCK + "attn.qkv.weight",
        timm.BLOCK + "gamma_1",
    ),
    absent=("pos_embed", "rope.freqs"),
    renames={**timm.RENAMES, **timm.QKV},
    settings={
        **SHARED_SETTINGS,
        **UNSUPPORTED,
        **ROPE_SETTINGS,
        "architecture.rope_layout": To("rope.layout"),
        "rope_rotate_half": To("rope.layout", {True: "half", False: "interleaved"}),
        "use_abs_pos_emb": only(False),
        "use_rot_pos_emb": only(True),
    },
    ignored=IGNORED,
    fixed={"position": "rope2d", "activation": _activation, "patch_bias": timm.patch_bias},
    needs=("heads", "norm_eps", "pooling", "rope.coordinates", "rope.theta", "rope.layout"),
    flatten=timm.flattened(EVAS),
    variants=VARIANTS,
)
# EVA-02 has a table as well, with RoPE besides: its gated MLP keeps it from being taken for EVA.
EVA = Family(
    name="timm-eva",
    library=timm.LIBRARY,
    verified="tiny random models, from files with config.json",
    signature=(
        "patch_embed.proj.weight",
        "pos_embed",
        timm.BLOCK + "attn.qkv.weight",
        timm.BLOCK + "attn.q_bias",
        timm.BLOCK + "mlp.fc1.bias",
    ),
    renames={**timm.RENAMES, **timm.QKV},
    settings={
        **SHARED_SETTINGS,
        **UNSUPPORTED,
        "use_abs_pos_emb": only(True),
        "use_rot_pos_emb": only(False),
    },
    ignored=IGNORED,
    fixed={
        **timm.RESIZE,
        "patch_bias": timm.patch_bias,
        "position": "learned",
        "activation": "gelu",
        "mlp": "plain",
    },
    needs=("heads", "norm_eps", "pooling"),
    flatten=timm.flattened(EVAS),
    any_prefix_rows=True,
    variants=VARIANTS,
)
FAMILIES = (ROPE, EVA)
